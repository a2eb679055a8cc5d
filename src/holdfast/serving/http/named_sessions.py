"""Sessions that a header names: a request without a session in its path becomes a request on one."""

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from holdfast.chats.service import ChatService
from holdfast.config import ServeConfig
from holdfast.errors import ConfigError, InvalidArgument
from holdfast.serving.http.middleware import owner_of

Endpoint = Callable[[Request], Awaitable[Response]]

HEADER = "holdfast-session"
_MAX_NAME = 256  # characters
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")  # of a header's name


class NamedSessions:
    """`--session-header`: further headers that name a session; those sessions are not those of `Holdfast-Session`.
    `using` is put around endpoints on sessions."""

    def __init__(self, chats: ChatService, config: ServeConfig, using: Callable[[Endpoint], Endpoint]) -> None:
        self._chats = chats
        self._using = using
        self._headers = [name.strip().lower() for name in config.session_header.split(",") if name.strip()]
        for name in self._headers:
            if not _TOKEN.issuperset(name):
                raise ConfigError(f"--session-header: {name!r} is not the name of a header")

    def endpoint(self, stateless: Endpoint, on_session: Endpoint) -> Endpoint:
        """`on_session` for requests that name a session, `stateless` for others."""
        using = self._using(on_session)

        @wraps(stateless)
        async def either(request: Request) -> Response:
            if (name := self._name(request)) is None:
                return await stateless(request)
            session_id = await self._chats.named(owner_of(request), name)
            request.scope["holdfast.session"] = request.path_params["session_id"] = session_id
            return await using(request)

        return either

    def _name(self, request: Request) -> str | None:
        for header in (HEADER, *self._headers):
            if (value := request.headers.get(header)) is None:
                continue
            if not 1 <= len(value) <= _MAX_NAME or not value.isprintable():
                raise InvalidArgument(f"{header} must be 1 to {_MAX_NAME} printable characters", param=header)
            return value if header == HEADER else f"{header}:{value}"
        return None
