"""HTTP as cheap as it gets, for the ends of a bench: they must not be what is measured. Raw bytes, no headers read."""

import asyncio
from typing import NamedTuple

JSON = "content-type: application/json\r\n"


def request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\n{JSON if body else ''}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{JSON}content-length: {len(body)}\r\n\r\n".encode() + body


def first_message(buffer: bytearray) -> tuple[int, int] | None:
    """Where the body of the first message begins and ends; None where it is not all there yet."""
    start = buffer.find(b"\r\n\r\n") + 4
    if start < 4:
        return None
    head = bytes(buffer[:start]).lower()
    _, _, length = head.partition(b"\r\ncontent-length:")
    end = start + int(length.partition(b"\r\n")[0] or 0)
    return (start, end) if len(buffer) >= end else None


class HttpReply(NamedTuple):
    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """A client's end of one connection: one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._transport: asyncio.WriteTransport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, sent: bytes) -> HttpReply:
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("the connection is closed")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        return await self._waiting

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (found := first_message(self._buffer)) is None:
            return
        start, end = found
        reply = HttpReply(int(self._buffer[9:12]), bytes(self._buffer[start:end]))
        del self._buffer[:end]
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("the server closed the connection"))


async def opened(address: str) -> Connection:
    """A connection to `HOST:PORT`; the caller closes it."""
    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    return connection
