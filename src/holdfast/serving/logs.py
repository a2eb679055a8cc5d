"""What keeps the log safe from clients: repeated lines are limited, and metadata of gRPC calls is not in it."""

import logging
import time

_SECONDS = 60.0
_LINES = 30  # of one kind within that time


class RepeatLimit(logging.Filter):
    """A filter for a handler: of warnings and errors from one place in the code, at most `num_lines` pass a minute.

    The first line after that minute says how many were left out.
    """

    def __init__(self, num_lines: int = _LINES) -> None:
        super().__init__()
        self._num_lines = num_lines
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.pathname, record.lineno), time.monotonic()
        since, num = self._seen.get(place, (now, 0))
        if now - since >= _SECONDS:
            if num > self._num_lines:
                record.msg = f"{record.getMessage()} ({num - self._num_lines} more like this were not logged)"
                record.args = ()
            since, num = now, 0
        self._seen[place] = (since, num + 1)
        return num < self._num_lines


def hide_metadata() -> None:
    """Keep gRPC from logging metadata that is not UTF-8: it does so before anyone is authenticated, keys included."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_metadata)


def _is_not_metadata(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Invalid encoding")
