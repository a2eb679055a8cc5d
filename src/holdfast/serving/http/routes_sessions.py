"""Routes of chat sessions: create, list, show, fork, reward, delete, chat, and the open paths of an upstream."""

import asyncio
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.backends.passthrough import Routes, match_route
from holdfast.chats.events import ChatRequest, TurnRequest
from holdfast.chats.retry import IdempotencyKey
from holdfast.chats.service import ChatService
from holdfast.chats.turn import run_off_loop
from holdfast.errors import InvalidArgument
from holdfast.serving.http.bodies import decode
from holdfast.serving.http.dialects import CHAT
from holdfast.serving.http.dialects.base import Dialect
from holdfast.serving.http.dialects.responses import CONVERSATION
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.parse import chat_request, recall_limits, relayed_request, unread_fields
from holdfast.serving.http.reading import ChatCall, agent_ids, read_chat
from holdfast.serving.http.response import (
    StreamTimes,
    TurnResponder,
    compiled_for,
    ignored_header,
    unless_disconnected,
)
from holdfast.serving.http.routes_responses import recorded_past
from holdfast.serving.http.routes_tokens import number
from holdfast.serving.http.schema import ChatCompletion, Fork, NewSession, RelayedChat, Reward
from holdfast.serving.http.session_json import session_json, trajectory_json
from holdfast.sessions.ports import ChatUpstream
from holdfast.sessions.view import MAX_PAGE, Page, SessionState, Wanted, checked_page_size, page_start


