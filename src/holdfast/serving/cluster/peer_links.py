"""HTTP connections to other members: one request at a time on each, and idle ones are used again. On one event loop.

A request needs no task, no pass of the loop and no URL of its own, as it would with a general client.
"""

import asyncio
import re
import select
import ssl
from collections.abc import Sequence

import h11

_CONNECT_S = 2.0
_KEEPALIVE_S = 4.0  # below a member's own limit, so that we close idle connections first
_MAX_HEAD = 1 << 18  # bytes of a response's headers
_READ_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.1 (?!204|304)[2-5]\d\d [ -~]*")
_LINE = re.compile(rb"([-!#$%&'*+.^_`|~0-9A-Za-z]+): *([ -~\x80-\xff]*)")
_LENGTH = re.compile(rb"\d{1,15}")
_FRAMING = (b"content-length", b"transfer-encoding", b"connection", b"upgrade")

Header = tuple[bytes, bytes]


class LinkLost(Exception):
    """The member closed the connection, or what it sent is no HTTP."""


class PeerLink:
    """A connection to a member. `send` a request, then read `head`, then `chunk` until the last one. What reads raises
    LinkLost, OSError, or what `fail` was given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: "list[PeerLink]") -> None:
        self.idle = idle  # where it is kept while it is idle
        self.closing: asyncio.TimerHandle | None = None  # and when it is closed then
        self._reader = reader
        self._writer = writer
        self._is_free = True
        self._method = ""
        self._received = bytearray()
        self._left = 0  # bytes of the body that were not read yet
        self._parser: h11.Connection | None = None  # of a response that is not plain
        self._poll = select.poll()
        self._poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)

    @property
    def can_send(self) -> bool:
        """Whether the last response was read to the end, and nothing came after it: not even the connection's end."""
        return self._is_free and not self._received and not self._writer.is_closing() and not self._poll.poll(0)

    def send(self, method: str, target: bytes, headers: Sequence[Header], body: bytes) -> None:
        """The headers are those of a request that was parsed: nothing in them ends a line."""
        self._is_free = False
        self._method = method
        lines = [b"%b: %b\r\n" % header for header in headers]
        self._writer.write(b"".join((method.encode(), b" ", target, b" HTTP/1.1\r\n", *lines, b"\r\n", body)))

    async def head(self) -> tuple[int, list[Header]]:
        """Status and headers of the response."""
        while (end := self._received.find(b"\r\n\r\n")) < 0 and len(self._received) <= _MAX_HEAD:
            self._received += await self._read()
        found = plain_head(bytes(self._received[:end])) if end >= 0 and self._method != "HEAD" else None
        if found is None:
            return await self._parsed_head()
        del self._received[: end + 4]
        status, headers, self._left = found
        return status, headers

    async def chunk(self) -> tuple[bytes, bool]:
        """What is there of the body, at least something, and whether that was the last of it."""
        if self._parser is not None:
            return await self._parsed_chunk(self._parser)
        if self._left and not self._received:
            self._received += await self._read()
        body = bytes(self._received[: self._left])
        del self._received[: self._left]
        self._left -= len(body)
        self._is_free = not self._left
        return body, self._is_free

    def fail(self, exc: Exception) -> None:
        """Whoever reads the response gets this exception."""
        self._reader.set_exception(exc)

    def close(self) -> None:
        self._writer.transport.abort()

    async def _read(self) -> bytes:
        if not (data := await self._reader.read(_READ_BYTES)):
            raise LinkLost("the connection was closed")
        return data

    # Responses of any kind

    async def _parsed_head(self) -> tuple[int, list[Header]]:
        self._parser = parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        for sent in (h11.Request(method=self._method, target=b"/", headers=[(b"host", b"-")]), h11.EndOfMessage()):
            parser.send(sent)
        parser.receive_data(bytes(self._received))
        self._received.clear()
        while True:
            event = await self._next(parser)
            if isinstance(event, h11.Response):
                return event.status_code, list(event.headers)

    async def _parsed_chunk(self, parser: h11.Connection) -> tuple[bytes, bool]:
        parts = []
        event: h11.Event | type[h11.NEED_DATA] = await self._next(parser)
        while isinstance(event, h11.Data):
            parts.append(event.data)
            event = _event_of(parser)
        is_last = isinstance(event, h11.EndOfMessage)
        if is_last and parser.our_state is parser.their_state is h11.DONE:
            self._received += parser.trailing_data[0]
            self._parser, self._is_free = None, True
        return b"".join(parts), is_last

    async def _next(self, parser: h11.Connection) -> h11.Event:
        while not isinstance(event := _event_of(parser), h11.Event):
            parser.receive_data(await self._read())
        return event


def plain_head(head: bytes) -> tuple[int, list[Header], int] | None:
    """Status, headers and the length of the body, of a response that is nothing but these. None: it may be any other.

    Nearly all are so, and to find this out takes a tenth of the time that h11 takes for them.
    """
    first, *lines = head.split(b"\r\n")
    if not _STATUS.fullmatch(first):
        return None
    headers: list[Header] = []
    length: int | None = None
    for line in lines:
        if not (found := _LINE.fullmatch(line)):
            return None
        name, value = found[1].lower(), found[2].strip(b" ")
        if name in _FRAMING:
            if name != b"content-length" or length is not None or not _LENGTH.fullmatch(value):
                return None
            length = int(value)
        headers.append((name, value))
    return None if length is None else (int(first[9:12]), headers, length)


def _event_of(parser: h11.Connection) -> h11.Event | type[h11.NEED_DATA]:
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError as exc:
        raise LinkLost(str(exc)) from exc
    if isinstance(event, h11.ConnectionClosed) or not (isinstance(event, h11.Event) or event is h11.NEED_DATA):
        raise LinkLost("the connection was closed")
    return event


class PeerLinks:
    """`ca`: a file of certificates by which members are trusted; empty: those of the system."""

    def __init__(self, ca: str) -> None:
        self._ca = ca
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, bool], list[PeerLink]] = {}

    async def take(self, address: str, *, has_tls: bool) -> PeerLink:
        """A connection that was idle, or a new one. Raises OSError."""
        idle = self._idle.setdefault((address, has_tls), [])
        while idle:
            link = self._woken(idle[-1])
            if link.can_send:
                return link
            link.close()
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        async with asyncio.timeout(_CONNECT_S):
            streams = await asyncio.open_connection(host, int(port), ssl=self._trust() if has_tls else None)
        return PeerLink(*streams, idle)

    def give_back(self, link: PeerLink) -> None:
        """Keep the connection for a while if it can be used again."""
        if not link.can_send:
            link.close()
            return
        link.idle.append(link)
        link.closing = asyncio.get_running_loop().call_later(_KEEPALIVE_S, lambda: self._woken(link).close())

    def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                self._woken(idle[-1]).close()

    def _woken(self, link: PeerLink) -> PeerLink:
        """A link that was idle."""
        link.idle.remove(link)
        if link.closing is not None:
            link.closing.cancel()
        return link

    def _trust(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca or None)
        return self._tls
