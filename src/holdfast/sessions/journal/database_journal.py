"""What journals in a database have in common: what is asked of the rows, and how a group of writes is tried."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from holdfast.sessions.journal import rows
from holdfast.sessions.journal.base import ClosedSession, Entry, ListedSession, StoredSession, purge
from holdfast.sessions.journal.database import Database
from holdfast.sessions.journal.writer import JournalWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DatabaseJournal:
    """Whoever inherits from it has a writer, and says how the database is read."""

    _writer: JournalWriter
    _bodies: rows.BodyReader
    _health: str | None = None

    def _read(self, look: Callable[[Database], T]) -> T:
        """What `look` sees, at one moment. In any thread; blocks. Raises StorageUnavailable."""
        raise NotImplementedError

    def _read_long(self, look: Callable[[Database], T]) -> T:
        """As `_read`, for minutes if need be: no other read waits for it, and `close` ends it."""
        raise NotImplementedError

    async def _look(self, look: Callable[[Database], T]) -> T:
        return await asyncio.to_thread(self._read, look)

    @property
    def keeps_bodies(self) -> bool:
        return True

    @property
    def health(self) -> str | None:
        return self._health

    @property
    def last_number(self) -> int:
        return self._read(lambda db: int(db.select("SELECT coalesce(max(number), 0) AS num FROM sessions")[0]["num"]))

    async def write(self, *entries: Entry) -> None:
        if entries:
            await self._writer.write(entries)

    def note(self, *entries: Entry) -> None:
        self._writer.note(entries)

    async def find_named(self, owner: str, name: str) -> str | None:
        return await self._look(lambda db: rows.named(db, owner, name))

    async def list_open(
        self, owner: str, *, after: int = 0, label: str | None = None, limit: int = 1000
    ) -> list[ListedSession]:
        return await self._look(partial(rows.listed, owner=owner, after=after, label=label, limit=limit))

    async def list_all(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> list[ListedSession]:
        return await self._look(lambda db: rows.all_listed(db, after, limit))

    async def count_all(self) -> int:
        return await self._look(rows.num_sessions)

    async def count_open(self, owner: str) -> int:
        return await self._look(lambda db: rows.num_open(db, owner))

    def closed(self) -> Iterator[ClosedSession]:
        return iter(self._read(rows.closed_sessions))

    async def read_session(self, session_id: str) -> StoredSession:
        return await self._look(lambda db: rows.session_of(db, session_id))

    async def read_request(self, session_id: str, turn: int) -> bytes:
        return await asyncio.to_thread(self._body, session_id, turn, "request")

    async def read_response(self, session_id: str, turn: int) -> bytes:
        return await asyncio.to_thread(self._body, session_id, turn, "response")

    def response(self, session_id: str, turn: int) -> bytes:
        return self._body(session_id, turn, "response")

    def num_bytes_by_owner(self) -> Mapping[str, int]:
        return self._read_long(rows.num_bytes_by_owner)

    async def purge(self, before: float) -> int:
        gone = await self._look(lambda db: rows.closed_sessions(db, before=before))
        await purge(self, gone)
        return len(gone)

    def _body(self, session_id: str, turn: int, which: str) -> bytes:
        row = self._read(lambda db: rows.body_row(db, session_id, turn, which))
        return rows.body_of(row, self._bodies, f"the {which} of turn {turn} of session {session_id}")
