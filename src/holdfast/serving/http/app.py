"""The ASGI application of the HTTP door."""

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.sessions.runtime import Runtime


def create_app(runtime: Runtime, *, is_ready: Callable[[], bool] = lambda: True) -> Starlette:
    """`/healthz` (alive), `/readyz` (not draining), `/metrics` (Prometheus)."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        ready = is_ready()
        return JSONResponse({"status": "ready" if ready else "draining"}, status_code=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(runtime.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return Starlette(
        routes=[
            Route("/health", healthz),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )
