"""The ASGI application of the HTTP endpoint: its routes, and what they are wired to."""

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from holdfast.chats.service import ChatService
from holdfast.chats.stateless import StatelessReplies
from holdfast.config import ServeConfig
from holdfast.serving.http.middleware import IMPORT_PATH, HttpMiddleware, owner_of
from holdfast.serving.http.openapi import document, index
from holdfast.serving.http.routes_admin import ControlRoutes, HealthRoutes
from holdfast.serving.http.routes_data import DataRoutes
from holdfast.serving.http.routes_openai import OpenAIRoutes
from holdfast.serving.http.routes_sessions import METHODS, SessionRoutes, Upstream, UpstreamRoutes
from holdfast.serving.keys import Keys
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.transfers import Transfers


def create_app(
    runtime: Runtime,
    config: ServeConfig,
    *,
    chats: ChatService | None = None,
    transfers: Transfers | None = None,
    upstream: Upstream | None = None,
    keys: Keys | None = None,
    not_ready: Callable[[], str | None] = lambda: None,
) -> HttpMiddleware:
    """Health and metrics, and where there are `chats` the whole API."""
    health = HealthRoutes(runtime.metrics, not_ready)
    routes = [
        Route("/", index),
        Route("/health", health.health),
        Route("/healthz", health.health),
        Route("/readyz", health.readyz),
        Route("/metrics", health.metrics),
        Route("/openapi.json", document),
    ]
    if chats is not None:
        routes += _chat_routes(chats, transfers or Transfers(runtime, chats), config, upstream)
    router = Router(routes, default=_not_found, redirect_slashes=False)
    return HttpMiddleware(router, config, keys or Keys(), runtime.metrics)


def _chat_routes(
    chats: ChatService, transfers: Transfers, config: ServeConfig, upstream: Upstream | None
) -> list[Route]:
    setup = chats.setup
    runtime = setup.runtime
    rules: dict[str, bool] = {"as_sglang": config.compat == "miles", "may_ignore": config.unknown_fields == "ignore"}
    replies = StatelessReplies(runtime, setup.admission)
    openai = OpenAIRoutes(setup.chat, runtime.model, replies, setup.grammars, stall_s=config.stream_stall_s, **rules)
    sessions = SessionRoutes(chats, upstream=upstream.chat if upstream else None, **rules)
    data = DataRoutes(runtime, chats, transfers, retain_days=config.retain_days)
    control = ControlRoutes(chats)

    async def session_models(request: Request) -> Response:
        chats.get(request.path_params["session_id"], owner_of(request))
        return await openai.models(request)

    async def session_model(request: Request) -> Response:
        chats.get(request.path_params["session_id"], owner_of(request))
        return await openai.model(request)

    one = "/sessions/{session_id}"
    rest = [Route(f"{one}/v1/models", session_models), Route(f"{one}/v1/models/{{model:path}}", session_model)]
    if upstream is not None:
        rest = [Route(f"{one}/{{path:path}}", UpstreamRoutes(chats, upstream).passed, methods=METHODS)]
    return [
        Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{model:path}", openai.model),
        Route("/sessions", sessions.create, methods=["POST"]),
        Route(IMPORT_PATH, data.import_session, methods=["POST"]),
        Route("/sessions/purge", data.purge, methods=["POST"]),
        Route("/sessions", sessions.list_sessions),
        Route(one, sessions.show),
        Route(one, sessions.delete, methods=["DELETE"]),
        Route(f"{one}/fork", sessions.fork, methods=["POST"]),
        Route(f"{one}/export", data.export),
        Route(f"{one}/samples", data.samples, methods=["POST"]),
        Route(f"{one}/reward", sessions.reward, methods=["POST"]),
        Route(f"{one}/v1/chat/completions", sessions.session_chat, methods=["POST"]),
        Route("/control/pause", control.pause, methods=["POST"]),
        Route("/control/resume", control.resume, methods=["POST"]),
        Route("/control/weight_version", control.weight_version, methods=["PUT"]),
        *rest,
    ]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
