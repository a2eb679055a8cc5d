"""An HTTP/1.1 client that sends any bytes and understands every whole answer."""

import asyncio
import contextlib
from dataclasses import dataclass

TIMEOUT_S = 30.0


class Closed(Exception):
    """The server closed the connection without a whole answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """Kept alive between requests, opened again where the server has closed it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        return await self.send(head.encode("latin-1") + body, is_head=method == "HEAD")

    async def send(self, raw: bytes, *, is_head: bool = False) -> Answer:
        """The answer to `raw`. TimeoutError: the server hangs. Closed: it gave none.

        A kept connection that ended before any byte of the answer had been idle for too long: a new one is opened.
        """
        async with asyncio.timeout(TIMEOUT_S):
            is_kept = self._streams is not None
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._address, limit=1 << 24)
            reader, writer = self._streams
            try:
                writer.write(raw)
                answer = await _answer(reader, is_head=is_head)
            except (asyncio.IncompleteReadError, ConnectionError) as exc:
                await self.close()
                if is_kept and not getattr(exc, "partial", b""):
                    return await self.send(raw, is_head=is_head)
                raise Closed(str(exc)) from exc
            if answer.headers.get("connection") == "close":
                await self.close()
            return answer

    async def half_closed(self, raw: bytes) -> Answer:
        """The answer to `raw` with nothing after it: whoever waits for more sees the end of the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 24)
            reader, writer = self._streams
            try:
                writer.write(raw)
                writer.write_eof()
                return await _answer(reader, is_head=raw.startswith(b"HEAD"))
            except (asyncio.IncompleteReadError, ConnectionError) as exc:
                raise Closed(str(exc)) from exc

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(ConnectionError):
                await self._streams[1].wait_closed()
            self._streams = None


async def _answer(reader: asyncio.StreamReader, *, is_head: bool) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    if status == 100:
        return await _answer(reader, is_head=is_head)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if is_head:
        return Answer(status, headers, b"")
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    if headers.get("transfer-encoding") != "chunked":
        return Answer(status, headers, b"" if status in (204, 304) else await reader.read())
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return Answer(status, headers, body)
