"""The other paths of an upstream that the owner of a session may use: an allow-list, else 404."""

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.backends.transport import Routes, Transport, forward, match_route
from holdfast.chats.service import ChatService
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.response import unless_disconnected
from holdfast.sessions.ports import ChatUpstream

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True, slots=True)
class Upstream:
    """The server that generates instead of our engine, and which of its paths are open."""

    chat: ChatUpstream
    transport: Transport
    routes: Routes


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
        work = forward(
            self._upstream.transport,
            request.method,
            path,
            query=request.url.query,
            headers=request.headers.items(),
            body=body,
            session_id=session_id,
        )
        reply = await unless_disconnected(request.receive, work)
        return Response(reply.body, reply.status, dict(reply.headers))
