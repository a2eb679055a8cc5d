"""Pages of an owner's sessions: those in memory as they are, those that rest as the journal tells of them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.errors import SessionNotFound
from holdfast.sessions.journal.base import Journal, ListedSession
from holdfast.sessions.session import restored
from holdfast.sessions.view import MAX_PAGE, PARKED, Page, SessionView, Wanted, resting_view, view_of

_MAX_ROWS = 10_000  # that one page looks at; beyond that it is shorter than asked for, and the next one goes on
_MAX_READ = 1000  # sessions without a summary, which are read for it


class SessionList:
    """`in_memory` gives the view of a session that is there; it raises SessionNotFound for one that is gone."""

    def __init__(self, journal: Journal, in_memory: Callable[[str, str], SessionView | None], recent: int) -> None:
        self._journal = journal
        self._in_memory = in_memory
        self._recent = recent

    async def page(self, owner: str, wanted: Wanted, *, after: int, size: int) -> Page:
        """The first `size` open sessions that fit, by number, from the one after number `after` on."""
        views: list[SessionView] = []
        num_rows = num_read = 0
        while True:
            is_any = wanted.state is None and not wanted.text
            limit = size + 1 - len(views) if is_any else MAX_PAGE
            rows = await self._journal.list_open(owner, after=after, label=wanted.label, limit=limit)
            for row in rows:
                if num_rows >= _MAX_ROWS or num_read >= _MAX_READ:
                    return Page(views, str(after))
                num_rows += 1
                opened = row.opened
                if not wanted.may_be(opened.session_id, opened.label, opened.group):
                    after = opened.number
                    continue
                try:
                    view = self._in_memory(opened.session_id, owner)
                    if view is None:
                        num_read += row.summary is None
                        view = await self._resting(row)
                except SessionNotFound:  # closed meanwhile
                    view = None
                if view is not None and wanted.state in (None, view.state):
                    if len(views) == size:
                        return Page(views, str(after))
                    views.append(view)
                after = opened.number
            if len(rows) < limit:
                return Page(views, "")

    async def _resting(self, row: ListedSession) -> SessionView | None:
        since = row.opened.created_at if row.rested_at is None else row.rested_at
        idle_s = max(0.0, time.time() - since)
        if row.summary is not None:
            return resting_view(row.opened, row.summary, row.reward, self._recent, idle_s)
        stored = await self._journal.read_session(row.opened.session_id)
        if stored.closed_at is not None:
            return None
        session = await asyncio.to_thread(restored, stored, time.monotonic)
        return replace(view_of(session, PARKED, self._recent), idle_s=idle_s)
