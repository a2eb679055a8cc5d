"""What of an upstream a session's owner may reach besides chat, and which headers cross. Pure, but for `forward`."""

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from holdfast.backends.transport import Transport
from holdfast.errors import ConfigError
from holdfast.sessions.ports import UpstreamReply

ROUTING_KEY = "x-smg-routing-key"

Routes = frozenset[tuple[str, str]]

ROUTES: Routes = frozenset({("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize")})

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NEVER_SENT = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-length",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "idempotency-key",
    "user-agent",
    "x-api-key",
    "x-real-ip",
    ROUTING_KEY,
}
_NEVER_RETURNED = _HOP_BY_HOP | {
    "content-encoding",
    "content-length",
    "date",
    "location",  # redirects are not followed, and where the upstream lives is not the client's business
    "server",
    "set-cookie",
    "set-cookie2",
}
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


def match(routes: Routes, method: str, raw_path: str) -> str | None:
    """The upstream path that `raw_path`, as it came over the wire, stands for; None where it is not open.

    The answer is our own spelling of it, never the client's.
    """
    try:
        path = "/" + unquote_to_bytes(raw_path.removeprefix("/")).decode("ascii")
    except UnicodeError:
        return None
    has_hidden_slash = path.count("/") != raw_path.removeprefix("/").count("/") + 1
    if has_hidden_slash or not _is_plain(path) or (method.upper(), path) not in routes:
        return None
    return path


def upstream_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those of a client's headers that go upstream, the first of each name."""
    return _kept(headers, _NEVER_SENT, ("x-forwarded-", "proxy-", "sec-"))


def client_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those of an upstream's headers that go back to the client, the first of each name."""
    return _kept(headers, _NEVER_RETURNED, ("proxy-",))


def affinity(session_id: str) -> dict[str, str]:
    """Sends all requests of a session to the same worker, whose cache has its prefix."""
    return {ROUTING_KEY: session_id}


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
    """The upstream's answer to a request that `match` has let through; never recorded."""
    sent = upstream_headers(headers) | affinity(session_id)
    answer = await transport.request(method.upper(), path, body=body or None, headers=sent, query=query)
    return UpstreamReply(
        status=answer.status,
        headers=client_headers(answer.headers),
        body=answer.body,
        received=answer.body,
        request={},
    )


def _is_plain(path: str) -> bool:
    return bool(_PLAIN_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))


def _is_latin1(value: str) -> bool:
    """What HTTP can carry; anything else would fail on its way out."""
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def _kept(headers: Iterable[tuple[str, str]], never: frozenset[str], never_prefixed: tuple[str, ...]) -> dict[str, str]:
    pairs = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    kept: dict[str, str] = {}
    for name, value in pairs:
        if name not in never and name not in named and not name.startswith(never_prefixed) and _is_latin1(value):
            kept.setdefault(name, value)
    return kept
