"""HTTP requests for sessions that another member owns: sent to it as they came, and its response sent back as it comes.

A request is sent again only where the member did nothing of it: it said so, or was not reached. One hop at most.
"""

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any

import aiohttp
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from holdfast.config import ServeConfig
from holdfast.errors import JournalFailed, RecordUncertain, SessionElsewhere
from holdfast.metrics import Metrics
from holdfast.serving.cluster.membership import FORWARDED, Cluster, Outcome, Peer, is_forwarded

REFUSED = "holdfast-refused"  # a response's header: nothing of the forwarded request was done

_CONNECT_S = 2.0
_FORWARDED = FORWARDED.encode()
_KEEPALIVE_S = 4.0  # below a member's own limit, so that we close idle connections first
_SAFE = ("GET", "HEAD")
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
# Of requests: what the next hop says itself, and a page's origin, which was checked here
_NEVER_SENT = _HOP_BY_HOP | {b"content-length", b"expect", b"origin", b"x-request-id"}
_NEVER_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
_OURS = ("user-agent", "accept", "accept-encoding", "content-type")  # headers that aiohttp would add


class HttpForwarder:
    """An ASGI application around `app`: where that raises SessionElsewhere, the member that it names answers."""

    def __init__(self, app: ASGIApp, cluster: Cluster, config: ServeConfig, metrics: Metrics) -> None:
        self._app = app
        self._cluster = cluster
        self._forwards = metrics.cluster_forwards
        self._ca = config.peer_ca
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == _FORWARDED for name, _ in scope["headers"]):
            is_forwarded.set(True)
            await self._app(scope, receive, send)
            return
        request = _Request(scope, receive, send)
        attempts = self._cluster.attempts()
        while True:
            try:
                await self._app(scope, request.receive, request.send)
                return
            except SessionElsewhere as exc:
                elsewhere = exc
            await request.read()
            outcome = await self._forward(request, elsewhere.member)
            self._forwards.labels("http", outcome).inc()
            if outcome == "answered":
                return
            await self._cluster.reconsider(elsewhere, scope["holdfast.owner"], outcome, attempts)

    async def _forward(self, request: "_Request", name: str) -> Outcome:
        peer = await self._cluster.peer(name)
        if peer is None or not peer.member.http:
            return "unreached"
        with peer.answering():
            try:
                return await _unless_gone(self._exchange(request, peer), request, peer)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                return "unreached"
            except (aiohttp.ClientError, OSError, _PeerGone) as exc:
                if request.scope["method"] in _SAFE and not request.has_begun:
                    return "lost"
                self._forwards.labels("http", "lost").inc()
                raise RecordUncertain(
                    f"member {name} stopped answering in the middle of the request, which may be on record; "
                    "send it again: a repeated turn is recognised"
                ) from exc

    async def _exchange(self, request: "_Request", peer: Peer) -> Outcome:
        if self._session is None:
            self._session = self._new_session()
        # Two passes of the loop, in which idle connections that the member has closed are dropped: what is sent on one
        # is lost, and a request that may have been read is not sent again.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        async with self._session.request(
            request.scope["method"],
            request.url(peer),
            data=request.body or None,
            headers=request.headers(self._cluster.name),
            allow_redirects=False,
            skip_auto_headers=_OURS,
        ) as response:
            if REFUSED in response.headers:
                return "refused"
            headers = [(name, value) for name, value in response.raw_headers if name.lower() not in _NEVER_RETURNED]
            await request.send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for chunk in response.content.iter_any():
                await request.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await request.send({"type": "http.response.body", "body": b""})
            return "answered"

    def _new_session(self) -> aiohttp.ClientSession:
        checks = ssl.create_default_context(cafile=self._ca) if self._ca else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=checks),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )


class _PeerGone(Exception):
    """The member that was to answer lost its lease."""


async def _unless_gone(work: Coroutine[Any, Any, Outcome], request: "_Request", peer: Peer) -> Outcome:
    """The result of `work`, which is cancelled where the client leaves or the member dies."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(request.disconnected())
    try:
        await asyncio.wait((task, left, peer.gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if left.done() else _PeerGone
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


class _Request:
    """A request whose body can be read again, and which knows whether its response has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.body: bytes | None = None
        self.has_begun = False
        self._receive = receive
        self._send = send
        self._is_replayed = False
        self._was_read = False  # by an application that did not answer it

    async def receive(self) -> Message:
        if self._is_replayed:
            self._is_replayed = False
            return {"type": "http.request", "body": self.body, "more_body": False}
        self._was_read = self.body is None
        return await self._receive()

    async def send(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)

    async def read(self) -> None:
        """Read the body whole; `receive` gives it once more. It must not have been read, nor answered, before."""
        if self.has_begun or self._was_read:
            raise JournalFailed("the session moved to another member while the request was served; send it again")
        self._is_replayed = True
        if self.body is not None:
            return
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        self.body = b"".join(parts)

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def url(self, peer: Peer) -> URL:
        path = (self.scope.get("raw_path") or self.scope["path"].encode()).decode("latin-1")
        query = self.scope["query_string"].decode("latin-1")
        base = f"{'https' if peer.member.has_tls else 'http'}://{peer.member.http}"
        return URL(f"{base}{path}?{query}" if query else f"{base}{path}", encoded=True)

    def headers(self, member: str) -> list[tuple[str, str]]:
        """The client's own, by which the owner of the session authenticates it again."""
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self.scope["headers"]
            if name not in _NEVER_SENT
        ]
        return [*kept, (FORWARDED, member), ("x-request-id", self.scope["holdfast.request_id"])]
