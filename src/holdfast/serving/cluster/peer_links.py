"""HTTP connections to other members: one request at a time on each, and idle ones are used again. On one event loop.

A request needs no task, no pass of the loop and no URL of its own, as it would with a general client.
"""

import asyncio
import select
import ssl
from collections.abc import Sequence

import h11

_CONNECT_S = 2.0
_KEEPALIVE_S = 4.0  # below a member's own limit, so that we close idle connections first
_MAX_HEAD = 1 << 18  # bytes of a response's headers
_READ_BYTES = 1 << 16

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
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        self._poll = select.poll()
        self._poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)

    @property
    def can_send(self) -> bool:
        """Whether the last response was read to the end, and nothing came after it: not even the connection's end."""
        return self._http.our_state is h11.IDLE and not self._writer.is_closing() and not self._poll.poll(0)

    def send(self, method: str, target: bytes, headers: Sequence[Header], body: bytes) -> None:
        events = [h11.Request(method=method, target=target, headers=list(headers)), h11.EndOfMessage()]
        if body:
            events.insert(1, h11.Data(data=body))
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))

    async def head(self) -> tuple[int, list[Header]]:
        """Status and headers of the response."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event.status_code, list(event.headers)

    async def chunk(self) -> tuple[bytes, bool]:
        """What is there of the body, at least something, and whether that was the last of it."""
        parts = []
        event: h11.Event | type[h11.NEED_DATA] = await self._next()
        while isinstance(event, h11.Data):
            parts.append(event.data)
            event = self._parsed()
        is_last = isinstance(event, h11.EndOfMessage)
        if is_last and self._http.our_state is self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return b"".join(parts), is_last

    def fail(self, exc: Exception) -> None:
        """Whoever reads the response gets this exception."""
        self._reader.set_exception(exc)

    def close(self) -> None:
        self._writer.transport.abort()

    async def _next(self) -> h11.Event:
        while not isinstance(event := self._parsed(), h11.Event):
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    def _parsed(self) -> h11.Event | type[h11.NEED_DATA]:
        try:
            event = self._http.next_event()
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
