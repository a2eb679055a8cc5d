"""How commands reach a running server: address, API key and TLS; gRPC through the Python SDK, and HTTP.

An error is one sentence: ConfigError if the command line is wrong, ServerError if the server refuses or is not there.
"""

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from holdfast.errors import ConfigError, HoldfastError
from holdfast.extras import how_to_install
from holdfast.serving.keys import is_loopback

if TYPE_CHECKING:
    from holdfast_sdk import AsyncClient, Client

_CONNECT_TIMEOUT_S = 10
_CONNECT_ELSEWHERE_S = 2  # where another address can be tried
_READ_TIMEOUT_S = 600
_SHOWN = 10
_HAS_TLS = {"grpc": False, "http": False, "grpcs": True, "https": True}  # by the scheme of a URL
_GRPC_ADDRESS = " This command uses the server's gRPC address, which `holdfast serve` prints."


class ServerError(HoldfastError):
    """A server that did not answer, or the error that it answered with."""

    code = "server"


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="connect with TLS, trusting the public certificates")
    parser.add_argument(
        "--tls-ca", default="", metavar="FILE", help="connect with TLS, trusting the certificates in FILE"
    )
    about = "send HOLDFAST_API_KEY to another machine without TLS"
    parser.add_argument("--insecure", action="store_true", help=about)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    about = "gRPC address of a running `holdfast serve`; HOLDFAST_API_KEY is its key (default: %(default)s). Several "
    about += "addresses of one cluster are separated by commas: the first that answers is used"
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT", help=about)
    add_tls_flags(parser)


def _addresses(given: str) -> list[str]:
    """What is separated by commas."""
    return [each.strip() for each in given.split(",") if each.strip()] or [given]


def full_session_id(start: str, session_ids: Iterable[str]) -> str:
    """The one of `session_ids` that begins with `start`. ConfigError if several do; `start` itself if none does, so
    that the server says what is wrong."""
    found = [session_id for session_id in session_ids if session_id.startswith(start)]
    if len(found) > 1 and start not in found:
        shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else "")
        raise ConfigError(f"{start!r} is the start of {len(found):,} session ids: {shown}; pass more of it")
    return found[0] if len(found) == 1 else start


# gRPC


def is_grpc(address: str) -> bool:
    """Whether a URL names the gRPC endpoint."""
    return address.startswith(("grpc://", "grpcs://"))


@contextlib.contextmanager
def connected(arguments: argparse.Namespace) -> Iterator["Client"]:
    """A blocking client of `--server`, closed at the end; errors of the SDK inside are ServerError."""
    with server_errors(arguments), _client("Client", arguments) as client:
        yield client


def async_client(arguments: argparse.Namespace) -> "AsyncClient":
    """A client of `--server` for asyncio. Use it inside `server_errors`, and close it."""
    client: AsyncClient = _client("AsyncClient", arguments)
    return client


@contextlib.contextmanager
def server_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Turn errors of the SDK into ServerError."""
    sdk, address = _sdk(), arguments.server
    try:
        yield
    except (sdk.ConnectionFailed, sdk.DeadlineExceeded) as exc:
        scheme, has_tls = address.partition("://")[0], _with_tls(address, arguments)
        raise ServerError(
            _no_answer(address, has_tls=has_tls) + (_GRPC_ADDRESS if scheme in ("http", "https") else "")
        ) from exc
    except sdk.HoldfastError as exc:
        raise ServerError(f"{address}: {exc}") from exc


def _client(kind: str, arguments: argparse.Namespace) -> Any:
    sdk, addresses = _sdk(), _addresses(arguments.server)
    has_tls = {_with_tls(address, arguments) for address in addresses}
    if len(has_tls) > 1:
        raise ConfigError(f"{arguments.server}: either all addresses use TLS, or none of them")
    tls = arguments.tls_ca or has_tls.pop()
    targets = [_target(address) for address in addresses]
    try:
        for address, target in zip(addresses, targets, strict=True):
            key = _api_key(address, is_safe=tls or arguments.insecure or sdk.address.is_loopback(target))
        return getattr(sdk, kind)(targets, api_key=key, tls=tls, insecure=arguments.insecure, retries=0)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    except OSError as exc:
        raise _unreadable(arguments.tls_ca, exc) from exc


def _target(address: str) -> str:
    """The gRPC address without a scheme of ours."""
    scheme, _, rest = address.partition("://")
    return rest.rstrip("/") if scheme in _HAS_TLS else address


def _with_tls(address: str, arguments: argparse.Namespace) -> bool:
    """A URL says whether to use TLS, unless it is grpc://; of an address without a scheme, flags do."""
    scheme = address.partition("://")[0]
    is_flagged = bool(arguments.tls or arguments.tls_ca)
    return is_flagged if scheme == "grpc" else _HAS_TLS.get(scheme, is_flagged)


def _api_key(address: str, *, is_safe: bool) -> str | None:
    """The key in the environment. ConfigError if it would cross a network in plain text."""
    key = os.environ.get("HOLDFAST_API_KEY") or None
    if key and not is_safe:
        raise ConfigError(
            f"refusing to send HOLDFAST_API_KEY in plain text to {address}: "
            "pass --tls or --tls-ca FILE, or --insecure if you trust the network"
        )
    return key


def _sdk() -> Any:
    try:
        import holdfast_sdk
    except ImportError as exc:
        raise ConfigError(f"this command needs the Python SDK; {how_to_install('client')}") from exc
    return holdfast_sdk


# HTTP


