"""A model hub on a free port of 127.0.0.1: what `huggingface_hub` asks of one, and downloads that break off."""

import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Files = Mapping[str, bytes]


class FakeHub:
    """`repositories`: files by repository and revision. `gated` ones need the token `good`.

    The first `cuts` bytes of a download are sent, then the connection breaks; each cut is for one request.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, Files]], gated: tuple[str, ...] = ()) -> None:
        self.repositories = repositories
        self.gated = gated
        self.cuts: dict[str, deque[int]] = {}  # by file name
        self.requests: list[str] = []  # METHOD path, and the range of a download that goes on

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fetched(self) -> set[str]:
        """The files whose content was sent."""
        return {line.split("/resolve/")[1].split("/", 1)[1] for line in self.requests if line.startswith("GET /org/")}

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        if found is None:
            return _send(request, 404, {})
        revisions = self.repositories.get(found[1])
        if revisions is None:
            return _send(request, 404, {"X-Error-Code": "RepoNotFound"})
        if found[1] in self.gated and file and request.headers.get("authorization") != "Bearer good":
            return _send(request, 403, {"X-Error-Code": "GatedRepo"})
        commits = {commit_of(name): name for name in revisions}
        name = commits.get(found[2], found[2])
        if name not in revisions:
            return _send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        commit = commit_of(name)
        if api:
            siblings = [{"rfilename": one} for one in revisions[name]]
            about = {
                "id": found[1],
                "modelId": found[1],
                "sha": commit,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
            }
            return _send(request, 200, {"Content-Type": "application/json"}, json.dumps(about).encode())
        headers = {"X-Repo-Commit": commit}
        content = revisions[name].get(found[3])
        if content is None:
            return _send(request, 404, headers | {"X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        self._send_file(request, found[3], headers, content)

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, headers: dict[str, str], content: bytes) -> None:
        start, status = 0, HTTPStatus.OK
        if wanted := re.fullmatch(r"bytes=(\d+)-", request.headers.get("range") or ""):
            start, status = int(wanted[1]), HTTPStatus.PARTIAL_CONTENT
            self.requests[-1] += f" from {start}"
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.cuts.get(name)
        cut = cuts.popleft() if cuts and request.command == "GET" else None
        _send(request, status, headers, content[start:], cut)


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None
) -> None:
    request.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(body))}).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body[:cut])
    if cut is not None:
        request.close_connection = True
