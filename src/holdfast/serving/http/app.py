"""The ASGI application of the HTTP door."""

from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.matching import load_matcher
from holdfast.chats.control import Control
from holdfast.chats.embedded_turn import EmbeddedTurns
from holdfast.chats.service import ChatService
from holdfast.chats.stateless import StatelessReplies
from holdfast.chats.trajectory import HistoryRules
from holdfast.chats.turn import ChatTurns
from holdfast.chats.turn_source import TurnSource
from holdfast.chats.upstream_turn import UpstreamTurns
from holdfast.config import ChatConfig, ServeConfig
from holdfast.serving.http.middleware import IMPORT_PATH, HttpMiddleware, owner_of
from holdfast.serving.http.openapi import document
from holdfast.serving.http.routes_control import ControlRoutes
from holdfast.serving.http.routes_health import HealthRoutes
from holdfast.serving.http.routes_openai import OpenAIRoutes
from holdfast.serving.http.routes_purge import PurgeRoutes
from holdfast.serving.http.routes_samples import SampleRoutes
from holdfast.serving.http.routes_sessions import SessionRoutes
from holdfast.serving.http.routes_transfer import TransferRoutes
from holdfast.serving.http.routes_upstream import METHODS, Upstream, UpstreamRoutes
from holdfast.serving.keys import Keys
from holdfast.sessions.admission import Admission
from holdfast.sessions.journal.base import StoredSession
from holdfast.sessions.portable.transfers import Transfers
from holdfast.sessions.runtime import Runtime


def create_app(
    runtime: Runtime,
    config: ServeConfig,
    *,
    chat: ChatModel | None = None,
    chat_config: ChatConfig | None = None,
    upstream: Upstream | None = None,
    stored: Sequence[StoredSession] = (),
    keys: Keys | None = None,
    not_ready: Callable[[], str | None] = lambda: None,
) -> ASGIApp:
    """Health and metrics, and where there is a `chat` model everything that speaks OpenAI."""
    health = HealthRoutes(runtime.metrics, not_ready)
    routes = [
        Route("/health", health.health),
        Route("/healthz", health.health),
        Route("/readyz", health.readyz),
        Route("/metrics", health.metrics),
        Route("/openapi.json", document),
    ]
    if chat is not None:
        routes += _chat_routes(runtime, config, chat, chat_config or ChatConfig(), upstream=upstream, stored=stored)
    return HttpMiddleware(
        _Routes(Router(routes, default=_not_found, redirect_slashes=False)), config, keys or Keys(), runtime.metrics
    )


def _chat_routes(
    runtime: Runtime,
    config: ServeConfig,
    chat: ChatModel,
    rules: ChatConfig,
    *,
    upstream: Upstream | None,
    stored: Sequence[StoredSession],
) -> list[Route]:
    admission = _admission(runtime, config)
    chats = _chats(runtime, config, chat, rules, admission=admission, upstream=upstream)
    for session in stored:
        if session.opened.kind == "chat":
            chats.restore(session)
    openai = OpenAIRoutes(chat, runtime.model, StatelessReplies(runtime, admission))
    sessions = SessionRoutes(chat, runtime.model, chats, is_relayed=upstream is not None)
    controls = ControlRoutes(chats)
    transfer = TransferRoutes(Transfers(runtime))

    async def session_models(request: Request) -> Response:
        chats.get(request.path_params["session_id"], owner_of(request))
        return await openai.models(request)

    one = "/sessions/{session_id}"
    rest = [Route(f"{one}/v1/models", session_models)]
    if upstream is not None:
        rest = [Route(f"{one}/{{path:path}}", UpstreamRoutes(chats, upstream).passed, methods=METHODS)]
    return [
        Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{model:path}", openai.model),
        Route("/sessions", sessions.create, methods=["POST"]),
        Route(IMPORT_PATH, transfer.import_session, methods=["POST"]),
        Route("/sessions/purge", PurgeRoutes(runtime, retain_days=config.retain_days).purge, methods=["POST"]),
        Route("/sessions", sessions.list_sessions),
        Route(one, sessions.show),
        Route(one, sessions.delete, methods=["DELETE"]),
        Route(f"{one}/fork", sessions.fork, methods=["POST"]),
        Route(f"{one}/export", transfer.export),
        Route(f"{one}/samples", SampleRoutes(chats).samples, methods=["POST"]),
        Route(f"{one}/reward", sessions.reward, methods=["POST"]),
        Route(f"{one}/v1/chat/completions", sessions.session_chat, methods=["POST"]),
        Route("/control/pause", controls.pause, methods=["POST"]),
        Route("/control/resume", controls.resume, methods=["POST"]),
        Route("/control/weight_version", controls.weight_version, methods=["PUT"]),
        *rest,
    ]


def _admission(runtime: Runtime, config: ServeConfig) -> Admission:
    return Admission(
        config.max_concurrent or runtime.capacity,
        max_queue=config.queue_max if config.admission == "queue" else 0,
        max_wait_s=config.queue_max_wait_s,
        metrics=runtime.metrics,
    )


def _chats(
    runtime: Runtime,
    config: ServeConfig,
    chat: ChatModel,
    rules: ChatConfig,
    *,
    admission: Admission,
    upstream: Upstream | None,
) -> ChatService:
    control = Control(weight_version=config.weight_version, max_wait_s=config.pause_max_wait_s)
    making: TurnSource = EmbeddedTurns(runtime, chat, control)
    if upstream is not None:
        making = UpstreamTurns(runtime, upstream.chat, control)
    turns = ChatTurns(
        runtime,
        chat,
        making,
        rules=HistoryRules(
            matcher=load_matcher(rules.matcher),
            max_rollback=rules.max_rollback,
            may_edit_replies=rules.edited_reply == "branch",
        ),
        admission=admission,
        control=control,
    )
    return ChatService(runtime, chat, turns, control)


class _Routes:
    """The router; with an application in the scope it raises where it would answer in plain text."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self._router(scope, receive, send)
        except HTTPException as exc:
            if exc.status_code != 405:
                raise
            raise HTTPException(405, headers={"allow": self._allowed(scope)}) from exc

    def _allowed(self, scope: Scope) -> str:
        """All methods of a path: it may have a route for each."""
        routes = [route for route in self._router.routes if isinstance(route, Route)]
        matching = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
