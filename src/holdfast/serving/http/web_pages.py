"""Which web pages may use the server: a browser sends requests for any page that its user opens, to loopback too."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from holdfast.config import ServeConfig
from holdfast.errors import ConfigError, Forbidden
from holdfast.serving.keys import Keys, split_address

ANY = "*"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = (
    *("x-request-id", "retry-after", "x-should-retry", "www-authenticate", "allow", "content-disposition"),
    *("holdfast-turn", "holdfast-dropped-tokens", "holdfast-branched", "holdfast-recorded", "idempotent-replayed"),
    *("deprecation", "sunset", "link", "request-id", "holdfast-session", "holdfast-ignored-fields", "holdfast-member"),
)


def read_origins(config: ServeConfig, keys: Keys) -> tuple[str, ...]:
    """The origins of `--cors-origin`, checked."""
    origins = _listed(config.cors_origin)
    for origin in origins:
        parts = urlsplit(origin)
        if origin != ANY and not (parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
            raise ConfigError(f"--cors-origin: {origin!r} is not an origin like https://example.org")
    if ANY in origins and not keys:
        raise ConfigError("--cors-origin '*' needs --keys-file: without keys any web page could use this server")
    return origins


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """`app`, whose responses browsers show to pages of these origins. Preflight requests are answered here."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=_METHODS, allow_headers=(ANY,), expose_headers=_EXPOSED
    )


class PageGuard:
    """Refuses what a web page may have sent without the knowledge of whoever opened it.

    With API keys there is nothing to guard: a page does not have them.
    """

    def __init__(self, config: ServeConfig, keys: Keys) -> None:
        self._has_keys = bool(keys)
        self._origins = read_origins(config, keys)
        self._hosts = {name.lower() for name in _listed(config.allowed_hosts)}
        self._checks_hosts = bool(self._hosts) or not config.insecure
        self._hosts.add(split_address(config.http)[0].lower())

    def check(self, headers: Headers) -> None:
        """Raises Forbidden."""
        if self._has_keys:
            return
        host = headers.get("host", "")
        if self._checks_hosts and host and not self._is_own(host):
            raise Forbidden(
                f"this server does not answer to the name {host!r} without API keys; "
                "call it as localhost, or serve with --allowed-hosts or --keys-file"
            )
        for origin in headers.getlist("origin"):
            if origin not in self._origins and origin.partition("://")[2] != host:
                raise Forbidden(
                    f"web pages of {origin!r} may not use this server; serve with --cors-origin to allow it"
                )

    def _is_own(self, host: str) -> bool:
        """An address is always ours: only a name can be made to point here by someone else (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in map(str.strip, text.split(",")) if part)
