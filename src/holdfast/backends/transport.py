"""Requests to the upstream server over one pool of connections. Knows HTTP, nothing of tokens or sessions."""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from holdfast.backends.refusal import refusal
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    ConfigError,
    InvalidArgument,
    UpstreamError,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 4.0  # uvicorn closes idle connections after 5: let go of them first, a POST is never sent twice


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A whole reply, its headers as they came."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Transport:
    """A pool of connections to one upstream. Opens with the first request; `close` it on the same loop."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._base = _base_url(config.upstream)
        self._config = config
        self._max_bytes = config.max_upstream_mb << 20
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> RawResponse:
        """The reply, whatever its status. Cancelling closes the connection."""
        with _translated(self._base):
            async with self._send(method, path, body, headers or {}, query) as response:
                content = await self._read(response)
                return RawResponse(response.status, tuple(response.headers.items()), content)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> RawResponse:
        """A JSON body out, the reply back."""
        return await self.request("POST", path, body=encoded(body), headers=_json(headers))

    async def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> "Events":
        """The server-sent events of one request, begun and to be closed by the caller.

        A status other than 200 raises: InvalidArgument where our caller is at fault, UpstreamError otherwise.
        """
        with _translated(self._base):
            response = await self._send("POST", path, encoded(body), _json(headers), "")
            try:
                if response.status == 200:
                    return Events(self._base, response, self._max_bytes)
                raise refusal(response.status, await self._read(response))
            except BaseException:
                response.close()
                raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], query: str
    ) -> Any:  # aiohttp's request context: awaitable, and an async context manager
        if self._session is None:
            self._session = self._new_session()
        url = self._base.with_path(self._base.path.rstrip("/") + path)
        target = URL(f"{url}?{query}", encoded=True) if query else url
        return self._session.request(method, target, data=body, headers=headers, allow_redirects=False)

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
    """Server-sent events as they arrive. `close` ends the request, also while someone waits for the next one."""

    def __init__(self, base: URL, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._base = base
        self._response = response
        self._max_bytes = max_bytes
        self._pieces = response.content.iter_any()
        self._lines: deque[bytes] = deque()
        self._rest = b""

    async def next(self) -> bytes | None:
        """The data of the next event; None at the end of the stream."""
        while not self._lines:
            with _translated(self._base):
                piece = await anext(self._pieces, None)
            if piece is None:
                return None
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._lines.extend(line[5:].strip() for line in lines if line.startswith(b"data:"))
        return self._lines.popleft()

    def close(self) -> None:
        self._response.close()


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON as it goes upstream. What JSON cannot say is the caller's mistake."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise InvalidArgument(f"the request cannot be sent as JSON: {exc}") from exc


@contextlib.contextmanager
def _translated(base: URL) -> Iterator[None]:
    """The one place where the client library's errors become ours, most specific first."""
    try:
        yield
    except UpstreamError:
        raise
    except TimeoutError as exc:
        raise UpstreamTimeout(f"the upstream {base} did not answer in time") from exc
    except aiohttp.ClientResponseError as exc:
        raise UpstreamInvalid(f"the upstream {base} does not speak HTTP: {exc.message}") from exc
    except aiohttp.ClientPayloadError as exc:
        raise UpstreamUnreachable(f"the upstream {base} broke off in the middle of a reply") from exc
    except (aiohttp.ClientConnectionError, OSError) as exc:
        raise UpstreamUnreachable(f"no connection to the upstream {base}: {exc or type(exc).__name__}") from exc
    except aiohttp.ClientError as exc:
        raise UpstreamInvalid(f"the upstream {base} answered with something else than HTTP: {exc}") from exc


def _too_large(max_bytes: int) -> UpstreamInvalid:
    return UpstreamInvalid(f"the upstream sent more than max_upstream_mb ({max_bytes >> 20})")


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
