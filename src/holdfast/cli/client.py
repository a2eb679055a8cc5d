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
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import ConfigError, HoldfastError
from holdfast.serving.keys import is_loopback

if TYPE_CHECKING:
    from holdfast_sdk import AsyncClient, Client

_SDK_MISSING = (
    "this command needs the Python SDK: pip install 'holdfast[client]' (from a checkout: pip install ./sdks/python)"
)


_HTTP_TIMEOUT_S = 600

ClientKind = TypeVar("ClientKind", "Client", "AsyncClient")


class ServerError(HoldfastError):
    """A server that did not answer, or the error that it answered with."""

    code = "server"


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="connect with TLS, trusting the public certificates")
    parser.add_argument(
        "--tls-ca", default="", metavar="FILE", help="connect with TLS, trusting these certificates, PEM"
    )
    about = "send HOLDFAST_API_KEY to another machine without TLS"
    parser.add_argument("--insecure", action="store_true", help=about)


def add_server_flags(parser: argparse.ArgumentParser, *, default: str | None = "127.0.0.1:50051") -> None:
    """`--server` and how to connect to it."""
    about = "gRPC address of a running `holdfast serve`; its key: HOLDFAST_API_KEY" + (
        " (default: %(default)s)" if default else ""
    )
    parser.add_argument("--server", default=default, metavar="HOST:PORT", help=about)
    add_tls_flags(parser)


def api_key(address: str, *, is_safe: bool) -> str | None:
    """The key in the environment, if there is one. ConfigError if it would cross a network in plain text."""
    key = os.environ.get("HOLDFAST_API_KEY") or None
    if key and not is_safe:
        raise ConfigError(
            f"refusing to send HOLDFAST_API_KEY in plain text to {address}: "
            "pass --tls or --tls-ca FILE, or --insecure if you trust the network"
        )
    return key


class ServerConnection:
    """The server that a command line names."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        try:
            import holdfast_sdk
            from holdfast_sdk.address import is_loopback as is_local
        except ImportError as exc:
            raise ConfigError(_SDK_MISSING) from exc
        self._sdk = holdfast_sdk
        self.address: str = arguments.server
        self._tls: str | bool = arguments.tls_ca or arguments.tls
        self._insecure: bool = arguments.insecure
        try:
            is_safe = bool(self._tls or self._insecure or is_local(self.address))
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        self._key = api_key(self.address, is_safe=is_safe)

    def client(self) -> "Client":
        """A blocking client; close it."""
        return self._checked(self._sdk.Client)

    def async_client(self) -> "AsyncClient":
        """A client for asyncio; close it."""
        return self._checked(self._sdk.AsyncClient)

    def _checked(self, kind: type[ClientKind]) -> ClientKind:
        try:
            return kind(self.address, api_key=self._key, tls=self._tls, insecure=self._insecure, retries=0)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        except OSError as exc:
            raise ConfigError(f"cannot read the certificates in {self._tls}: {exc.strerror or exc}") from exc

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the SDK's errors into ServerError."""
        try:
            yield
        except (self._sdk.ConnectionFailed, self._sdk.DeadlineExceeded) as exc:
            raise ServerError(_no_answer(self.address, has_tls=bool(self._tls))) from exc
        except self._sdk.HoldfastError as exc:
            raise ServerError(f"{self.address}: {exc}") from exc


@contextlib.contextmanager
def connected(arguments: argparse.Namespace) -> Iterator["Client"]:
    """A blocking client whose errors are ServerError, closed at the end."""
    server = ServerConnection(arguments)
    with server.errors(), server.client() as client:
        yield client


def post(path: str, body: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON answer of the HTTP endpoint that `--http` names."""
    address: str = arguments.http
    scheme = "https" if arguments.tls or arguments.tls_ca else "http"
    url = urllib.parse.urlsplit(address if "://" in address else f"{scheme}://{address}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{address} is not HOST:PORT")
    headers = {"content-type": "application/json"}
    if key := api_key(address, is_safe=url.scheme == "https" or arguments.insecure or is_loopback(url.hostname)):
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
