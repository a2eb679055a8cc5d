"""Closed sessions that are to be forgotten for good: which they are, and their end."""

import asyncio
from collections.abc import Collection, Sequence

from holdfast.errors import SessionNotFound
from holdfast.sessions.journal.base import ClosedSession, Journal, SessionPurged

_CHUNK = 64  # sessions forgotten in one commit: turns of others come in between


async def closed_sessions(
    journal: Journal,
    *,
    owner: str | None = None,
    session_ids: Collection[str] | None = None,
    before: float | None = None,
) -> list[ClosedSession]:
    """Those on record that were closed: of the owner, of these ids, before that time, where these are given.

    SessionNotFound where one of the ids is not among them.
    """
    found = await asyncio.to_thread(lambda: list(journal.closed()))
    theirs = [session for session in found if owner is None or session.owner == owner]
    for session_id in set(session_ids or ()) - {session.session_id for session in theirs}:
        raise SessionNotFound(session_id)
    return [
        session
        for session in theirs
        if (session_ids is None or session.session_id in session_ids) and (before is None or session.at < before)
    ]


async def purge(journal: Journal, sessions: Sequence[ClosedSession]) -> None:
    """Nothing of these is on record afterwards."""
    for first in range(0, len(sessions), _CHUNK):
        await journal.write(*(SessionPurged(session.session_id) for session in sessions[first : first + _CHUNK]))
