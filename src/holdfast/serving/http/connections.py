"""Connections of the HTTP endpoint: how many there may be, how long without a request, and how long unread."""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.metrics import Metrics

logger = logging.getLogger(__name__)

_MANY_FILES = (65_536, 10_240)
_OTHER_FILES = 256  # descriptors for the journal, the model and the upstream
_MANY_CONNECTIONS = 10_000
_ROOM = 16  # idle connections that are closed where descriptors have run out
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: text/plain\r\ncontent-length: 20\r\n\r\ntoo many connections"
)


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _MANY_FILES:  # macOS allows less than it says
        num_files = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if soft == resource.RLIM_INFINITY or soft >= num_files:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
            return


def default_max_connections() -> int:
    """How many connections leave enough descriptors for everything else, the gRPC endpoint included."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _MANY_FILES[0] if soft == resource.RLIM_INFINITY else soft
    return max(16, min(_MANY_CONNECTIONS, (num_files - _OTHER_FILES) * 3 // 4))


class Connections:
    """All connections that were accepted. Those without a request are in order: the first has been idle longest.

    Where there are too many, that one is closed for a new one. A connection with a request is never closed for
    another; where all have one, new connections are refused.
    """

    def __init__(self, max_connections: int, idle_s: float, metrics: Metrics) -> None:
        self.idle_s = idle_s
        self._max = max_connections
        self._open: set[int] = set()
        self._idle: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, with the time since when
        self._closed = metrics.http_connections_closed
        metrics.http_connections.set_function(lambda: float(len(self._open)))

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self._max

    def add(self, connection: "_Connection") -> bool:
        """Whether there is room for a new connection, which has no request yet."""
        if self.is_full and not self.close_longest_idle("displaced"):
            return False
        self._open.add(connection.fileno())
        self._idle[connection.fileno()] = (connection, time.monotonic())
        return True

    def remove(self, number: int) -> None:
        self._open.discard(number)
        self._idle.pop(number, None)

    def begin_request(self, number: int) -> None:
        self._idle.pop(number, None)

    def wait_for_request(self, number: int, connection: Any) -> None:
        """The next request of the connection may take `idle_s` from now on to arrive, up to the end of its headers."""
        self._idle.pop(number, None)
        if number in self._open:
            self._idle[number] = (connection, time.monotonic())

    def close_idle(self) -> None:
        """Close the connections whose time is up."""
        while self._idle and next(iter(self._idle.values()))[1] + self.idle_s < time.monotonic():
            self.close_longest_idle("idle")

    def refuse(self, connection: "_Connection") -> None:
        """Answer a connection for which there was no room, and close it."""
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(_REFUSAL)
        connection.close()
        self._closed.labels("refused").inc()
        logger.warning("a connection was refused: %d are open and in use; see --max-connections", len(self._open))

    def close_longest_idle(self, why: str) -> bool:
        """Whether there was one."""
        if not self._idle:
            return False
        number, (connection, _) = next(iter(self._idle.items()))
        self.remove(number)
        self._closed.labels(why).inc()
        with contextlib.suppress(OSError):  # it has just been closed by its client
            connection.shutdown(socket.SHUT_RDWR)  # its transport reads the end and closes it
        return True


class Listener(socket.socket):
    """A listening socket that accepts a connection only where there is room for it."""

    def __init__(self, bound: socket.socket, connections: Connections) -> None:
        super().__init__(bound.family, bound.type, bound.proto, bound.detach())
        self._connections = connections
        self._must_wait = False

    def accept(self) -> "tuple[socket.socket, Any]":
        """The next connection. BlockingIOError tells asyncio that there is none for now."""
        if self._must_wait:
            self._must_wait = False
            raise BlockingIOError
        try:
            number, address = self._accept()  # type: ignore[attr-defined]
        except OSError as exc:
            if exc.errno in _NO_DESCRIPTORS:  # asyncio logs it and tries again in a second, and now: once is enough
                self._must_wait = True
                for _ in range(_ROOM):
                    self._connections.close_longest_idle("displaced")
            raise
        connection = _Connection(self, number, self._connections)
        self._must_wait = self._connections.is_full  # what is closed for this one frees its descriptor a little later
        if not self._connections.add(connection):
            self._connections.refuse(connection)
            raise BlockingIOError
        return connection, address


class _Connection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    def __init__(self, listener: Listener, number: int, connections: Connections) -> None:
        super().__init__(listener.family, listener.type, listener.proto, number)
        self._connections = connections

    def close(self) -> None:
        if (number := self.fileno()) >= 0:
            self._connections.remove(number)
        super().close()


class HttpProtocol(H11Protocol):
    """Reports when a connection waits for a request and when it has one, and ends one whose client does not read.

    uvicorn stops an application that sends faster than its client reads (more than 64 KiB unsent). That wait ends, with
    the connection, when the unsent data did not get less for `stall_s`; 0: never.
    """

    def __init__(self, connections: Connections, stall_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._stall_s = stall_s
        self._socket: Any = None
        self._number = -1
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        self._number = self._socket.fileno()

    def data_received(self, data: bytes) -> None:
        is_next = self.timeout_keep_alive_task is not None  # these are the first bytes after a response
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._connections.begin_request(self._number)
        elif is_next:
            self._connections.wait_for_request(self._number, self._socket)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin a request that has already arrived
        if self.cycle.response_complete and not self.transport.is_closing():
            self._connections.wait_for_request(self._number, self._socket)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        if self._stall_s:
            unsent = self.transport.get_write_buffer_size()
            self._watch = self.loop.call_later(self._stall_s, self._look, unsent)

    def _look(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._look_later()
        else:
            logger.info("a client has read nothing for %g s and is disconnected", self._stall_s)
            self.transport.abort()

    def _stop_looking(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
