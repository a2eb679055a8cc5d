"""What a client may send, at both endpoints and in session files: how slowly, how many, how long."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sized
from typing import TypeVar

from holdfast.errors import InvalidArgument

T = TypeVar("T")

MAX_LABEL = 1000  # characters of a label or a group
MAX_NAME = 256  # characters of a key of metadata, of a tool, of a schema
MAX_VALUE = 4096  # characters of a value of metadata
MAX_ENTRIES = 64  # of metadata
MAX_IDS = 4096  # EOS or stop tokens
MAX_BIASES = 1 << 19  # biased tokens: more than any vocabulary has

_BYTES_PER_S = 4096


def check_label(field: str, label: str) -> None:
    _check(field, "characters", label, MAX_LABEL)


def check_ids(field: str, ids: Sized) -> None:
    _check(field, "token ids", ids, MAX_IDS)


def check_biases(field: str, biases: Sized) -> None:
    _check(field, "tokens", biases, MAX_BIASES)


def check_metadata(field: str, metadata: Mapping[str, str]) -> None:
    _check(field, "entries", metadata, MAX_ENTRIES)
    for key, value in metadata.items():
        _check(field, "characters in a key", key, MAX_NAME)
        _check(f"{field}.{key}", "characters", value, MAX_VALUE)


def _check(field: str, what: str, value: Sized, limit: int) -> None:
    if len(value) > limit:
        raise InvalidArgument(f"{field} may have at most {limit:,} {what}, got {len(value):,}", param=field)


class Pace:
    """How long a client may keep us waiting while it sends: every byte that arrives buys a little time.

    Only waiting counts: a client that we keep waiting loses nothing.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = self._left_s = patience_s

    async def wait_for(self, arrival: Awaitable[T]) -> T:
        """What arrives. TimeoutError where the client has used up its time."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                return await arrival
        finally:
            self._left_s -= time.monotonic() - started

    def received(self, num_bytes: int) -> None:
        self._left_s = min(self._patience_s, self._left_s + num_bytes / _BYTES_PER_S)
