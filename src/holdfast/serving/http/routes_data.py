"""Routes for data: samples, search, session files, and the purge of closed sessions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from holdfast.chats.samples.assembly import Options
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import CONTENT_TYPES, encode, read_format
from holdfast.chats.samples.formats import decode as decode_samples
from holdfast.chats.service import ChatService
from holdfast.config import ServeConfig
from holdfast.errors import InvalidArgument, SessionNotFound
from holdfast.serving.http.bodies import decode
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.routes_tokens import number
from holdfast.serving.http.schema import Purge, SamplesRequest
from holdfast.serving.keys import is_admin
from holdfast.sessions.journal.base import closed_sessions, purge
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.session_file import pieces
from holdfast.sessions.transfers import Transfers
from holdfast.sessions.view import Search

_DAY_S = 86_400
_MAX_PROBLEMS = 100


class DataRoutes:
    def __init__(
        self,
        runtime: Runtime,
        chats: ChatService,
        transfers: Transfers,
        *,
        config: ServeConfig,
        search: Search | None = None,
    ) -> None:
        self._runtime = runtime
        self._chats = chats
        self._transfers = transfers
        self._search = search
        self._retain_days = config.retain_days
        self._weight_versions = config.sample_weight_versions

    async def samples(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        self._runtime.info(session_id, owner)  # an unknown session is reported before a malformed body
        body = decode(await request.body(), SamplesRequest, may_be_empty=True)
        options = Options(
            branch=body.branch,
            max_seq_len=body.max_seq_len,
            min_weight_version=body.min_weight_version,
            metadata=body.metadata or {},
            num_layers=body.num_layers,
            weight_versions=body.weight_versions or self._weight_versions,
        )
        form = read_format(body.format)
        export = self._chats.samples(session_id, owner, options)
        content = await asyncio.to_thread(lambda: encode(export(), form))
        return Response(content, media_type=CONTENT_TYPES[form])

    async def verify_samples(self, request: Request) -> Response:
        """Whether the samples in a file are what their certificates say."""
        payload = await request.body()
        found = await asyncio.to_thread(lambda: problems(decode_samples(payload)))
        return JSONResponse({"valid": not found, "problems": found[:_MAX_PROBLEMS]})

    async def search(self, request: Request) -> Response:
        if self._search is None:
            raise HTTPException(404)
        query = request.query_params
        limit = number(request, "limit")
        found = await self._search(
            request.path_params["session_id"],
            owner_of(request),
            query.get("query", ""),
            limit=8 if limit is None else limit,
            in_view=_flag(request, "in_view", "false"),
        )
        passages = [
            {
                "turn": one.turn,
                "role": one.role,
                "text": one.text,
                "from_position": one.start,
                "to_position": one.end,
                "score": one.score,
            }
            for one in found
        ]
        return JSONResponse({"object": "list", "data": passages})

    async def export(self, request: Request) -> Response:
        session_id, owner = request.path_params["session_id"], owner_of(request)
        parts = await self._transfers.export(
            session_id, owner, with_snapshot=_flag(request, "snapshot", "true"), is_admin=is_admin(owner)
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

    async def purge(self, request: Request) -> Response:
        body = decode(await request.body(), Purge, may_be_empty=True)
        owner, journal = owner_of(request), self._runtime.journal
        for session_id in body.session_ids or ():
            with contextlib.suppress(SessionNotFound):
                stored = await journal.read_session(session_id)
                if stored.closed_at is None and stored.opened.owner == owner:
                    raise InvalidArgument(f"session {session_id} is not closed; close it first", param="session_ids")
        found = await closed_sessions(
            journal,
            owner=None if is_admin(owner) else owner,
            session_ids=None if body.session_ids is None else set(body.session_ids),
            before=self._before(body),
        )
        if not body.dry_run:
            await purge(journal, found)
            await self._runtime.recount_bytes()
        listed = [{"session_id": one.session_id, "owner": one.owner, "closed_at": one.at} for one in found]
        return JSONResponse({"purged": 0 if body.dry_run else len(found), "sessions": listed})

    def _before(self, body: Purge) -> float | None:
        """Closed before when; None: at any time."""
        if body.older_than_s is not None:
            return time.time() - body.older_than_s
        if body.session_ids is not None:
            return None
        return time.time() - self._retain_days * _DAY_S if self._retain_days else 0.0


def _flag(request: Request, name: str, default: str) -> bool:
    value = request.query_params.get(name, default)
    if value not in ("true", "false"):
        raise InvalidArgument(f"{name} must be true or false, got {value!r}", param=name)
    return value == "true"
