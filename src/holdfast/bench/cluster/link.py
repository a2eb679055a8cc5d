"""The network between one member and the database: a TCP proxy that can be cut, mended, or left half open."""

import asyncio
import contextlib
from types import TracebackType
from typing import Literal, Self

LinkState = Literal["open", "cut", "deaf"]

_CHUNK = 1 << 16


class Link:
    """A port of 127.0.0.1 in front of `target_port`, for as long as the context lasts. On one event loop."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._state: LinkState = "open"
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self._abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Every connection breaks, and new ones break at once."""
        self._state = "cut"
        self._abort()

    def deafen(self) -> None:
        """What the member sends still arrives; answers do not, and no connection ends."""
        self._state = "deaf"

    def mend(self) -> None:
        """New connections work. Those that missed an answer break."""
        if self._state == "deaf":
            self._abort()
        self._state = "open"

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._state == "cut":
            writer.transport.abort()
            return
        self._writers.add(writer)
        upstream = None
        try:
            back, upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(upstream)
            copying = [
                asyncio.ensure_future(self._copy(reader, upstream, is_answer=False)),
                asyncio.ensure_future(self._copy(back, writer, is_answer=True)),
            ]
            try:
                await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in copying:
                    task.cancel()
                await asyncio.gather(*copying, return_exceptions=True)
        except OSError:
            pass  # the database is away: the member's connection ends, too
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._state == "deaf" and is_answer:
                    continue
                writer.write(data)
                await writer.drain()
            if self._state == "deaf" and is_answer:
                await asyncio.Event().wait()  # not even that the database has gone is noticed
