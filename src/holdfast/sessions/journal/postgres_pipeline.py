"""Statements on a connection to PostgreSQL that are sent together and answered together, by calls into libpq. Blocks.

Knows nothing of the journal. psycopg's own pipelines give up the GIL many times for each statement, and each time the
server's event loop wakes up, mostly in vain. Here that happens once for a statement, once for its answer, and in waits.
"""

import math
import select
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

T = TypeVar("T")

_Key = tuple[bytes, tuple[int, ...]]  # a query, and the types of its values

_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED)


class DatabaseSilent(psycopg.OperationalError):
    """The database did not answer in time. A link that is cut may never tell so."""


class Connection(psycopg.Connection[dict[str, Any]]):
    """In autocommit mode: transactions are begun by hand. Raises DatabaseSilent where nothing comes for `silence_s`,
    which may be infinite.

    `identity` tells it from all others that the server has had.
    """

    silence_s: float = 60.0
    identity: tuple[int, str] = (0, "")
    statements: "Statements"

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        return super().wait(self._bounded(gen), *args, **kwargs)

    def fall_silent(self) -> DatabaseSilent:
        """The error for a connection from which nothing came for too long, which is closed."""
        self.pgconn.finish()
        return DatabaseSilent(f"the database did not answer for {self.silence_s:g} seconds")

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        try:
            state = next(gen)
            heard_at = time.monotonic()
            while True:
                ready = yield state
                if ready:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > self.silence_s:
                    raise self.fall_silent()
                state = gen.send(ready)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class Statements:
    """Use it as a context, again and again; meanwhile the connection is not used otherwise. Leaving it waits for all
    answers. What a statement raises comes from the next call that waits for an answer: the database does nothing of
    the statements that follow it.
    """

    def __init__(self, connection: Connection) -> None:
        self.status = b""  # what the database said of the last statement that was answered, such as COMMIT
        self._connection = connection
        self._pgconn = connection.pgconn
        self._values = Transformer(connection)
        self._names: dict[_Key, bytes] = {}  # of prepared statements
        self._columns: dict[bytes, list[str]] = {}  # by the name of a prepared statement
        self._unanswered: deque[_Key | None] = deque()  # a key: of a statement that is being prepared
        self._num_prepared = 0
        self._poll = select.poll()

    def __enter__(self) -> "Statements":
        self._pgconn.enter_pipeline_mode()
        self._unanswered.clear()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        return self

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        try:
            self._end()
        except psycopg.Error:
            if exc is None:
                raise

    def send(self, query: bytes, values: Sequence[object] = ()) -> bytes:
        """Its answer is waited for later. Gives the name under which it is prepared."""
        dumped = self._values.dump_sequence(values, [PyFormat.AUTO] * len(values)) if values else ()
        types = self._values.types if values else ()
        key = (query, tuple(types or ()))
        name = self._names.get(key)
        if name is None:
            self._num_prepared += 1
            name = self._names[key] = b"holdfast_%d" % self._num_prepared
            self._pgconn.send_prepare(name, query, types)
            self._unanswered.append(key)
        self._pgconn.send_query_prepared(name, dumped, self._values.formats if values else None)
        self._unanswered.append(None)
        return name

    def select(self, query: bytes, values: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of the answer."""
        name = self.send(query, values)
        result = self._answer()
        columns = self._columns.get(name)
        if columns is None:
            found = (result.fname(index) or b"" for index in range(result.nfields))
            columns = self._columns[name] = [column.decode() for column in found]
        self._values.set_pgresult(result)
        return self._values.load_rows(0, result.ntuples, lambda row: dict(zip(columns, row, strict=True)))

    def _answer(self) -> PGresult:
        """To the last statement that was sent. Raises the error of the first one that failed."""
        self._pgconn.send_flush_request()
        self._flush()
        while self._unanswered:
            result = self._next()
            if result.status in _FAILED:
                raise error_from_result(result)
        return result

    def _end(self) -> None:
        failed: PGresult | None = None
        self._pgconn.pipeline_sync()
        self._flush()
        try:
            while (result := self._next()).status != ExecStatus.PIPELINE_SYNC:
                if result.status == ExecStatus.FATAL_ERROR:
                    failed = failed or result
            self._pgconn.exit_pipeline_mode()
        except psycopg.OperationalError:
            if failed is None:
                raise
        if failed is not None:
            raise error_from_result(failed)

    def _flush(self) -> None:
        """Send everything, and wait for the first of the answers that cannot have come before."""
        while self._pgconn.flush():
            self._wait(select.POLLIN | select.POLLOUT)
        self._wait(select.POLLIN)

    def _next(self) -> PGresult:
        """The next answer, whatever it says."""
        pgconn = self._pgconn
        while pgconn.is_busy():
            self._wait(select.POLLIN)
        result = pgconn.get_result()
        if result is None:
            raise psycopg.OperationalError("the connection is lost")
        if result.status != ExecStatus.PIPELINE_SYNC:
            pgconn.get_result()  # the end of this answer, which is there already
            prepared = self._unanswered.popleft()
            if prepared is not None and result.status in _FAILED:
                del self._names[prepared]
            self.status = result.command_status or b""
        return result

    def _wait(self, events: int) -> None:
        """Until there is something to be read, which is then read; or, where that is asked for, room to write."""
        socket = self._pgconn.socket
        if events != select.POLLIN:
            self._poll.modify(socket, events)
        silence_s = self._connection.silence_s
        ready = self._poll.poll(None if math.isinf(silence_s) else 1000 * silence_s)
        if events != select.POLLIN:
            self._poll.modify(socket, select.POLLIN)
        if not ready:
            raise self._connection.fall_silent()
        if ready[0][1] != select.POLLOUT:
            self._pgconn.consume_input()
