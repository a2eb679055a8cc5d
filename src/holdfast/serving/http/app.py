"""The ASGI application of the HTTP endpoint: its routes, and what they are wired to."""

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.backends.passthrough import carried, carried_headers
from holdfast.chats.service import ChatService
from holdfast.chats.stateless import StatelessReplies
from holdfast.config import ServeConfig
from holdfast.errors import SessionNotFound
from holdfast.serving.cluster.membership import Cluster, Describe, Using
from holdfast.serving.http.middleware import IMPORT_PATH, WEIGHTS_PATH, HttpMiddleware, owner_of
from holdfast.serving.http.named_sessions import Endpoint, NamedSessions
from holdfast.serving.http.openapi import document, index
from holdfast.serving.http.response import StreamTimes
from holdfast.serving.http.response_store import ResponseStore
from holdfast.serving.http.routes_admin import ClusterRoutes, ControlRoutes, HealthRoutes
from holdfast.serving.http.routes_console import PATH as CONSOLE
from holdfast.serving.http.routes_console import console
from holdfast.serving.http.routes_data import DataRoutes
from holdfast.serving.http.routes_events import EventRoutes
from holdfast.serving.http.routes_openai import OpenAIRoutes
from holdfast.serving.http.routes_responses import SessionResponses, StatelessResponses
from holdfast.serving.http.routes_sessions import METHODS, SessionRoutes, Upstream, UpstreamRoutes
from holdfast.serving.http.routes_tokens import TokenRoutes
from holdfast.serving.http.routes_weights import load_weights
from holdfast.serving.keys import Keys
from holdfast.serving.pacing import Pacing
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.transfers import Transfers
from holdfast.sessions.view import Search