class HttpServer:
    """The HTTP endpoint of a server, named by HOST:PORT or a URL. An async context, on one event loop.

    Of several addresses, separated by commas, one is used until it is gone, then the next. Redirects are not followed:
    the API key goes to these addresses only.
    """

    def __init__(self, address: str, arguments: argparse.Namespace, *, key: str | None = None) -> None:
        """`key`: the API key, if it is not the one in the environment."""
        self.address = address
        urls = [_checked_url(each, arguments) for each in _addresses(address)]
        for each, url in zip(_addresses(address), urls, strict=True):
            is_safe = url.scheme == "https" or arguments.insecure or is_loopback(url.hostname or "")
            self.key = key or _api_key(each, is_safe=is_safe)
        self._urls = [url.geturl().rstrip("/").removesuffix("/v1") for url in urls]
        self._current = 0
        self._headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self._uses_proxy = not all(is_loopback(url.hostname or "") for url in urls)
        self._has_tls = any(url.scheme == "https" for url in urls)
        self._tls = _tls_context(arguments.tls_ca) if self._has_tls else None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Of the address in use."""
        return self._urls[self._current]

    async def __aenter__(self) -> Self:
        connect_s = _CONNECT_TIMEOUT_S if len(self._urls) == 1 else _CONNECT_ELSEWHERE_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=_READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=self._uses_proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON in the response; None if it has no content."""
        content = await self.content(method, path, body)
        try:
            return json.loads(content) if content else None
        except ValueError as exc:
            raise self._no_http() from exc

    async def content(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of the response."""
        async with self._response(method, path, body) as response:
            return await response.read()

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The server-sent events of a stream up to [DONE]. An error among them is raised."""
        rest = b""
        async with self._response("POST", path, body) as response:
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data and line.startswith(b"data:"):
                        event = json.loads(data)
                        if "error" in event:
                            raise ServerError(f"{self.address}: {_message(data, response.status)}")
                        yield event
        raise ServerError(f"the connection to {self.address} was lost before the reply ended")

    @contextlib.asynccontextmanager
    async def _response(self, method: str, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with a status below 300; what goes wrong until its end is a ServerError."""
        try:
            async with await self._answer(method, path, body) as response:
                if response.status >= 300:
                    raise ServerError(f"{self.address}: {_message(await response.read(), response.status)}")
                yield response
        except aiohttp.ClientConnectorCertificateError as exc:
            reason = getattr(exc.certificate_error, "verify_message", "")
            raise ServerError(f"{_no_answer(self.address, has_tls=True)} ({reason})") from exc
        except aiohttp.ClientPayloadError as exc:
            raise ServerError(f"the connection to {self.address} was lost before the reply ended") from exc
        except (aiohttp.ClientResponseError, ValueError) as exc:
            raise self._no_http() from exc
        except (aiohttp.ClientError, OSError) as exc:  # TimeoutError is an OSError
            needs_tls = isinstance(exc, aiohttp.ServerDisconnectedError) and not self._has_tls
            hint = " If it has a certificate, pass https://HOST:PORT." if needs_tls else ""
            raise ServerError(_no_answer(self.address, has_tls=self._has_tls) + hint) from exc

    async def _answer(self, method: str, path: str, body: Any) -> aiohttp.ClientResponse:
        """The response of the address in use, or of the next one where nobody has begun the request."""
        assert self._session is not None
        for num_left in reversed(range(len(self._urls))):
            try:
                response = await self._session.request(
                    method, self.url + path, json=body, allow_redirects=False, ssl=self._tls or True
                )
                if not num_left or not await _is_turned_away(response):
                    return response
                response.release()
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                if not num_left:
                    raise
            self._current = (self._current + 1) % len(self._urls)
        raise AssertionError("the last address has answered or raised")

    def _no_http(self) -> ServerError:
        return ServerError(
            f"{self.address} does not answer in HTTP; if this is the gRPC address, pass grpc://HOST:PORT"
        )


def post(path: str, body: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON answer of the HTTP endpoint that `--http` names."""

    async def call() -> Any:
        async with HttpServer(arguments.http, arguments) as server:
            return await server.request("POST", path, body)

    answer: dict[str, Any] = asyncio.run(call())
    return answer


def _tls_context(file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=file or None)
    except OSError as exc:
        raise _unreadable(file, exc) from exc
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # FILE may be the server's own certificate
    return context


def _unreadable(file: str, exc: OSError) -> ConfigError:
    return ConfigError(f"cannot read the certificates in {file}: {exc.strerror or exc}")


def _checked_url(address: str, arguments: argparse.Namespace) -> urllib.parse.SplitResult:
    try:
        scheme = f"http{'s' * _with_tls(address, arguments)}"
        url = urllib.parse.urlsplit(address if "://" in address else f"{scheme}://{address}")
        if url.scheme in ("http", "https") and url.hostname and not url.username and url.port != 0:
            return url
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"{address} is not HOST:PORT, and not a URL that begins with http:// or https://")


async def _is_turned_away(response: aiohttp.ClientResponse) -> bool:
    """Whether the server has done nothing, and another one may do it."""
    if response.status not in (421, 503):
        return False
    try:
        error = json.loads(await response.read())["error"]
        return bool(error["code"] == "session_elsewhere" or error.get("accepted") == "false")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _no_answer(address: str, *, has_tls: bool) -> str:
    trusted = " with a certificate that is trusted here" if has_tls else ""
    return f"no answer from {address}; is `holdfast serve` running there{trusted}?"
