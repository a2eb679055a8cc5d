"""Replies to the client: whole, as server-sent events, or an upstream's bytes; and what if the client disconnects.

Knows no API's format: a `ReplyFormat` writes what is sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
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
from holdfast.generation import Constraint
from holdfast.metrics import Metrics
from holdfast.serving.http.dialects.base import ReplyFormat, StreamEncoder, StreamFrame
from holdfast.serving.http.error_response import RefusedByUpstream, told
from holdfast.serving.http.render import ChatWriter, Writer

T = TypeVar("T")

FIRST_PING_S = 1.0  # a stream begins within this time
_MAX_IGNORED = 1000  # characters of the header that names what was ignored


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


def ignored_header(ignored: Sequence[str], metrics: Metrics) -> dict[str, str]:
    """The header that names the ignored fields, as many as fit. They are counted."""
    metrics.observe_ignored(ignored)
    names, num_characters = [], 0
    for path in ignored:
        name = "".join(c if "!" <= c <= "~" and c != "," else "?" for c in path)
        num_characters += len(name) + 1
        if num_characters > _MAX_IGNORED:
            names.append("...")
            break
        names.append(name)
    return {"holdfast-ignored-fields": ",".join(names)} if names else {}


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """`stall_s`: a client that reads so slowly that sending waits for it, for so long in all, counts as gone; 0: no
    limit. `ping_s`: after so long without an event a stream sends a ping, the first one within a second; 0: never."""

    stall_s: float = 0.0
    ping_s: float = 0.0


_NO_LIMITS = StreamTimes()


async def stream_response(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    *,
    encoder: Callable[[], StreamFrame],
    headers: Callable[[], dict[str, str]],
    times: StreamTimes,
    on_sent: Callable[[], None] = lambda: None,
) -> Response:
    """Sends what `chunks` yields. An error before its first chunk is raised, so that it gets its own status, unless it
    takes so long that a ping is due: then `headers` are what is known by now, and the error becomes an event."""
    first = asyncio.ensure_future(anext(chunks, b""))
    patience_s = min(times.ping_s, FIRST_PING_S) or None
    try:
        await unless_disconnected(request.receive, asyncio.wait((first,), timeout=patience_s))
        if first.done():
            first.result()
        return EventStreamResponse(first, chunks, encoder, headers(), on_sent, times=times)
    except BaseException:
        await _ended(first, chunks)
        raise


async def _ended(first: "asyncio.Future[bytes]", chunks: AsyncGenerator[bytes, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()


class EventStreamResponse(Response):
    """A stream whose `first` chunk is there, or takes so long that a ping goes before it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: "asyncio.Future[bytes]",
        chunks: AsyncGenerator[bytes, None],
        encoder: Callable[[], StreamFrame],
        headers: dict[str, str],
        on_sent: Callable[[], None],
        *,
        times: StreamTimes,
    ) -> None:
        always = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        super().__init__(headers=headers | always | {"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._encoder = encoder
        self._on_sent = on_sent
        self._times = times
        self._sent_at = 0.0
        self._waited_s = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            await _ended(self._first, self._chunks)

    async def _send(self, send: Send) -> None:
        """An error that comes now is the last event: the status has been sent."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._ping(send)) if self._times.ping_s else None
        try:
            await self._send_chunk(send, await self._first)
            async for chunk in self._chunks:
                await self._send_chunk(send, chunk)
        except ClientGone:
            raise
        except Exception as exc:  # noqa: BLE001 - told to the client
            await self._send_chunk(send, self._encoder().error(*told(exc)))
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._on_sent()

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        clock, stall_s = asyncio.get_running_loop().time, self._times.stall_s
        started = clock()
        try:
            async with asyncio.timeout(stall_s - self._waited_s if stall_s else None), self._sending:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None
        self._sent_at = clock()
        self._waited_s += self._sent_at - started

    async def _ping(self, send: Send) -> None:
        """A ping at once if nothing is there yet, then one whenever nothing was sent for a while."""
        clock, ping_s = asyncio.get_running_loop().time, self._times.ping_s
        self._sent_at = clock() if self._first.done() else -ping_s
        while True:
            if (left_s := self._sent_at + ping_s - clock()) <= 0 and not self._sending.locked():
                async with self._sending:
                    await send({"type": "http.response.body", "body": self._encoder().ping(), "more_body": True})
                self._sent_at = clock()
            await asyncio.sleep(max(left_s, 0) or ping_s)


# Stateless requests


async def reply_response(
    request: Request,
    events: AsyncGenerator[NumberedEvent, None],
    reply: ReplyFormat,
    writer: Writer,
    *,
    is_stream: bool,
    with_usage: bool,
    times: StreamTimes,
    headers: Mapping[str, str],
) -> Response:
    """The response to a stateless request."""
    if not is_stream:
        ends = await unless_disconnected(request.receive, _ends_of(events))
        body = reply.whole(msgspec.json.encode(writer.whole(ends)), writer.id)
        return Response(body, headers=headers, media_type="application/json")
    encoder = reply.encoder(writer, with_usage=with_usage)
    chunks = _reply_chunks(events, encoder)
    return await stream_response(request, chunks, encoder=lambda: encoder, headers=lambda: dict(headers), times=times)


async def _ends_of(events: AsyncGenerator[NumberedEvent, None]) -> list[ReplyEnd]:
    ends: dict[int, ReplyEnd] = {}
    async with contextlib.aclosing(events):
        async for index, item in events:
            if isinstance(item, ReplyEnd):
                ends[index] = item
    return [ends[index] for index in sorted(ends)]


async def _reply_chunks(
    events: AsyncGenerator[NumberedEvent, None], encoder: StreamEncoder
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for index, item in events:
            if chunk := encoder.encode(index, item):
                yield chunk
    if chunk := encoder.end():
        yield chunk


# Turns of a session


class TurnResponder:
    """The response to a request for a turn.

    `writer` is this request's own; a retry that joins a turn gets that of the turn. `id_of` tells under which id the
    client knows a recorded turn.
    """

    def __init__(
        self,
        events: AsyncGenerator[TurnEvent, None],
        *,
        reply: ReplyFormat,
        writer: ChatWriter,
        confirm: Callable[[int], None],
        id_of: Callable[[int], str] = lambda number: "",
        with_usage: bool = False,
        times: StreamTimes = _NO_LIMITS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events = events
        self._reply = reply
        self._writer = writer
        self._confirm = confirm
        self._id_of = id_of
        self._with_usage = with_usage
        self._times = times
        self._extra = headers or {}
        self._started: TurnStarted | None = None
        self._encoder: StreamEncoder | None = None
        self.response: TurnResponse | None = None  # once the turn is recorded

    async def respond(self, request: Request, *, is_stream: bool) -> Response:
        if not is_stream:
            await unless_disconnected(request.receive, self._collect())
            return self._whole(request)
        try:
            return await stream_response(
                request,
                self.chunks(),
                encoder=self.encoder,
                headers=self._headers,
                times=self._times,
                on_sent=self._sent,
            )
        except RefusedByUpstream:
            return self._whole(request)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The turn as server-sent events. Its end comes when the session is free again."""
        end: ReplyEnd | None = None
        async with contextlib.aclosing(self._events):
            async for item in self._events:
                if isinstance(item, ReplyPiece):
                    if chunk := self.encoder().encode(0, item):
                        yield chunk
                elif isinstance(item, ReplyEnd):
                    end = item
                else:
                    self._note(item)
        if end is not None:
            yield self.encoder().encode(0, end)
            if chunk := self.encoder().end():
                yield chunk
            return
        assert self.response is not None  # an upstream's, or the last one again
        if self.response.status != 200:
            raise RefusedByUpstream(self.response.body, self.response.status)
        yield self.encoder().whole(self.response.body)

    def encoder(self) -> StreamEncoder:
        if self._encoder is None:
            self._encoder = self._reply.encoder(self._told_writer(), with_usage=self._with_usage)
        return self._encoder

    def _told_writer(self) -> ChatWriter:
        """With the id that the client is told: that of the turn that it has joined or gets again, else its own."""
        if self._started is not None:
            assert isinstance(self._started.writer, ChatWriter)
            return self._started.writer
        number = self.response.number if self.response else None
        return replace(self._writer, id=(self._id_of(number) if number else "") or self._writer.id)

    def _note(self, item: TurnEvent) -> None:
        if isinstance(item, TurnStarted):
            self._started = item
        elif isinstance(item, TurnResponse):
            self.response = item

    async def _collect(self) -> None:
        async with contextlib.aclosing(self._events):
            async for item in self._events:
                self._note(item)
        assert self.response is not None

    def _headers(self) -> dict[str, str]:
        """What is known by now."""
        headers = dict(self._extra) | dict(self.response.headers if self.response else {})
        if self._started is None:
            return headers | ({"idempotent-replayed": "true"} if self.response else {})
        if self.response is not None and self.response.number is None:
            return headers | {"holdfast-recorded": "false"}
        headers |= {"holdfast-dropped-tokens": str(self._started.num_dropped()), "holdfast-turn": self._started.turn_id}
        if self._started.num_recalled:
            headers["holdfast-recalled-tokens"] = str(self._started.num_recalled)
        if self._started.branched_below is not None:
            headers["holdfast-branched"] = str(self._started.branched_below)
        return headers

    def _whole(self, request: Request) -> Response:
        response, headers = self.response, {"content-type": "application/json"} | self._headers()
        assert response is not None
        if response.status == 200:
            body = self._reply.whole(response.body, self._told_writer().id)
        else:
            body = self._reply.refusal(response.body, response.status, request.scope["holdfast.request_id"])
        if body is not response.body:
            headers["content-type"] = "application/json"
        return Response(body, response.status, headers, background=BackgroundTask(self._call_sent))

    async def _call_sent(self) -> None:
        self._sent()

    def _sent(self) -> None:
        if self.response is not None and self.response.number is not None:
            self._confirm(self.response.number)
