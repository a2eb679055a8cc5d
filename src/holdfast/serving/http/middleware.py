"""Around every request: a request id, who may call, a size limit, the error table, a count, and the access log."""

import contextlib
import email.utils
import logging
import re
import secrets
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from holdfast.config import ServeConfig
from holdfast.errors import (
    Draining,
    Fenced,
    HoldfastError,
    NotServing,
    PayloadTooLarge,
    RecordUncertain,
    RequestTimeout,
    SessionElsewhere,
)
from holdfast.metrics import Metrics
from holdfast.serving.cluster.http_forward import REFUSED, HttpForwarder
from holdfast.serving.cluster.membership import MEMBER, Cluster
from holdfast.serving.http.dialects import CHAT, dialect_of
from holdfast.serving.http.error_response import response_for, told
from holdfast.serving.http.response import ClientGone
from holdfast.serving.http.routes_console import is_console
from holdfast.serving.http.web_pages import PageGuard, read_origins, with_cors
from holdfast.serving.keys import Keys
from holdfast.serving.pacing import Pacing
from holdfast.serving.running_calls import RunningCalls
from holdfast.sessions.limits import Pace

logger = logging.getLogger(__name__)
access = logging.getLogger("holdfast.access")

OPEN_PATHS = ("/", "/health", "/healthz", "/readyz", "/metrics", "/openapi.json")
IMPORT_PATH = "/sessions/import"
WEIGHTS_PATH = "/control/weights"
STATELESS_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GONE = 499  # what nginx calls a client that left


