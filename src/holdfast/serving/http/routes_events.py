"""Routes that tell what goes on, as server-sent events: in one session, or in all sessions of an owner."""

import asyncio
import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from holdfast import __version__
from holdfast.chats.service import ChatService
from holdfast.chats.tokens import spelled
from holdfast.chats.turn import run_off_loop
from holdfast.serving.http.dialects.base import Json, event
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.response import StreamTimes, stream_response
from holdfast.serving.http.session_json import session_json, turn_json
from holdfast.sessions.session import Session
from holdfast.sessions.watch import Changed, Closed, Discarded, Lagged, NewTokens, NewTurn, SessionEvent

TICK_S = 1.0
MAX_ROWS = 200  # in one tick; the others come with the next ones
_MAX_IDS = 4096  # tokens in one event
_TIMES = StreamTimes(ping_s=15)  # a listener that does not read is dropped when it lags
_GATHER_S = 0.05  # between two looks at what has come: a fast generation is twenty events a second
_FRESH_S = 0.5
_SPAN_S = 5.0  # over which tokens per second are measured
_RECENT_S = 10.0  # over which the time to first token is
_COUNTED_EVERY = 10  # ticks: sessions on record
_BYTES_A_TOKEN = 32  # about what encoding one takes


class EventFrame:
    def ping(self) -> bytes:
        return b": ping\n\n"

    def error(self, envelope: Json, status: int) -> bytes:
        return event("error", envelope)


class EventRoutes:
    def __init__(self, chats: ChatService) -> None:
        self._chats = chats
        self._runtime = chats.setup.runtime
        self._watch = chats.setup.runtime.watch
        self._gauges = ServerGauges(chats)

    async def session_events(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        response = await _streamed(request, self._of_session(session_id, owner))
        held: AsyncExitStack = request.scope["holdfast.held"]
        await held.aclose()  # who listens does not keep the session in memory
        return response

    async def server_events(self, request: Request) -> Response:
        return await _streamed(request, self._of_server(owner_of(request)))

    async def _of_session(self, session_id: str, owner: str) -> AsyncGenerator[bytes, None]:
        events: list[SessionEvent] = [Changed(self._runtime.find(session_id, owner))]
        events += self._chats.in_flight(session_id)
        listener = self._watch.listen(session_id)
        try:
            while True:
                for one in events:
                    if isinstance(one, NewTokens):
                        encode = partial(self._tokens, one)
                        yield await run_off_loop(encode, _BYTES_A_TOKEN * len(one.ids))
                    else:
                        yield self._encoded(one)
                    if isinstance(one, Closed | Lagged):
                        return
                await asyncio.sleep(_GATHER_S)
                events = await listener.take()
        finally:
            self._watch.leave(session_id, listener)

    def _encoded(self, one: SessionEvent) -> bytes:
        match one:
            case Changed(session):
                return event("state", session_json(self._runtime.row(session)) | {"turn": session.last_turn or None})
            case NewTurn(turn, turn_id, root):
                return event("turn", turn_json(turn, is_current=True) | {"root": root, "turn_id": turn_id})
            case Discarded(turn_id, parent):
                return event("discarded", {"turn_id": turn_id, "parent": parent})
            case Closed(why):
                return event("closed", {"why": why})
            case _:
                return event("lagged", {})

    def _tokens(self, one: NewTokens) -> bytes:
        tokenizer, chunks = self._chats.setup.chat.tokenizer, []
        for first in range(0, len(one.ids), _MAX_IDS):
            part = slice(first, first + _MAX_IDS)
            ids = one.ids[part]
            value: Json = {
                "position": one.position + first,
                "kind": one.kind,
                "ids": ids,
                "texts": [spelled(tokenizer.token_bytes(token)) for token in ids],
                "logprobs": one.logprobs[part] or None,
                "sampling_logprobs": one.sampling_logprobs[part] or None,
            }
            if one.turn_id:
                value |= {"turn_id": one.turn_id, "parent": one.parent}
            chunks.append(event("tokens", value))
        return b"".join(chunks)

    async def _of_server(self, owner: str) -> AsyncGenerator[bytes, None]:
        listener = self._watch.listen_to_all(owner)
        try:
            for tick in itertools.count():
                if tick % _COUNTED_EVERY == 0:
                    num_on_record = await self._num_on_record(owner)
                yield event("server", self._gauges.read(owner, num_on_record))
                if listener.has_lagged:
                    yield event("lagged", {})
                    return
                if rows := [session_json(self._runtime.row(one)) for one in _taken(listener.changed)]:
                    yield event("sessions", {"data": rows})
                if listener.closed:
                    closed, listener.closed = list(listener.closed), {}
                    yield event("closed", {"session_ids": closed})
                await listener.pause(TICK_S)
        finally:
            self._watch.leave_all(listener)

    async def _num_on_record(self, owner: str) -> int | None:
        journal = self._runtime.journal
        return await journal.count_open(owner) if journal.keeps_bodies else None


async def _streamed(request: Request, chunks: AsyncGenerator[bytes, None]) -> Response:
    if request.method == "HEAD":  # which would not end
        return Response(media_type="text/event-stream")
    return await stream_response(request, chunks, encoder=EventFrame, headers=dict, times=_TIMES)


def _taken(changed: dict[str, Session]) -> Iterator[Session]:
    """Those that changed first, as many as one tick tells of, which are told now."""
    for session_id in list(itertools.islice(changed, MAX_ROWS)):
        yield changed.pop(session_id)


class ServerGauges:
    """What goes on in the whole server, read at most twice a second for all who ask."""

    def __init__(self, chats: ChatService) -> None:
        self._runtime = chats.setup.runtime
        self._admission = chats.setup.admission
        self._counts = Counter[tuple[str, str]]()
        self._sampled = deque[tuple[float, int]]()  # when, and how many by then

    def read(self, owner: str, num_on_record: int | None) -> dict[str, Any]:
        """`num_on_record`: the owner's open sessions in the journal, those in memory too; None: there is no journal."""
        now, runtime, counts = time.monotonic(), self._runtime, self._counts
        if not self._sampled or now - self._sampled[-1][0] >= _FRESH_S:
            counts = self._counts = runtime.counts()
            self._sampled.append((now, runtime.watch.num_sampled))
        while now - self._sampled[0][0] > _SPAN_S + TICK_S:
            self._sampled.popleft()
        (began, before), (at, num) = self._sampled[0], self._sampled[-1]
        first = [seconds for when, seconds in runtime.watch.first_tokens if now - when <= _RECENT_S]
        sessions: dict[str, int] = {name: counts[owner, name] for name in ("live", "parked", "busy")}
        if num_on_record is not None:
            sessions["resting"] = max(0, num_on_record - sessions["live"] - sessions["parked"])
        return {
            "sessions": sessions,
            "slabs": {"used": runtime.capacity - runtime.num_free_slabs, "total": runtime.capacity},
            "queue": self._admission.num_waiting,
            "running": self._admission.num_running,
            "tokens_per_s": round((num - before) / (at - began), 1) if at > began else None,
            "ttft_p50_ms": round(statistics.median(first) * 1000, 1) if first else None,
            "version": __version__,
        }
