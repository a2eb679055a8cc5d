"""How commands reach a running server: flags, API key and TLS; gRPC through the Python SDK, and HTTP.

An error is one sentence: ConfigError if the command line is wrong, ServerError if the server refuses or is not there.
"""

import argparse
import contextlib
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, HoldfastError
from holdfast.extras import how_to_install
from holdfast.serving.keys import is_loopback

if TYPE_CHECKING:
    from holdfast_sdk import AsyncClient, Client

_HTTP_TIMEOUT_S = 600


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


def add_server_flags(parser: argparse.ArgumentParser, *, default: str | None = "127.0.0.1:50051") -> None:
    about = "gRPC address of a running `holdfast serve`; HOLDFAST_API_KEY is its key"
    shown = " (default: %(default)s)" if default else ""
    parser.add_argument("--server", default=default, metavar="HOST:PORT", help=about + shown)
    add_tls_flags(parser)


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
        raise ServerError(_no_answer(address, has_tls=bool(arguments.tls or arguments.tls_ca))) from exc
    except sdk.HoldfastError as exc:
        raise ServerError(f"{address}: {exc}") from exc


def _client(kind: str, arguments: argparse.Namespace) -> Any:
    sdk, address, tls = _sdk(), arguments.server, arguments.tls_ca or arguments.tls
    try:
        key = _api_key(address, is_safe=tls or arguments.insecure or sdk.address.is_loopback(address))
        return getattr(sdk, kind)(address, api_key=key, tls=tls, insecure=arguments.insecure, retries=0)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    except OSError as exc:
        raise ConfigError(f"cannot read the certificates in {tls}: {exc.strerror or exc}") from exc


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


def post(path: str, body: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON answer of the HTTP endpoint that `--http` names."""
    address: str = arguments.http
    scheme = "https" if arguments.tls or arguments.tls_ca else "http"
    url = urllib.parse.urlsplit(address if "://" in address else f"{scheme}://{address}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{address} is not HOST:PORT")
    headers = {"content-type": "application/json"}
    if key := _api_key(address, is_safe=url.scheme == "https" or arguments.insecure or is_loopback(url.hostname)):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url.geturl() + path, json.dumps(body).encode(), headers, method="POST")
    try:
        context = ssl.create_default_context(cafile=arguments.tls_ca) if arguments.tls_ca else None
    except OSError as exc:
        raise ConfigError(f"cannot read the certificates in {arguments.tls_ca}: {exc.strerror or exc}") from exc
    try:
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S, context=context) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as exc:
        raise ServerError(f"{address}: {_message(exc)}") from exc
    except (OSError, ValueError) as exc:
        raise ServerError(_no_answer(address, has_tls=url.scheme == "https")) from exc


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


def _no_answer(address: str, *, has_tls: bool) -> str:
    trusted = " with a certificate that is trusted here" if has_tls else ""
    return f"no answer from {address}; is `holdfast serve` running there{trusted}?"
