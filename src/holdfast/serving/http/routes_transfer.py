"""Sessions as files: what leaves this server, and what comes from another one."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from holdfast.errors import InvalidArgument
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.keys import is_admin
from holdfast.sessions.portable.file import pieces
from holdfast.sessions.portable.transfers import Transfers


class TransferRoutes:
    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    async def export(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        parts = await self._transfers.export(
            session_id, owner, with_snapshot=_wants_snapshot(request), is_admin=is_admin(owner)
        )

        async def content() -> AsyncIterator[bytes]:
            for piece in pieces(parts):
                yield piece

        headers = {
            "content-length": str(sum(map(len, parts))),
            "content-disposition": f'attachment; filename="{session_id}.holdfast"',
        }
        return StreamingResponse(content(), headers=headers, media_type="application/octet-stream")

    async def import_session(self, request: Request) -> Response:
        imported = await self._transfers.import_file(owner_of(request), aiter(request.stream()))
        return JSONResponse(
            {
                "session_id": imported.session_id,
                "history_length": imported.history_length,
                "reused_tokens": imported.reused_tokens,
                "recomputed_tokens": imported.recomputed_tokens,
            }
        )


def _wants_snapshot(request: Request) -> bool:
    value = request.query_params.get("snapshot", "true")
    if value not in ("true", "false"):
        raise InvalidArgument(f"snapshot must be true or false, got {value!r}", param="snapshot")
    return value == "true"
