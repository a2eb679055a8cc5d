"""HTTP to the upstream server, over one pool of connections. Knows nothing of tokens."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from holdfast.backends.passthrough import affinity, carried, client_headers, sent_headers
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    InvalidArgument,
    UpstreamAborted,
    UpstreamError,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from holdfast.sessions.ports import UpstreamReply

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 4.0  # below uvicorn's 5, so that we close idle connections first: a POST is never sent twice
_SHOWN_BYTES = 500
_MAX_RETRY_DIGITS = 6

logger = logging.getLogger(__name__)


class NotServed(UpstreamInvalid):
    """The upstream does not serve this path, or was started without it."""


class NotReached(UpstreamUnreachable):
    """The upstream did not get the request, or says that it is not ready: sending it again repeats nothing."""


class Overloaded(UpstreamAborted):
    """The upstream turned the request away, because it is busy."""


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A whole response, its headers as they came."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Transport:
    """A pool of connections to one upstream. Opens with the first request; `close` it on the same loop."""

    def __init__(self, config: UpstreamConfig, url: str = "") -> None:
        """`url`: that of one server, if the settings name several."""
        self._base = _base_url(url or config.upstream)
        self._config = config
        self._max_bytes = config.max_upstream_mb << 20
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> URL:
        """For the log and for choosing among servers: without credentials."""
        return self._base.with_user(None)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> RawResponse:
        """The response, whatever its status. Cancelling closes the connection."""
        with _translated(self._base):
            async with await self._send(method, path, body, headers or {}, query) as response:
                content = await self._read(response)
                return RawResponse(response.status, tuple(response.headers.items()), content)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> RawResponse:
        """The response to a JSON body."""
        return await self.request("POST", path, body=_encoded(body), headers=_json(headers))

    async def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> "Events":
        """The server-sent events of one request, which the caller must close.

        A status other than 200 raises: InvalidArgument if the request was wrong, UpstreamError otherwise.
        """
        with _translated(self._base):
            response = await self._send("POST", path, _encoded(body), _json(headers), "")
            try:
                if response.status == 200:
                    return Events(self._base, response, self._max_bytes)
                retry_after = response.headers.get("retry-after", "")
                raise refusal(response.status, await self._read(response), retry_after)
            except BaseException:
                response.close()
                raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], query: str
    ) -> aiohttp.ClientResponse:
        """The head of the response, whose status is one that we can pass on. The caller closes it."""
        if self._session is None:
            self._session = self._new_session()
        url = self._base.with_path(self._base.path.rstrip("/") + path)
        target = URL(f"{url}?{query}", encoded=True) if query else url
        # Two passes of the loop: one polls the sockets, the next drops idle connections that the upstream has closed.
        # What is sent on such a connection is lost, and must not be sent again: nobody could tell whether it was read.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent = {**carried.get(), **headers}
        response = await self._session.request(method, target, data=body, headers=sent, allow_redirects=False)
        if not 200 <= response.status <= 599:
            response.close()
            raise UpstreamInvalid(f"the upstream returned status {response.status}, which is not one of HTTP's")
        return response

    def _new_session(self) -> aiohttp.ClientSession:
        always = {"accept-encoding": "identity", "user-agent": "holdfast"}
        if self._config.upstream_key:
            always["authorization"] = f"Bearer {self._config.upstream_key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._config.upstream_connections, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._config.upstream_timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            headers=always,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > self._max_bytes:
            raise _too_large(self._max_bytes)
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                raise _too_large(self._max_bytes)
        return b"".join(pieces)


class Events:
    """Server-sent events as they arrive. `close` ends the request, even while `next` is waiting."""

    def __init__(self, base: URL, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._base = base
        self._response = response
        self._max_bytes = max_bytes
        self._pieces = response.content.iter_any()
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()  # of a line that has not ended yet

    async def next(self) -> bytes | None:
        """The data of the next event; None at the end of the stream."""
        while not self._lines:
            with _translated(self._base):
                piece = await anext(self._pieces, None)
            if piece is None:
                return None
            first, *more = piece.split(b"\n")
            self._rest += first
            if len(self._rest) > self._max_bytes:
                raise _too_large(self._max_bytes)
            if more:
                *lines, rest = bytes(self._rest), *more
                self._rest = bytearray(rest)
                self._lines.extend(line[5:].strip() for line in lines if line.startswith(b"data:"))
        return self._lines.popleft()

    def close(self) -> None:
        self._response.close()


def accepted(answer: RawResponse) -> bytes:
    """The body of a success. Raises UpstreamError for any other answer."""
    if answer.status != 200:
        raise refusal(answer.status, answer.body)
    return answer.body


def refusal(status: int, body: bytes, retry_after: str = "") -> HoldfastError:
    """The error for a status other than 200. `retry_after` is the header; a date in it is ignored."""
    text = body[:_SHOWN_BYTES].decode(errors="replace")
    if status in (400, 413, 422):
        return InvalidArgument(f"the upstream rejected the request: {text}")
    if status in (429, 503):
        is_seconds = retry_after.isascii() and retry_after.isdigit() and len(retry_after) <= _MAX_RETRY_DIGITS
        seconds = int(retry_after) if is_seconds else 1
        return Overloaded(f"the upstream is overloaded (status {status}): {text}", retry_after_s=seconds)
    if status in (502, 504):  # of a proxy in front of it
        return UpstreamUnreachable(f"the upstream returned status {status}: {text}")
    kind = NotServed if status in (403, 404, 405, 501) else UpstreamInvalid
    return kind(f"the upstream returned status {status}: {text}")


async def forward(
    transport: Transport,
    method: str,
    path: str,
    *,
    query: str = "",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
    session_id: str,
) -> UpstreamReply:
    """The upstream's response to a request whose path is from `match_route`. It is never recorded."""
    sent = sent_headers(headers) | affinity(session_id)
    answer = await transport.request(method.upper(), path, body=body or None, headers=sent, query=query)
    return UpstreamReply(
        status=answer.status,
        headers=client_headers(answer.headers),
        body=answer.body,
        received=answer.body,
        request={},
    )


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise InvalidArgument(f"the request cannot be encoded as JSON: {exc}") from exc


