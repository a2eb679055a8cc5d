"""A session's turn on its way out: its own bytes whole, its pieces as they come, or an upstream's reply untouched."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from holdfast.chats.events import ReplyEnd, TurnEvent, TurnResponse, TurnStarted
from holdfast.serving.http.event_stream import DONE, event, unless_disconnected
from holdfast.serving.http.render import ChatWriter
from holdfast.serving.http.reply_response import Events, Outgoing, answer
from holdfast.serving.http.schema import ChatCompletion, RelayedChat


@dataclass(slots=True)
class TurnResponder:
    """The rest of a turn that has begun. `dropped` tells what has left the window by now."""

    events: AsyncGenerator[TurnEvent, None]
    begun: TurnStarted
    dropped: Callable[[], int]
    confirm: Callable[[int], None]
    recorded: TurnResponse | None = None

    async def replies(self) -> Events:
        """Pieces and the ending, as of one choice. Whoever has heard the ending may go on: the session is idle."""
        endings: list[ReplyEnd] = []
        try:
            async for item in self.events:
                if isinstance(item, TurnResponse):
                    self.recorded = item
                elif isinstance(item, ReplyEnd):
                    endings.append(item)
                elif not isinstance(item, TurnStarted):
                    yield 0, item
        finally:
            await self.events.aclose()
        for ending in endings:
            yield 0, ending

    async def whole(self) -> TurnResponse:
        async for _ in self.replies():
            pass
        assert self.recorded is not None
        return self.recorded

    def headers(self) -> dict[str, str]:
        headers = {"holdfast-dropped-tokens": str(self.dropped()), "holdfast-turn": self.begun.turn_id}
        if self.begun.branched_below is not None:
            headers["holdfast-branched"] = str(self.begun.branched_below)
        return headers

    def sent(self) -> None:
        if self.recorded is not None and self.recorded.number is not None:
            self.confirm(self.recorded.number)


async def answer_turn(request: Request, body: ChatCompletion | RelayedChat, turn: TurnResponder) -> Response:
    if body.stream and isinstance(body, ChatCompletion):
        assert isinstance(turn.begun.writer, ChatWriter)
        outgoing = Outgoing(turn.replies(), turn.begun.writer, turn.headers, turn.sent)
        return await answer(request, body, outgoing)
    recorded = await unless_disconnected(request.receive, turn.whole())
    headers = turn.headers() if recorded.number is not None else {"holdfast-recorded": "false"}
    return whole_response(recorded, headers, is_stream=bool(body.stream), on_sent=turn.sent)


def whole_response(
    recorded: TurnResponse,
    headers: dict[str, str],
    *,
    is_stream: bool = False,
    on_sent: Callable[[], None] = lambda: None,
) -> Response:
    """A reply's own bytes; where a stream was asked for, as one chunk with its usage."""
    if recorded.is_replay:
        headers = headers | {"idempotent-replayed": "true"}
    given = dict(recorded.headers) or {"content-type": "application/json"}
    background = BackgroundTask(_called, on_sent)
    if is_stream and recorded.status == 200:
        stream = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        return Response(as_events(recorded.body), 200, given | headers | stream, background=background)
    return Response(recorded.body, recorded.status, given | headers, background=background)


async def _called(on_sent: Callable[[], None]) -> None:
    on_sent()


def as_events(body: bytes) -> bytes:
    """A whole chat completion as the events of a stream."""
    reply = msgspec.json.decode(body)
    choices = []
    for choice in reply["choices"]:
        message = dict(choice["message"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
        choices.append({key: value for key, value in choice.items() if key != "message"} | {"delta": message})
    return event(reply | {"object": "chat.completion.chunk", "choices": choices}) + DONE
