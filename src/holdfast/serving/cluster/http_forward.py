"""HTTP requests for sessions that another member owns: sent to it as they came, and its response sent back as it comes.

A request is sent again only where the member did nothing of it: it said so, or was not reached. One hop at most.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.config import ServeConfig
from holdfast.errors import JournalFailed, RecordUncertain, SessionElsewhere
from holdfast.metrics import Metrics
from holdfast.serving.cluster.membership import FORWARDED, Cluster, Outcome, Peer, is_forwarded
from holdfast.serving.cluster.peer_links import Header, LinkLost, PeerLink, PeerLinks

REFUSED = "holdfast-refused"  # a response's header: nothing of the forwarded request was done

_FORWARDED = FORWARDED.encode()
_REFUSED = REFUSED.encode()
_WATCH_S = 0.05  # that a response may take before it is watched whether the client leaves: most take less
_SAFE = ("GET", "HEAD")
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
# Of requests: what the next hop says itself, and a page's origin, which was checked here
_NEVER_SENT = _HOP_BY_HOP | {b"content-length", b"expect", b"origin", b"x-request-id"}
_NEVER_RETURNED = _HOP_BY_HOP | {b"date", b"server"}


class HttpForwarder:
    """An ASGI application around `app`: where that raises SessionElsewhere, the member that it names answers."""

    def __init__(self, app: ASGIApp, cluster: Cluster, config: ServeConfig, metrics: Metrics) -> None:
        self._app = app
        self._cluster = cluster
        self._forwards = metrics.cluster_forwards
        self._links = PeerLinks(config.peer_ca)

    async def close(self) -> None:
        self._links.close()

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
                link = await self._links.take(peer.member.http, has_tls=peer.member.has_tls)
            except OSError:
                return "unreached"
            try:
                async with _watched(link, request, peer):
                    return await self._exchange(request, link, peer)
            except (LinkLost, OSError, _PeerGone) as exc:
                if request.scope["method"] in _SAFE and not request.has_begun:
                    return "lost"
                self._forwards.labels("http", "lost").inc()
                raise RecordUncertain(
                    f"member {name} stopped answering in the middle of the request, which may be on record; "
                    "send it again: a repeated turn is recognised"
                ) from exc
            finally:
                self._links.give_back(link)

    async def _exchange(self, request: "_Request", link: PeerLink, peer: Peer) -> Outcome:
        body = request.body or b""
        link.send(request.scope["method"], request.target, request.headers(self._cluster.name, peer), body)
        status, headers = await link.head()
        if any(name == _REFUSED for name, _ in headers):
            return "refused"
        headers = [header for header in headers if header[0] not in _NEVER_RETURNED]
        await request.send({"type": "http.response.start", "status": status, "headers": headers})
        is_last = False
        while not is_last:
            body, is_last = await link.chunk()
            await request.send({"type": "http.response.body", "body": body, "more_body": not is_last})
        return "answered"


class _PeerGone(Exception):
    """The member that was to answer lost its lease."""


@contextlib.asynccontextmanager
async def _watched(link: PeerLink, request: "_Request", peer: Peer) -> AsyncIterator[None]:
    """Reading from the link fails where the client leaves or the member dies."""
    watch: asyncio.Task[None] | None = None

    async def client() -> None:
        await request.disconnected()
        link.fail(ClientDisconnect())

    def begin() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(client())

    def gone(_: object) -> None:
        link.fail(_PeerGone())

    beginning = asyncio.get_running_loop().call_later(_WATCH_S, begin)
    peer.gone.add_done_callback(gone)
    try:
        yield
    finally:
        peer.gone.remove_done_callback(gone)
        beginning.cancel()
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


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

    @property
    def target(self) -> bytes:
        path: bytes = self.scope.get("raw_path") or self.scope["path"].encode()
        query: bytes = self.scope["query_string"]
        return path + b"?" + query if query else path

    def headers(self, member: str, peer: Peer) -> list[Header]:
        """The client's own, by which the owner of the session authenticates it again."""
        given: list[Header] = self.scope["headers"]
        kept = [header for header in given if header[0] not in _NEVER_SENT]
        if not any(name == b"host" for name, _ in kept):
            kept.append((b"host", peer.member.http.encode()))
        if self.body or self.scope["method"] not in _SAFE:
            kept.append((b"content-length", str(len(self.body or b"")).encode()))
        request_id: str = self.scope["holdfast.request_id"]
        return [*kept, (_FORWARDED, member.encode()), (b"x-request-id", request_id.encode())]
