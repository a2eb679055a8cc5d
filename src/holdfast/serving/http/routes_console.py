"""The web console: a page whose files are in the package. All that it shows comes from the HTTP API."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

PATH = "/console"
PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # which means: ask whether it is still the same
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """Every file of the page by its name: few and small, so they stay in memory."""
    found = {}
    for entry in files("holdfast.serving.http").joinpath("console").iterdir():
        if media_type := _TYPES.get("." + entry.name.rpartition(".")[2]):
            content = entry.read_bytes()
            found[entry.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def is_console(path: str) -> bool:
    """Whether a path is one of the page's own files, which anyone may read."""
    return path == PATH or path.startswith(f"{PATH}/")


async def console(request: Request) -> Response:
    """The page, or one of its files."""
    if request.scope["path"].endswith("/"):  # there the page would look for its files in another folder
        return RedirectResponse(f"..{PATH}", headers=_HEADERS)
    file = _files().get(request.path_params.get("name", PAGE))
    if file is None:
        raise HTTPException(404)
    headers = _HEADERS | {"etag": file.etag}
    if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