def create_app(
    runtime: Runtime,
    config: ServeConfig,
    *,
    chats: ChatService | None = None,
    transfers: Transfers | None = None,
    upstream: Upstream | None = None,
    keys: Keys | None = None,
    not_ready: Callable[[], str | None] = lambda: None,
    cluster: Cluster | None = None,
    describe: Describe | None = None,
    search: Search | None = None,
    pacing: Pacing | None = None,
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
    if describe is not None:
        routes.append(Route("/cluster", ClusterRoutes(describe).cluster))
    if chats is not None:
        routes += [Route(CONSOLE, console), Route(f"{CONSOLE}/{{name}}", console), Route(f"{CONSOLE}/", console)]
        routes += _chat_routes(chats, transfers or Transfers(runtime, chats), config, upstream, cluster, search=search)
    carrying = [Middleware(CarriedHeaders)] if upstream else []
    router = Router(routes, default=_not_found, redirect_slashes=False, middleware=carrying)
    return HttpMiddleware(router, config, keys or Keys(), runtime.metrics, cluster=cluster, pacing=pacing)


class CarriedHeaders:
    """Lets harmless headers of a request, such as `traceparent`, go along to the upstream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        carried.set(carried_headers(Headers(scope=scope).items()))
        await self._app(scope, receive, send)


_SESSION = "/sessions/{session_id}"


def _chat_routes(
    chats: ChatService,
    transfers: Transfers,
    config: ServeConfig,
    upstream: Upstream | None,
    cluster: Cluster | None,
    *,
    search: Search | None,
) -> list[Route]:
    setup = chats.setup
    runtime = setup.runtime
    using = cluster.using if cluster else runtime.using
    rules: dict[str, Any] = {
        "as_sglang": config.compat == "miles",
        "may_ignore": config.unknown_fields == "ignore",
        "times": StreamTimes(config.stream_stall_s, config.stream_ping_s),
    }
    replies, store = StatelessReplies(runtime, setup.admission), ResponseStore()
    openai = OpenAIRoutes(setup.chat, runtime, replies, setup.grammars, store=store, **rules)
    relayed = upstream.chat if upstream and upstream.relays_chats else None
    sessions = SessionRoutes(chats, upstream=relayed, **rules)

    def on_session(endpoint: Endpoint) -> Endpoint:
        """The same on a session that must be there, and need not be known otherwise."""

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            chats.get(request.path_params["session_id"], owner_of(request))
            return await endpoint(request)

        return checked

    rest = [
        Route(f"{_SESSION}/v1/models", on_session(openai.models)),
        Route(f"{_SESSION}/v1/models/{{model:path}}", on_session(openai.model)),
    ]
    if upstream is not None:
        rest = [Route(f"{_SESSION}/{{path:path}}", UpstreamRoutes(chats, upstream).passed, methods=METHODS)]
    by_header = NamedSessions(chats, config, lambda endpoint: _using(using, endpoint))
    routes = [
        *_generation_routes(openai, sessions, by_header, on_session),
        *_response_routes(StatelessResponses(store), SessionResponses(chats), by_header),
        *_session_routes(
            sessions.create if cluster is None else _where_there_is_room(sessions.create, cluster),
            sessions,
            DataRoutes(runtime, chats, transfers, config=config, search=search),
            tokens=TokenRoutes(chats),
            events=EventRoutes(chats),
        ),
        *_control_routes(chats),
        *rest,
    ]
    return [_on_session(route, using) if route.path.startswith(_SESSION) else route for route in routes]


def _on_session(route: Route, using: Using) -> Route:
    may_be_closed = route.path == f"{_SESSION}/export"
    return Route(route.path, _using(using, route.endpoint, may_be_closed=may_be_closed), methods=route.methods)


def _using(using: Using, endpoint: Endpoint, *, may_be_closed: bool = False) -> Endpoint:
    """The endpoint, while the session of the request is in memory: until the response is sent."""

    @wraps(endpoint)
    async def used(request: Request) -> Response:
        held: contextlib.AsyncExitStack = request.scope["holdfast.held"]
        with contextlib.suppress(SessionNotFound) if may_be_closed else contextlib.nullcontext():
            await held.enter_async_context(using(request.path_params["session_id"], owner_of(request)))
        return await endpoint(request)

    return used


def _where_there_is_room(create: Endpoint, cluster: Cluster) -> Endpoint:
    """`create`, unless another member should take the new session."""

    @wraps(create)
    async def placed(request: Request) -> Response:
        await cluster.check_room()
        return await create(request)

    return placed


def _both(by_header: NamedSessions, path: str, stateless: Endpoint, on_session: Endpoint, *methods: str) -> list[Route]:
    """A path without a session, with one in its URL, and with one that a header names."""
    return [
        Route(path, by_header.endpoint(stateless, on_session), methods=methods),
        Route(_SESSION + path, on_session, methods=methods),
    ]


def _generation_routes(
    openai: OpenAIRoutes,
    sessions: SessionRoutes,
    by_header: NamedSessions,
    on_session: Callable[[Endpoint], Endpoint],
) -> list[Route]:
    count = openai.count_tokens
    chats = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    return [
        *(r for path in chats for r in _both(by_header, path, openai.chat_completions, sessions.session_chat, "POST")),
        *_both(by_header, "/v1/messages/count_tokens", count, on_session(count), "POST"),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/models", by_header.endpoint(openai.models, on_session(openai.models))),
        Route("/v1/models/{model:path}", openai.model),
    ]


def _response_routes(kept: StatelessResponses, recorded: SessionResponses, by_header: NamedSessions) -> list[Route]:
    response, conversation = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    return [
        *_both(by_header, response, kept.get_response, recorded.get_response, "GET"),
        *_both(by_header, response, kept.delete_response, recorded.delete_response, "DELETE"),
        *_both(by_header, f"{response}/input_items", kept.input_items, recorded.input_items, "GET"),
        *_both(by_header, "/v1/conversations", kept.create_conversation, recorded.create_conversation, "POST"),
        Route(conversation, kept.get_conversation),
        Route(conversation, kept.delete_conversation, methods=["DELETE"]),
    ]


def _session_routes(
    create: Endpoint, sessions: SessionRoutes, data: DataRoutes, *, tokens: TokenRoutes, events: EventRoutes
) -> list[Route]:
    return [
        Route("/sessions", create, methods=["POST"]),
        Route(IMPORT_PATH, data.import_session, methods=["POST"]),
        Route("/sessions/purge", data.purge, methods=["POST"]),
        Route("/sessions", sessions.list_sessions),
        Route(_SESSION, sessions.show),
        Route(_SESSION, sessions.delete, methods=["DELETE"]),
        Route(f"{_SESSION}/fork", sessions.fork, methods=["POST"]),
        Route(f"{_SESSION}/export", data.export),
        Route(f"{_SESSION}/samples", data.samples, methods=["POST"]),
        Route("/samples/verify", data.verify_samples, methods=["POST"]),
        Route(f"{_SESSION}/search", data.search),
        Route(f"{_SESSION}/tokens", tokens.tokens),
        Route(f"{_SESSION}/events", events.session_events),
        Route("/events", events.server_events),
        Route(f"{_SESSION}/reward", sessions.reward, methods=["POST"]),
    ]


def _control_routes(chats: ChatService) -> list[Route]:
    control = ControlRoutes(chats)
    return [
        Route("/control/pause", control.pause, methods=["POST"]),
        Route("/control/resume", control.resume, methods=["POST"]),
        Route("/control/weight_version", control.weight_version, methods=["PUT"]),
        Route(WEIGHTS_PATH, load_weights(chats.setup), methods=["POST"]),
    ]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