class SessionRoutes:
    """`upstream`: the server that generates, if it is not our engine. It knows more request fields than we do.
    `as_sglang`: tools are rendered in SGLang's field order."""

    def __init__(
        self,
        chats: ChatService,
        *,
        times: StreamTimes,
        upstream: ChatUpstream | None = None,
        as_sglang: bool = False,
        may_ignore: bool = True,
    ) -> None:
        self._as_sglang = as_sglang
        self._may_ignore = may_ignore
        self._times = times
        self._chats = chats
        self._runtime = chats.setup.runtime
        self._upstream = upstream
        self._unread = frozenset() if upstream else unread_fields(chats.setup.chat)

    async def create(self, request: Request) -> Response:
        body = decode(await request.body(), NewSession, may_be_empty=True)
        view = await self._chats.create(
            owner_of(request),
            group=body.group or "",
            label=body.label or "",
            metadata=body.metadata,
            pin_tokens=body.pin_tokens,
            is_forest=None if body.history is None else body.history == "forest",
            recall=recall_limits(body.recall),
        )
        return JSONResponse({"session_id": view.session_id})

    async def list_sessions(self, request: Request) -> Response:
        query = request.query_params
        page = await self._runtime.list_sessions(
            owner_of(request),
            wanted=Wanted(query.get("label"), _state(query), query.get("q", "")),
            after=page_start(query.get("page_token", "")),
            size=MAX_PAGE if (size := number(request, "page_size")) is None else checked_page_size(size),
        )
        content = await asyncio.to_thread(_listed, page)  # a thousand take milliseconds
        return Response(content, media_type="application/json")

    async def show(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        view, trajectory = self._runtime.info(session_id, owner), self._chats.get(session_id, owner)
        query = request.query_params
        rest = await trajectory_json(
            trajectory,
            self._chats.setup.chat,
            self._runtime.journal,
            all_branches=query.get("branches") == "all",
            with_payloads=query.get("payloads") != "false",
            with_records=query.get("records") not in ("false", "messages"),
            with_messages=query.get("records") == "messages",
        )
        content = await asyncio.to_thread(msgspec.json.encode, session_json(view) | rest)
        return Response(content, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        await self._runtime.close(request.path_params["session_id"], owner_of(request))
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        body = decode(await request.body(), Fork, may_be_empty=True)
        view = await self._chats.fork(session_id, owner, label=body.label or "", turn=body.turn)
        return JSONResponse({"session_id": view.session_id})

    async def reward(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        self._chats.get(session_id, owner)
        body = decode(await request.body(), Reward)
        await self._chats.reward(session_id, owner, body.reward, turn=body.turn)
        return JSONResponse({"session_id": session_id, "reward": body.reward, "turn": body.turn})

    async def session_chat(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        trajectory = self._chats.get(session_id, owner)  # an unknown session is reported before a malformed body
        kind: type[ChatCompletion | RelayedChat] = RelayedChat if self._upstream else ChatCompletion
        earlier = partial(recorded_past, trajectory)
        call = await read_chat(request, kind, earlier, may_ignore=self._may_ignore, unread=self._unread)
        if self._upstream:
            call = call.without(self._upstream.left_out(call.decoded.fields, may_ignore=self._may_ignore))
        writer = call.writer(self._runtime.model, self._chats.setup.chat.tokenizer)
        names = {CONVERSATION: call.translated.conversation} if call.translated.conversation else {}
        turn_request = TurnRequest(
            request=await self._chat_request(request, call),
            writer=writer,
            key=await run_off_loop(partial(_key, request, call.raw), len(call.raw)),
            agent=agent_ids(request.scope["headers"]) | names,
            response_id="" if call.dialect is CHAT else writer.id,
        )
        events = self._chats.turn(session_id, owner, turn_request)
        responder = TurnResponder(
            events,
            reply=call.translated.reply,
            writer=writer,
            confirm=lambda number: self._chats.confirm(session_id, number),
            id_of=lambda number: trajectory.tree.nodes[number - 1].turn.facts.response_id,
            with_usage=call.with_usage,
            times=self._times,
            headers=ignored_header(call.ignored, self._runtime.metrics),
        )
        try:
            return await responder.respond(request, is_stream=bool(call.body.stream))
        except BaseException:
            await events.aclose()
            raise

    async def _chat_request(self, request: Request, call: ChatCall[ChatCompletion | RelayedChat]) -> ChatRequest:
        body, chat = call.body, self._chats.setup.chat
        if body.n not in (None, 1):
            raise InvalidArgument("n must be 1 on a session; fork the session to get several replies", param="n")
        if body.input_ids is not None:
            raise InvalidArgument(
                "input_ids: not allowed on a session, which keeps its own token ids", param="input_ids"
            )
        if isinstance(body, ChatCompletion):
            return await chat_request(
                body,
                chat,
                self._runtime.model,
                compiled=compiled_for(request, self._chats.setup.grammars),
                fields=call.decoded.fields,
                num_bytes=len(call.raw),
                as_sglang=self._as_sglang,
            )
        relayed = partial(relayed_request, body, chat, fields=call.decoded.fields, num_bytes=len(call.raw))
        return await run_off_loop(partial(relayed, as_sglang=self._as_sglang), len(call.raw))


def _key(request: Request, raw: bytes) -> IdempotencyKey:
    """The same body in another dialect is another request."""
    dialect: Dialect = request.scope["holdfast.dialect"]
    retries = request.headers.get("x-stainless-retry-count", "")
    is_retry = retries.isascii() and retries.isdigit() and int(retries) > 0
    key, body = request.headers.get("idempotency-key", ""), raw
    if dialect is not CHAT:
        key, body = f"{dialect.name}:{key}" if key else "", dialect.name.encode() + b"\0" + raw
    return IdempotencyKey.of(body, key=key, is_retry=is_retry)


def _listed(page: Page) -> bytes:
    rows = [session_json(view) for view in page.views]
    return msgspec.json.encode({"object": "list", "data": rows, "next_page_token": page.next_token})


def _state(query: QueryParams) -> SessionState | None:
    if (name := query.get("state")) is None:
        return None
    if name not in set(SessionState):
        raise InvalidArgument(f"state must be {', '.join(SessionState)}; got {name!r}", param="state")
    return SessionState(name)


# Other paths of an upstream: an allow-list, else 404

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True, slots=True)
class Upstream:
    """The server that generates instead of our engine, and which of its paths are open. `relays_chats`: its replies are
    passed on as they are; otherwise they are made here, of its tokens. `context_budget`: of prompts, in tokens."""

    chat: ChatUpstream
    routes: Routes
    relays_chats: bool = True
    context_budget: int = 0


class UpstreamRoutes:
    def __init__(self, chats: ChatService, upstream: Upstream) -> None:
        self._chats = chats
        self._upstream = upstream

    async def passed(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        self._chats.get(session_id, owner)
        raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
        _, _, rest = raw.decode("latin-1").removeprefix("/sessions/").partition("/")
        path = match_route(self._upstream.routes, request.method, rest)
        if path is None:
            raise HTTPException(404)
        body = await request.body()
        work = self._upstream.chat.forward(
            request.method,
            path,
            query=request.url.query,
            headers=request.headers.items(),
            body=body,
            session_id=session_id,
        )
        reply = await unless_disconnected(request.receive, work)
        return Response(reply.body, reply.status, dict(reply.headers))
