"""What of a client's request reaches an upstream, and what of the response comes back: headers and paths. Pure."""

import itertools
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

from holdfast.errors import ConfigError

ROUTING_KEY = "x-smg-routing-key"

Routes = frozenset[tuple[str, str]]  # method and path

# What `carried_headers` has kept of the request that is being served: its tasks send it along.
carried: ContextVar[Mapping[str, str]] = ContextVar("carried", default=MappingProxyType({}))

ROUTES: Routes = frozenset({("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize")})

_HOP_BY_HOP = "connection|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade"
# Secrets, what names a session or a priority, and what steers a router or the inside of an engine
_SECRET = ".*(?:auth|cookie|credential|key|password|secret|session|signature|token).*"
_STEERING = (
    ".*priority.*|x-smg-.*|x-sgl.*|x-vllm-.*|x-data-parallel-.*|x-dp-.*|x-kv-.*|x-model.*|x-worker.*|x-target-.*|"
    "x-gateway-.*|x-envoy-.*|x-override-.*|x-prefill.*|x-decode.*|x-bootstrap.*|x-http-method.*"
)
_NEVER_SENT = re.compile(
    f"{_HOP_BY_HOP}|{_SECRET}|{_STEERING}|accept-encoding|content-length|expect|forwarded|host|origin|referer|sec-.*|"
    "user-agent|x-forwarded-.*|x-real-ip"
)
# With a body that is ours: nothing about the client's body, and nothing that speaks to us alone
_NEVER_CARRIED = re.compile(
    f"{_NEVER_SENT.pattern}|accept.*|content-.*|cache-control|pragma|if-.*|range|dnt|grpc-.*|holdfast-.*|anthropic-.*|"
    "openai-.*|x-stainless-.*|x-should-.*|via"
)
_TRACING = ("traceparent", "tracestate", "baggage", "x-request-id")
_MAX_CARRIED = 32
_MAX_CARRIED_BYTES = 8192
# `location`: redirects are not followed, and clients must not learn the upstream's address. In the last line: headers
# that only we send, and those with which a server speaks to browsers about itself.
_NEVER_RETURNED = re.compile(
    f"{_HOP_BY_HOP}|content-encoding|content-length|date|location|server|set-cookie2?|"
    "holdfast-.*|idempotent-replayed|x-request-id|x-should-retry|access-control-.*|alt-svc|strict-transport-security"
)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")  # what HTTP can carry
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@-]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*")


def parse_routes(text: str) -> Routes:
    """The default routes and those of `METHOD:PATH,METHOD:PATH`."""
    routes = set(ROUTES)
    for entry in filter(None, (part.strip() for part in text.split(","))):
        method, _, path = entry.partition(":")
        path = "/" + path.removeprefix("/")
        if not method.isalpha() or not _is_plain(path):
            raise ConfigError(f"passthrough: {entry!r} is not METHOD:PATH, as in GET:v1/models")
        routes.add((method.upper(), path))
    return frozenset(routes)


def match_route(routes: Routes, method: str, raw_path: str) -> str | None:
    """The upstream path for `raw_path`, which is as the client sent it; None if that path is not open.

    The result is spelled as in `routes`, never as the client spelled it.
    """
    try:
        path = "/" + unquote_to_bytes(raw_path.removeprefix("/")).decode("ascii")
    except UnicodeError:
        return None
    has_hidden_slash = path.count("/") != raw_path.removeprefix("/").count("/") + 1
    if has_hidden_slash or not _is_plain(path) or (method.upper(), path) not in routes:
        return None
    return path


def sent_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The client's headers that go along with its own body."""
    return _kept(headers, _NEVER_SENT)


def carried_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The client's headers that go along with each upstream request for it: those for tracing first, as many as fit."""
    kept = _kept(headers, _NEVER_CARRIED)
    names = sorted(kept, key=lambda name: name not in _TRACING)[:_MAX_CARRIED]
    sizes = itertools.accumulate(len(name) + len(kept[name]) for name in names)
    return {name: kept[name] for name, size in zip(names, sizes, strict=True) if size <= _MAX_CARRIED_BYTES}


def client_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The upstream's headers that go back to the client, the first of each name."""
    return _kept(headers, _NEVER_RETURNED)


def affinity(session_id: str) -> dict[str, str]:
    """The header that sends all requests of a session to the worker whose cache has its prefix."""
    return {ROUTING_KEY: session_id}


def _is_plain(path: str) -> bool:
    return bool(_PLAIN_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))


@lru_cache(maxsize=1024)
def _may_go(name: str, never: re.Pattern[str]) -> bool:
    return bool(_NAME.fullmatch(name)) and not never.fullmatch(name)


def _kept(headers: Iterable[tuple[str, str]], never: re.Pattern[str]) -> dict[str, str]:
    pairs = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    kept: dict[str, str] = {}
    for name, value in pairs:
        if name not in named and _may_go(name, never) and _VALUE.fullmatch(value):
            kept.setdefault(name, value)
    return kept
