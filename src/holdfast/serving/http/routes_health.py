"""Is it alive, is it ready, how does it do."""

import secrets
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.observability.metrics import Metrics


class HealthRoutes:
    """`not_ready`: why no new work should come here, None where it may."""

    def __init__(self, metrics: Metrics, not_ready: Callable[[], str | None]) -> None:
        self._metrics = metrics
        self._not_ready = not_ready
        self._instance_id = secrets.token_hex(16)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "session_server_instance_id": self._instance_id})

    async def readyz(self, request: Request) -> Response:
        reason = self._not_ready()
        return JSONResponse({"status": reason or "ready"}, status_code=503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