@contextlib.contextmanager
def _translated(base: URL) -> Iterator[None]:
    """The one place where aiohttp's errors become ours, most specific first.

    Clients must not learn the upstream's address, so it is in the server log alone.
    """
    try:
        yield
    except UpstreamError:
        raise
    except (aiohttp.ClientError, OSError) as exc:  # TimeoutError is an OSError
        logger.warning("request to the upstream %s failed: %s: %s", base.origin(), type(exc).__name__, exc)
        raise _translation(exc) from exc


def _translation(exc: Exception) -> UpstreamError:
    match exc:
        case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError():
            return NotReached("cannot connect to the upstream")
        case TimeoutError():
            return UpstreamTimeout("the upstream did not answer in time")
        case aiohttp.ClientResponseError():
            return UpstreamInvalid("the upstream sent an invalid HTTP response")
        case aiohttp.ClientPayloadError():
            return UpstreamUnreachable("the upstream closed the connection in the middle of a reply")
        case aiohttp.ClientConnectionError() | OSError():
            return UpstreamUnreachable(
                "the upstream closed the connection before it replied; the request is not sent again, "
                "because the upstream may have read it"
            )
    return UpstreamInvalid("the HTTP request to the upstream failed")


def _too_large(max_bytes: int) -> UpstreamInvalid:
    return UpstreamInvalid(f"the upstream's reply is larger than max_upstream_mb ({max_bytes >> 20} MiB)")


def _json(headers: Mapping[str, str]) -> dict[str, str]:
    return {"content-type": "application/json", **headers}


def _base_url(text: str) -> URL:
    try:
        url = URL(text.rstrip("/"))
    except ValueError as exc:
        raise ConfigError(f"upstream must be a URL, got {text!r}") from exc
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"upstream must be an http or https URL such as http://127.0.0.1:30000, got {text!r}")
    return url
