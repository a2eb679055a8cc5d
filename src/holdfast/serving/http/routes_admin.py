"""Routes for operators: health, readiness, metrics, and control (pause, resume, weight version; for the owner `admin`,
or for anyone where no keys are set)."""

import secrets
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chats.service import ChatService
from holdfast.errors import Forbidden, InvalidArgument
from holdfast.metrics import Metrics
from holdfast.serving.cluster.membership import Describe
from holdfast.serving.http.bodies import decode
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.schema import WeightVersion
from holdfast.serving.keys import ADMIN, is_admin


class HealthRoutes:
    """`not_ready` returns why no new work should be sent here, None where it may be."""

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


class ClusterRoutes:
    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    async def cluster(self, request: Request) -> Response:
        view = await self._describe()
        members = [
            {
                "name": member.name,
                "state": member.state,
                "lease_left_s": round(member.lease_left_s, 3) if view.is_cluster else None,
                "epoch": member.epoch,
                "sessions": member.num_sessions,
                "room": member.room,
                "version": member.version,
                "http": member.http,
                "grpc": member.grpc,
            }
            for member in view.members
        ]
        return JSONResponse({"this": view.this, "is_cluster": view.is_cluster, "members": members})


class ControlRoutes:
    def __init__(self, chats: ChatService) -> None:
        self._chats = chats

    async def pause(self, request: Request) -> Response:
        check_admin(request)
        mode = request.query_params.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise InvalidArgument(f"mode must be wait or abort, got {mode!r}", param="mode")
        return JSONResponse({"status": "paused", "running": self._chats.pause(abort=mode == "abort")})

    async def resume(self, request: Request) -> Response:
        check_admin(request)
        self._chats.setup.admission.resume()
        return JSONResponse({"status": "running"})

    async def weight_version(self, request: Request) -> Response:
        check_admin(request)
        body = decode(await request.body(), WeightVersion)
        await self._chats.setup.runtime.label_weights(body.weight_version)
        self._chats.setup.weight_version = body.weight_version
        return JSONResponse({"weight_version": body.weight_version})


def check_admin(request: Request) -> None:
    """Raises Forbidden where the caller may not control the server."""
    if not is_admin(owner_of(request)):
        raise Forbidden(f"this needs an API key of the owner {ADMIN!r}")
