"""A reply on its way out: collected into one body, or streamed as it comes."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.chat.reply import ReplyPiece
from holdfast.chats.events import ReplyEnd
from holdfast.chats.stateless import NumberedEvent
from holdfast.errors import HoldfastError
from holdfast.serving.http.error_response import body_of, envelope
from holdfast.serving.http.event_stream import DONE, EventStreamResponse, event, unless_disconnected
from holdfast.serving.http.render import Writer
from holdfast.serving.http.schema import Sampling

logger = logging.getLogger(__name__)

Events = AsyncGenerator[NumberedEvent, None]
Headers = Callable[[], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Events, who writes them down, and headers that are known once the first event is there."""

    events: Events
    writer: Writer
    headers: Headers = dict
    on_sent: Callable[[], None] = lambda: None  # once the last byte is out


async def answer(request: Request, body: Sampling, outgoing: Outgoing) -> Response:
    """The response to one request for replies. Errors before the first token have a status of their own."""
    if not body.stream:
        endings = await unless_disconnected(request.receive, _collect(outgoing.events))
        headers = outgoing.headers() | {"content-type": "application/json"}
        return Response(msgspec.json.encode(outgoing.writer.whole(endings)), headers=headers)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = _chunks(outgoing, with_usage)
    first = await unless_disconnected(request.receive, anext(chunks))
    return EventStreamResponse(first, chunks, outgoing.headers(), outgoing.on_sent)


async def _collect(events: Events) -> list[ReplyEnd]:
    endings: dict[int, ReplyEnd] = {}
    async with contextlib.aclosing(events):
        async for index, item in events:
            if isinstance(item, ReplyEnd):
                endings[index] = item
    return [endings[index] for index in sorted(endings)]


async def _chunks(outgoing: Outgoing, with_usage: bool) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async with contextlib.aclosing(_written(outgoing, with_usage)) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield chunk
    except HoldfastError as exc:
        if not has_begun:
            raise
        yield event(body_of(exc))
    except Exception:
        if not has_begun:
            raise
        logger.exception("a stream failed")
        yield event(envelope("an error of the server's own; it was logged", status=500, code="internal"))


async def _written(outgoing: Outgoing, with_usage: bool) -> AsyncGenerator[bytes, None]:
    writer = outgoing.writer
    num_calls: dict[int, int] = {}  # by choice; a choice that is not in it has not begun
    endings: dict[int, ReplyEnd] = {}
    async with contextlib.aclosing(outgoing.events) as events:
        async for index, item in events:
            if index not in num_calls:
                num_calls[index] = 0
                if opening := writer.opening(index):
                    yield event(opening)
            if isinstance(item, ReplyPiece):
                if chunk := writer.chunk(index, item, num_calls[index]):
                    yield event(chunk)
                num_calls[index] += len(item.calls)
            else:
                endings[index] = item
                yield event(writer.finish(index, item))
    if with_usage:
        yield event(writer.usage([endings[index] for index in sorted(endings)]))
    yield DONE
