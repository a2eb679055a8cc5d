"""A proxy between an agent and the server: it counts and records the requests as the agent sends them."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from tests.agents.server import HoldfastServer

MODEL_PATHS = ("/chat/completions", "/messages", "/responses")
_FAILED = re.compile(rb'^(data: \{"error"|event: (error|response\.failed))', re.MULTILINE)  # in a stream
_LAST = re.compile(rb"^(data: \[DONE\]|event: (message_stop|response\.completed))", re.MULTILINE)
_HOP = {"host", "content-length", "connection", "transfer-encoding", "keep-alive", "content-encoding"}
_PLAIN = {"accept", "content-type", "user-agent", "idempotency-key", "session-id", "thread-id", "originator"}


class Door:
    """`exchanges`: method, path, headers that matter, body, status, seconds; in order of arrival.

    A stream that ends with an error has the status 500.
    """

    def __init__(self, server: HoldfastServer, log: Path | None = None) -> None:
        self._server = server
        self._log = log
        self.exchanges: list[dict[str, Any]] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._client.close()
        if self._log:
            self._log.write_text("".join(json.dumps(exchange) + "\n" for exchange in self.exchanges))

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The requests for a reply of the model."""
        return [
            x for x in self.exchanges if x["method"] == "POST" and x["path"].partition("?")[0].endswith(MODEL_PATHS)
        ]

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        exchange: dict[str, Any] = {
            "method": request.method,
            "path": request.path_qs,
            "headers": {k.lower(): v for k, v in request.headers.items() if _matters(k.lower())},
            "body": _parsed(body),
            "status": None,
            "started": time.time(),
        }
        self.exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        try:
            async with self._client.request(
                request.method, self._server.url + request.path_qs, data=body, headers=headers
            ) as answer:
                exchange["status"] = answer.status
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                if answer.status >= 400:
                    exchange["error"] = (await answer.read()).decode(errors="replace")
                    return web.Response(status=answer.status, body=await answer.read(), headers=passed)
                response = web.StreamResponse(status=answer.status, headers=passed)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    exchange.setdefault("first_byte_s", round(time.time() - exchange["started"], 2))
                    exchange |= {"is_whole": True} if _LAST.search(chunk) else {}
                    if failed := _FAILED.search(chunk):
                        exchange |= {"status": 500, "error": chunk[failed.start() :].decode(errors="replace")}
                    await response.write(chunk)
                exchange["is_whole"] = True
                with suppress(ConnectionError):  # some agents leave at the last event
                    await response.write_eof()
                return response
        finally:
            exchange["ended"] = time.time()


def _matters(name: str) -> bool:
    return name in _PLAIN or (name.startswith(("x-", "anthropic-", "openai-")) and name != "x-api-key")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
