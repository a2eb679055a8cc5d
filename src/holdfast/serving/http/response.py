"""Replies to the client: whole, as server-sent events, or an upstream's bytes; and what if the client disconnects."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.chat.grammar import Compilation
from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.chats.events import TurnEvent, TurnResponse, TurnStarted
from holdfast.chats.grammar_queue import GrammarQueue
from holdfast.chats.stateless import NumberedEvent
from holdfast.errors import HoldfastError
from holdfast.generation import Constraint
from holdfast.serving.http.error_response import INTERNAL, body_of
from holdfast.serving.http.render import ChatWriter, Writer
from holdfast.serving.http.schema import Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has disconnected: nobody is left to answer."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects before, `work` is cancelled and awaited."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def compiled_for(request: Request, grammars: GrammarQueue) -> Callable[[Compilation], Coroutine[Any, Any, Constraint]]:
    """Compiles a grammar for a request, for as long as its client waits."""
    owner: str = request.scope["holdfast.owner"]
    return lambda compilation: unless_disconnected(request.receive, grammars.compiled(owner, compilation))


class EventStreamResponse(Response):
    """Sends what `chunks` yields. The first chunk was awaited before, so that an error there got its own status.

    A client that reads so slowly that sending waits for it, for `stall_s` in all, counts as gone; 0: no limit.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        chunks: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        on_sent: Callable[[], None] = lambda: None,
        *,
        stall_s: float = 0.0,
    ) -> None:
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._on_sent = on_sent
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        clock, waited_s = asyncio.get_running_loop().time, 0.0
        async for chunk in self._chunks:
            started = clock()
            try:
                async with asyncio.timeout(self._stall_s - waited_s if self._stall_s else None):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TimeoutError:
                raise ClientGone from None
            waited_s += clock() - started
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._on_sent()


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class ChunkEncoder:
    """Reply events of one or several choices to server-sent events."""

    def __init__(self, writer: Writer, body: Sampling) -> None:
        self._writer = writer
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._num_calls: dict[int, int] = {}  # by choice; a choice that is not in it has not begun
        self._ends: dict[int, ReplyEnd] = {}
        self._has_begun = False

    def encode(self, index: int, item: ReplyPiece | ReplyEnd) -> bytes:
        """What an event of choice `index` adds to the stream; empty where that is nothing."""
        chunks = b""
        if index not in self._num_calls:
            self._num_calls[index] = 0
            if opening := self._writer.opening(index):
                chunks = sse(opening)
        if isinstance(item, ReplyEnd):
            self._ends[index] = item
            chunks += sse(self._writer.finish(index, item))
        else:
            if chunk := self._writer.chunk(index, item, self._num_calls[index]):
                chunks += sse(chunk)
            self._num_calls[index] += len(item.calls)
        self._has_begun = self._has_begun or bool(chunks)
        return chunks

    def end(self) -> bytes:
        usage = sse(self._writer.usage([self._ends[i] for i in sorted(self._ends)])) if self._with_usage else b""
        return usage + DONE

    def error(self, exc: Exception) -> bytes:
        """An error as the last event of the stream. If nothing was sent yet, raises it: it gets a status of its own."""
        if not self._has_begun:
            raise exc
        if isinstance(exc, HoldfastError):
            return sse(body_of(exc))
        logger.error("a stream failed", exc_info=exc)
        return sse(INTERNAL)


# Stateless requests


async def reply_response(
    request: Request, body: Sampling, events: AsyncGenerator[NumberedEvent, None], writer: Writer, *, stall_s: float
) -> Response:
    """The response to a stateless request."""
    if not body.stream:
        ends = await unless_disconnected(request.receive, _ends_of(events))
        return Response(msgspec.json.encode(writer.whole(ends)), media_type="application/json")
    chunks = _reply_chunks(events, ChunkEncoder(writer, body))
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStreamResponse(first, chunks, {}, stall_s=stall_s)


async def _ends_of(events: AsyncGenerator[NumberedEvent, None]) -> list[ReplyEnd]:
    ends: dict[int, ReplyEnd] = {}
    async with contextlib.aclosing(events):
        async for index, item in events:
            if isinstance(item, ReplyEnd):
                ends[index] = item
    return [ends[index] for index in sorted(ends)]


