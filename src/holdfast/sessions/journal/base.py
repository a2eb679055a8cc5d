"""Journal entries, the journal protocol, and the journal of a server without a data directory. Pure data.

Entries are facts about sessions, each true from the moment it is on disk. Arrays are int32 tokens (`array("i")`) and
float64 logprobs (`array("d")`); they must not change once they were handed over.
"""

import asyncio
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from holdfast.errors import InvalidArgument, SessionNotFound
from holdfast.sessions.record import TurnRecord

SessionKind = Literal["tokens", "chat", "forest"]  # the last two are chats: a forest holds many conversations

_PURGE_CHUNK = 64  # sessions deleted in one commit: turns of others come in between


@dataclass(frozen=True, slots=True)
class ForkedFrom:
    """Where a session comes from. The journal copies `turns` of the source, in order, as turns 1, 2, ... of the fork,
    each below the one before, without their tickets; bodies are shared. Spans are the writer's to write."""

    session_id: str
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A new session. `sink` is what the backend pins, `pin_tokens` what the client asked for."""

    session_id: str
    number: int
    owner: str
    created_at: float
    kind: SessionKind = "tokens"
    label: str = ""
    group: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    sink: int = 0
    pin_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    forked_from: ForkedFrom | None = None


@dataclass(frozen=True, slots=True)
class TokensGiven:
    """Tokens at the end of a history. Two in a row are one span."""

    session_id: str
    tokens: "array[int]"


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """A sampled span, all of it by the same weights."""

    session_id: str
    tokens: "array[int]"
    logprobs: "array[float]"
    sampling_logprobs: "array[float]"
    stop_reason: str | None
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class HistoryRewound:
    """The history ends at `length` from here on."""

    session_id: str
    length: int


@dataclass(frozen=True, slots=True)
class TurnRecorded:
    """A chat turn with its bodies. `turn` must not change before it is on disk."""

    session_id: str
    turn: TurnRecord


@dataclass(frozen=True, slots=True)
class TurnDelivered:
    """The reply has reached its client, as far as a server can know."""

    session_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Rewarded:
    """What a turn was worth, or with `turn` None the session. The last one counts."""

    session_id: str
    turn: int | None
    reward: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise InvalidArgument("reward must be a finite number", param="reward")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The backend pins the first `sink` tokens from now on."""

    session_id: str
    sink: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """`why`: closed, expired or evicted. What is on record stays until it is purged."""

    session_id: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class SessionPurged:
    """Nothing of the session is on record any more."""

    session_id: str


Entry = (
    SessionOpened
    | TokensGiven
    | TokensSampled
    | HistoryRewound
    | TurnRecorded
    | TurnDelivered
    | Rewarded
    | Pinned
    | SessionClosed
    | SessionPurged
)


def num_bytes(entry: Entry) -> int:
    """Roughly what an entry takes in memory until it is on disk."""
    match entry:
        case TurnRecorded():
            turn = entry.turn  # the messages are in the request too, so they count twice
            bodies = 2 * len(turn.request or b"") + len(turn.response or b"")
            return 256 + bodies + 4 * len(turn.given) + 20 * len(turn.sampled)
        case TokensGiven() | TokensSampled():
            return 256 + 20 * len(entry.tokens)
        case _:
            return 256


def recorded_bytes(entry: Entry) -> int:
    """The tokens, logprobs and bodies that an entry brings to disk, as `Journal.num_bytes_by_owner` counts them."""
    match entry:
        case TurnRecorded():
            turn = entry.turn
            bodies = len(turn.request or b"") + len(turn.response or b"")
            return bodies + 4 * len(turn.given) + 20 * len(turn.sampled)
        case TokensGiven():
            return 4 * len(entry.tokens)
        case TokensSampled():
            return 20 * len(entry.tokens)
        case _:
            return 0


Step = TokensGiven | TokensSampled | HistoryRewound | TurnRecord  # of turns, not their bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as it is on record. `opened.sink` is as it was pinned last.

    `failure` says what is damaged, if something is; `steps` then end before it, and the session must not be continued.
    """

    opened: SessionOpened
    steps: tuple[Step, ...]  # in the order in which they happened
    reward: float | None = None
    failure: str | None = None
    closed_why: str | None = None
    closed_at: float | None = None

    @property
    def turns(self) -> tuple[TurnRecord, ...]:
        return tuple(step for step in self.steps if isinstance(step, TurnRecord))


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
        """Whether written bodies can be read back, so that they need not be held in memory."""

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

    def num_bytes_by_owner(self) -> Mapping[str, int]:
        """The tokens, logprobs and bodies on record, closed sessions included. Blocks; for large journals, seconds."""

    async def purge(self, before: float) -> int:
        """Forget the sessions that were closed before that time; how many."""

    async def close(self) -> None:
        """Flush: everything handed over is on disk, or its caller got an error. Nothing can be written afterwards."""


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

    def num_bytes_by_owner(self) -> Mapping[str, int]:
        return {}

    async def purge(self, before: float) -> int:
        return 0

    async def close(self) -> None:
        pass


async def with_bodies(turn: TurnRecord, session_id: str, journal: Journal) -> TurnRecord:
    """The turn with its request and response, read from the journal where only that holds them."""
    request, response = turn.request, turn.response
    if request is None:
        request = await journal.read_request(session_id, turn.number)
    if response is None:
        response = await journal.read_response(session_id, turn.number)
    return msgspec.structs.replace(turn, request=request, response=response)


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
    for first in range(0, len(sessions), _PURGE_CHUNK):
        await journal.write(*(SessionPurged(session.session_id) for session in sessions[first : first + _PURGE_CHUNK]))
