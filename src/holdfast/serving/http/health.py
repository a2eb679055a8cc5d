"""Is it alive, is it ready, how does it do."""

import secrets
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.observability.metrics import Metrics


class Health:
    def __init__(self, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._is_ready = is_ready
        self._instance_id = secrets.token_hex(16)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "session_server_instance_id": self._instance_id})

    async def readyz(self, request: Request) -> Response:
        ready = self._is_ready()
        return JSONResponse({"status": "ready" if ready else "draining"}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
