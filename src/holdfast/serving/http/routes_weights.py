"""The route that replaces the weights of the served model, from a path on the server or from the request's body."""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.chats.turn import ChatSetup
from holdfast.errors import InvalidArgument, ModelError, PayloadTooLarge, StorageUnavailable
from holdfast.serving.http.bodies import decode
from holdfast.serving.http.middleware import is_file
from holdfast.serving.http.routes_admin import check_admin
from holdfast.serving.http.schema import WeightsAtPath, WeightsUpload

logger = logging.getLogger(__name__)

_BROKEN = "this is not a whole safetensors file"
_HEADER_BYTES = 16 << 20  # of a safetensors file, beside the weights
_WRITE_BYTES = 4 << 20  # that are collected before a thread writes them
_LOG_BYTES = 1 << 30  # between two lines in the log


def load_weights(setup: ChatSetup) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint. Whatever is wrong with a request, the weights stay as they are."""

    async def weights(request: Request) -> Response:
        check_admin(request)
        limit = setup.runtime.max_weight_bytes + _HEADER_BYTES
        with setup.runtime.weights_claimed():
            if not is_file(request.headers):
                body = decode(await request.body(), WeightsAtPath)
                return await _load(setup, Path(body.path), body)
            wanted = decode(msgspec.json.encode(dict(request.query_params)), WeightsUpload)
            try:
                with tempfile.TemporaryDirectory(prefix="holdfast-weights-") as folder:
                    path = Path(folder) / "body.safetensors"
                    await _save(request, path, limit)
                    return await _load(setup, path, wanted)
            except OSError as exc:
                raise StorageUnavailable(f"the weights could not be stored in {tempfile.gettempdir()}: {exc}") from exc

    return weights


async def _load(setup: ChatSetup, path: Path, wanted: WeightsUpload) -> Response:
    try:
        loaded = await setup.runtime.load_weights(path, version=wanted.version, keeps_caches=wanted.caches == "keep")
    except ModelError as exc:
        raise InvalidArgument(str(exc).replace(f"{path} is truncated or damaged; download it again", _BROKEN)) from exc
    setup.weight_version = wanted.version
    return JSONResponse(
        {
            "weight_version": wanted.version,
            "num_tensors": loaded.num_tensors,
            "seconds": round(loaded.duration_s, 3),
            "fingerprint": setup.runtime.model.fingerprint,
        }
    )


async def _save(request: Request, path: Path, limit: int) -> None:
    """Write the body to a file as it arrives: at most one piece of it is in memory."""
    waiting, received, logged = bytearray(), 0, 0
    with path.open("wb") as file:
        async for chunk in request.stream():
            waiting += chunk
            received += len(chunk)
            if received > limit:
                raise PayloadTooLarge(f"the file is larger than all weights of the model in float32 ({limit:,} bytes)")
            if len(waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, waiting)
                waiting = bytearray()
            if received - logged >= _LOG_BYTES:
                logged = received
                logger.info("%d MB of new weights have arrived", received >> 20)
        await asyncio.to_thread(file.write, waiting)
