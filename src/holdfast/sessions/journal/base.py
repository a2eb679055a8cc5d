"""What a journal promises, what it gives back, and the journal of those who want none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import SessionNotFound
from holdfast.sessions.journal.entries import (
    Entry,
    HistoryRewound,
    SessionOpened,
    TokensGiven,
    TokensSampled,
    TurnFields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn(TurnFields):
    """A turn as it is on record, without the bytes of its request and response: those are read when asked for."""

    request_bytes: int
    response_bytes: int
    reward: float | None
    is_delivered: bool


Step = TokensGiven | TokensSampled | HistoryRewound | StoredTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as it is on record. `opened.sink` is as it was pinned last.

    `failure` says what is damaged, where something is; `steps` then end before it, and the session must not go on.
    """

    opened: SessionOpened
    steps: tuple[Step, ...]  # in the order in which they happened
    reward: float | None = None
    failure: str | None = None
    closed_why: str | None = None
    closed_at: float | None = None

    @property
    def turns(self) -> tuple[StoredTurn, ...]:
        return tuple(step for step in self.steps if isinstance(step, StoredTurn))

    @property
    def last_ticket(self) -> tuple[str, bytes] | None:
        """Key and body hash of the turn that was recorded last."""
        turns = self.turns
        return (turns[-1].ticket_key, turns[-1].body_hash) if turns and turns[-1].body_hash else None


@dataclass(frozen=True, slots=True)
class ClosedSession:
    """A session that is gone but not purged."""

    session_id: str
    owner: str
    why: str
    at: float


class Journal(Protocol):
    """Used on one event loop. `load` and `closed` block: for start-up, or in a thread."""

    @property
    def keeps_bodies(self) -> bool:
        """Whether what was written can be read again, so that nobody else need hold it."""

    async def write(self, *entries: Entry) -> None:
        """Returns when all entries are on disk; they come there together or not at all.

        Raises JournalFailed where they did not: nothing of them is on record then. Whoever is cancelled meanwhile
        does not know which it was, so shield it where that matters. Waits while too much is queued.
        """

    def note(self, *entries: Entry) -> None:
        """Write along with whatever comes next, soon. For facts whose loss in a crash is no loss."""

    @property
    def health(self) -> str | None:
        """Why writing fails at present; None where it does not, as far as is known."""

    @property
    def last_number(self) -> int:
        """The highest number of a session on record. Blocks for a moment."""

    def load(self) -> Iterator[StoredSession]:
        """All sessions that are not closed, by number."""

    def closed(self) -> Iterator[ClosedSession]:
        """Sessions that were closed and not yet purged, those closed last at the end."""

    async def read_session(self, session_id: str) -> StoredSession:
        """One session, closed or not, as long as it is not purged."""

    async def read_request(self, session_id: str, turn: int) -> bytes:
        """The bytes as they were written. Raises StorageUnavailable where they are damaged or cannot be read."""

    async def read_response(self, session_id: str, turn: int) -> bytes:
        """As `read_request`."""

    def response(self, session_id: str, turn: int) -> bytes:
        """As `read_response`, in any thread; blocks."""

    async def purge(self, before: float) -> int:
        """Forget the sessions that were closed before that time; how many."""

    async def close(self) -> None:
        """Everything that was handed over is on disk, or its writer was told. Nothing can be written after."""


class NoJournal:
    """Nothing is kept, and nothing can fail."""

    keeps_bodies: bool = False
    health: str | None = None
    last_number: int = 0

    async def write(self, *entries: Entry) -> None:
        pass

    def note(self, *entries: Entry) -> None:
        pass

    def load(self) -> Iterator[StoredSession]:
        return iter(())

    def closed(self) -> Iterator[ClosedSession]:
        return iter(())

    async def read_session(self, session_id: str) -> StoredSession:
        raise SessionNotFound(session_id)

    async def read_request(self, session_id: str, turn: int) -> bytes:
        raise SessionNotFound(session_id)

    async def read_response(self, session_id: str, turn: int) -> bytes:
        raise SessionNotFound(session_id)

    def response(self, session_id: str, turn: int) -> bytes:
        raise SessionNotFound(session_id)

    async def purge(self, before: float) -> int:
        return 0

    async def close(self) -> None:
        pass
