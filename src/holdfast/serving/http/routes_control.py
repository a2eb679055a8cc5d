"""What a trainer turns while agents work. For the owner `admin`, or for anyone where no keys are set."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chats.service import ChatService
from holdfast.errors import Forbidden, InvalidArgument
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.schema import WeightVersion, decode
from holdfast.serving.keys import ADMIN, is_admin


class ControlRoutes:
    def __init__(self, chats: ChatService) -> None:
        self._chats = chats

    async def pause(self, request: Request) -> Response:
        _check(request)
        mode = request.query_params.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise InvalidArgument(f"mode must be wait or abort, got {mode!r}", param="mode")
        return JSONResponse({"status": "paused", "running": self._chats.pause(abort=mode == "abort")})

    async def resume(self, request: Request) -> Response:
        _check(request)
        self._chats.control.resume()
        return JSONResponse({"status": "running"})

    async def weight_version(self, request: Request) -> Response:
        _check(request)
        body = decode(await request.body(), WeightVersion)
        self._chats.control.weight_version = body.weight_version
        return JSONResponse({"weight_version": body.weight_version})


def _check(request: Request) -> None:
    if not is_admin(owner_of(request)):
        raise Forbidden(f"this needs a key of the owner {ADMIN!r}")