async def _reply_chunks(
    events: AsyncGenerator[NumberedEvent, None], encoder: ChunkEncoder
) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(events):
            async for index, item in events:
                if chunk := encoder.encode(index, item):
                    yield chunk
        yield encoder.end()
    except Exception as exc:  # noqa: BLE001 - told to the client, or raised again
        yield encoder.error(exc)


# Turns of a session


class TurnResponder:
    """The response to a request for a turn. `dropped` tells how many tokens have left the window by now."""

    def __init__(
        self,
        events: AsyncGenerator[TurnEvent, None],
        *,
        dropped: Callable[[], int],
        confirm: Callable[[int], None],
        stall_s: float = 0.0,
    ) -> None:
        self._events = events
        self._dropped = dropped
        self._confirm = confirm
        self._stall_s = stall_s
        self.response: TurnResponse | None = None  # once the turn is recorded

    async def respond(self, request: Request, body: Sampling | None, *, is_stream: bool) -> Response:
        """`body`: the request to our own engine, whose replies stream; None where an upstream replies."""
        first = await unless_disconnected(request.receive, anext(self._events))
        if isinstance(first, TurnResponse):  # the last response again
            self.response = first
            return self._whole(first, {"idempotent-replayed": "true"}, is_stream=is_stream)
        assert isinstance(first, TurnStarted)
        if is_stream and body is not None:
            assert isinstance(first.writer, ChatWriter)
            chunks = self.chunks(ChunkEncoder(first.writer, body))
            chunk = await unless_disconnected(request.receive, anext(chunks))
            return EventStreamResponse(chunk, chunks, self._headers(first), self._sent, stall_s=self._stall_s)
        response = await unless_disconnected(request.receive, self._collected())
        headers = self._headers(first) if response.number is not None else {"holdfast-recorded": "false"}
        return self._whole(response, headers, is_stream=is_stream)

    async def chunks(self, encoder: ChunkEncoder) -> AsyncGenerator[bytes, None]:
        """The rest of the turn as server-sent events. The finish chunk comes when the session is free again."""
        end: ReplyEnd | None = None
        try:
            async with contextlib.aclosing(self._events):
                async for item in self._events:
                    if isinstance(item, TurnResponse):
                        self.response = item
                    elif isinstance(item, ReplyEnd):
                        end = item
                    elif isinstance(item, ReplyPiece) and (chunk := encoder.encode(0, item)):
                        yield chunk
            if end is not None:
                yield encoder.encode(0, end)
            yield encoder.end()
        except Exception as exc:  # noqa: BLE001 - told to the client, or raised again
            yield encoder.error(exc)

    async def _collected(self) -> TurnResponse:
        async with contextlib.aclosing(self._events):
            async for item in self._events:
                if isinstance(item, TurnResponse):
                    self.response = item
        assert self.response is not None
        return self.response

    def _headers(self, started: TurnStarted) -> dict[str, str]:
        headers = {"holdfast-dropped-tokens": str(self._dropped()), "holdfast-turn": started.turn_id}
        if started.branched_below is not None:
            headers["holdfast-branched"] = str(started.branched_below)
        return headers

    def _whole(self, response: TurnResponse, headers: dict[str, str], *, is_stream: bool) -> Response:
        """The reply's own bytes; where a stream was asked for, as one chunk with its usage."""
        headers = (dict(response.headers) or {"content-type": "application/json"}) | headers
        background = BackgroundTask(self._call_sent)
        if is_stream and response.status == 200:
            headers |= {"content-type": "text/event-stream", "cache-control": "no-cache"}
            return Response(as_events(response.body), 200, headers, background=background)
        return Response(response.body, response.status, headers, background=background)

    async def _call_sent(self) -> None:
        self._sent()

    def _sent(self) -> None:
        if self.response is not None and self.response.number is not None:
            self._confirm(self.response.number)


def as_events(body: bytes) -> bytes:
    """A whole chat completion as the events of a stream, every value spelled as it was."""
    reply = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    choices = []
    for choice in msgspec.json.decode(reply["choices"], type=list[dict[str, msgspec.Raw]]):
        message: dict[str, Any] = msgspec.json.decode(choice["message"], type=dict[str, msgspec.Raw])
        if calls := msgspec.json.decode(message.get("tool_calls", b"null"), type=list[dict[str, msgspec.Raw]] | None):
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        choices.append({key: value for key, value in choice.items() if key != "message"} | {"delta": message})
    return sse(reply | {"object": "chat.completion.chunk", "choices": choices}) + DONE