class HttpMiddleware:
    """An ASGI application around the router."""

    def __init__(
        self,
        router: Router,
        config: ServeConfig,
        keys: Keys,
        metrics: Metrics,
        *,
        cluster: Cluster | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        self._router = router
        self._pacing = pacing or Pacing()
        self._cluster = cluster
        self._forwarder = HttpForwarder(router, cluster, config, metrics) if cluster else None
        self._keys = keys
        self.running = RunningCalls()
        self._page_guard = PageGuard(config, keys)
        self._app = with_cors(self._handle, read_origins(config, keys))
        self._metrics = metrics
        self._limit = _Limit(config.max_body_mb, "the request body", "--max-body-mb")
        self._import_limit = _Limit(config.max_session_mb, "the session file", "--max-session-mb")
        self._patience_s = config.connection_timeout_s
        self._logs_bodies = config.log_prompts
        self._is_plain = config.compat == "miles"
        self._deprecation: dict[str, str] = {}
        if config.deprecation_headers:
            sunset = datetime.fromisoformat(config.sunset).replace(tzinfo=UTC)
            self._deprecation = {
                "deprecation": "true",
                "sunset": email.utils.format_datetime(sunset, usegmt=True),
                "link": '</sessions>; rel="successor-version"',
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not scope["path"].endswith(STATELESS_PATHS):  # who asks for tokens waits in admission
                await self._pacing.wait()
            await self._app(scope, receive, send)

    async def close(self) -> None:
        """Close connections to other members."""
        if self._forwarder:
            await self._forwarder.close()

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        extra = self._deprecation if scope["path"] in STATELESS_PATHS else {}
        call = _Call(scope, receive, send, extra, member=self._cluster.name if self._cluster else "")
        started = time.perf_counter()
        try:
            async with self.running:
                await self._guarded(call)
        except (ClientGone, ClientDisconnect):
            call.status = call.status or _GONE
        except Exception as exc:  # noqa: BLE001 - every request gets an answer
            await self._refuse(call, exc)
        finally:
            duration = time.perf_counter() - started
            route = getattr(scope.get("endpoint"), "__name__", "none")
            self._metrics.http_requests.labels(route, str(call.status or _GONE)).inc()
            self._metrics.http_duration.observe(duration)
            if access.isEnabledFor(logging.INFO):
                access.info(msgspec.json.encode(self._line(call, route, duration)).decode())

    async def _guarded(self, call: "_Call") -> None:
        headers = Headers(scope=call.scope)
        self._page_guard.check(headers)
        if call.scope["path"] not in OPEN_PATHS and not is_console(call.scope["path"]):
            call.scope["holdfast.owner"] = self._keys.owner_of(
                headers.getlist("authorization"), headers.getlist("x-api-key")
            )
            self.running.check_open()
        length = headers.get("content-length", "")
        limit = self._limit_of(call.scope["path"], headers)
        if length.isdigit():
            limit.check(int(length))
        async with contextlib.AsyncExitStack() as held:
            call.scope["holdfast.held"] = held  # what the routes need until the response is sent
            await self._route(call.scope, self._limited(call, limit), call.send)

    def _limit_of(self, path: str, headers: Headers) -> "_Limit":
        if path == WEIGHTS_PATH and is_file(headers):
            return _MODEL_LIMIT
        return self._import_limit if path == IMPORT_PATH else self._limit

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """With an application in the scope the router raises where it would answer in plain text."""
        scope["app"] = self
        try:
            await (self._forwarder or self._router)(scope, receive, send)
        except HTTPException as exc:
            if exc.status_code != 405:
                raise
            raise HTTPException(405, headers={"allow": self._allowed(scope)}) from exc

    def _allowed(self, scope: Scope) -> str:
        """All methods of a path: it may have a route for each."""
        routes = [route for route in self._router.routes if isinstance(route, Route)]
        matching = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({method for route in matching for method in route.methods or ()}))

    def _limited(self, call: "_Call", limit: "_Limit") -> Receive:
        received = 0
        is_logged = self._logs_bodies and limit is self._limit  # session files are no text
        pace = None if limit is self._import_limit else Pace(self._patience_s)  # session files have their own

        async def receive() -> Message:
            nonlocal received, pace
            try:
                message = await (pace.wait_for(call.receive()) if pace else call.receive())
            except TimeoutError:
                raise RequestTimeout(
                    f"the request body stopped arriving, or arrives too slowly, for {self._patience_s:g} s; "
                    "send it again"
                ) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                limit.check(received)
                if pace:
                    pace.received(len(message.get("body", b"")))
                if not message.get("more_body"):
                    pace = None  # what is waited for from now on is that the client leaves
                if is_logged:
                    call.body += message.get("body", b"")
            return message

        return receive

    async def _refuse(self, call: "_Call", exc: Exception) -> None:
        if isinstance(exc, Draining | RecordUncertain) and call.status:
            await call.end_events(exc)
            return
        if call.status:  # too late for an answer: end the connection instead of pretending that all went well
            raise exc
        response = response_for(exc, call.dialect, is_plain=self._is_plain, request_id=call.request_id)
        if isinstance(exc, NotServing | SessionElsewhere):
            response.headers[REFUSED] = exc.code
        if isinstance(exc, Fenced) and self._cluster:
            self._cluster.suspect()
        if response.status_code == 500 and not isinstance(exc, HoldfastError):
            logger.error(
                "request %s failed: %s %s", call.request_id, call.scope["method"], call.scope["path"], exc_info=exc
            )
        await response(call.scope, call.receive, call.send)

    def _line(self, call: "_Call", route: str, duration_s: float) -> dict[str, Any]:
        line = {
            "request_id": call.request_id,
            "method": call.scope["method"],
            "path": call.scope["path"],
            "route": route,
            "status": call.status or _GONE,
            "duration_ms": round(duration_s * 1000, 1),
            "owner": call.scope.get("holdfast.owner"),
            "client": (call.scope.get("client") or [None])[0],
        }
        return line | ({"body": call.body.decode(errors="replace")} if self._logs_bodies else {})


class _Limit(NamedTuple):
    """How large something may be, and which setting says so."""

    num_mb: int
    what: str
    flag: str

    def check(self, num_bytes: int) -> None:
        if num_bytes > self.num_mb << 20:
            raise PayloadTooLarge(f"{self.what} is larger than {self.num_mb} MB ({self.flag})")


_MODEL_LIMIT = _Limit(1 << 30, "the file of weights", "")  # the route knows how large the model is


def is_file(headers: Headers) -> bool:
    """Whether the body is a file rather than JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/octet-stream"


class _Call:
    """One request and what is known of its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, extra: dict[str, str], *, member: str = "") -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.dialect = scope["holdfast.dialect"] = dialect_of(scope["path"])
        scope["holdfast.request_id"] = self.request_id
        self.scope = scope
        self.receive = receive
        self.status = 0
        self.body = b""
        self._has_ended = False
        self._is_events = False
        self._send = send
        self._member = member
        self._extra = extra | {"x-request-id": self.request_id}
        if self.dialect is not CHAT:
            self._extra["request-id"] = self.request_id  # as Anthropic calls it

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            self._is_events = headers.get("content-type", "").startswith("text/event-stream")
            headers.update(self._extra)
            if self._member:
                headers.setdefault(MEMBER, self._member)
            if session_id := self.scope.get("holdfast.session"):
                headers["holdfast-session"] = session_id
                for name in ("deprecation", "sunset", "link"):  # of a stateless request, which it is not
                    del headers[name]
        elif not message.get("more_body"):
            self._has_ended = True
        await self._send(message)

    async def end_events(self, error: HoldfastError) -> None:
        """End a stream of events with an error. Of any other response that was begun the connection is closed."""
        if self._is_events and not self._has_ended:
            event = self.dialect.error_event(*told(error))
            await self.send({"type": "http.response.body", "body": event, "more_body": False})


def owner_of(request: Request) -> str:
    owner: str = request.scope["holdfast.owner"]
    return owner
