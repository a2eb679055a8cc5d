"""Closed sessions are forgotten for good: one's own, or with an admin's key anyone's."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.errors import InvalidArgument
from holdfast.serving.http.middleware import owner_of
from holdfast.serving.http.schema import Purge, decode
from holdfast.serving.keys import is_admin
from holdfast.sessions.purge import closed_sessions, purge
from holdfast.sessions.runtime import Runtime

_DAY_S = 86_400


class PurgeRoutes:
    def __init__(self, runtime: Runtime, *, retain_days: int) -> None:
        self._runtime = runtime
        self._retain_days = retain_days

    async def purge(self, request: Request) -> Response:
        body = decode(await request.body(), Purge, may_be_empty=True)
        owner, journal = owner_of(request), self._runtime.journal
        own = {view.session_id for view in self._runtime.list_sessions(owner)}
        for session_id in own.intersection(body.session_ids or ()):
            raise InvalidArgument(f"session {session_id} is not closed; close it first", param="session_ids")
        found = await closed_sessions(
            journal,
            owner=None if is_admin(owner) else owner,
            session_ids=None if body.session_ids is None else set(body.session_ids),
            before=self._before(body),
        )
        if not body.dry_run:
            await purge(journal, found)
        listed = [{"session_id": one.session_id, "owner": one.owner, "closed_at": one.at} for one in found]
        return JSONResponse({"purged": 0 if body.dry_run else len(found), "sessions": listed})

    def _before(self, body: Purge) -> float | None:
        """Closed before when; None: at any time."""
        if body.older_than_s is not None:
            return time.time() - body.older_than_s
        if body.session_ids is not None:
            return None
        return time.time() - self._retain_days * _DAY_S if self._retain_days else 0.0
