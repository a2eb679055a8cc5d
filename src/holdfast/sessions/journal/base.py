"""Journal entries, the journal protocol, and the journal of a server without a data directory. Pure data.

Entries are facts about sessions, each true from the moment it is on disk. Arrays are int32 tokens (`array("i")`) and
float64 logprobs (`array("d")`); they must not change once they were handed over.
"""

import asyncio
import itertools
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from holdfast.errors import InvalidArgument, SessionNotFound
from holdfast.sessions.record import TurnRecord

SessionKind = Literal["tokens", "chat", "forest"]  # the last two are chats: a forest holds many conversations
MemberState = Literal["serving", "draining", "left", "dead"]

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
    name: str = ""  # under which its owner finds it; no two open sessions of an owner have the same
    label: str = ""
    group: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    sink: int = 0
    pin_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    forked_from: ForkedFrom | None = None
    copies_turns: bool = True  # from `forked_from`; False: they are written as those of any session


@dataclass(frozen=True, slots=True)
class TokensGiven:
    """Tokens at the end of a history. Two of a kind in a row are one span. `is_recalled`: they are quotes."""

    session_id: str
    tokens: "array[int]"
    is_recalled: bool = False


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
    """A chat turn with its bodies. `turn` must not change before it is on disk.

    `origin` is the session and number of a turn with the same bodies: where that is on record they are shared.
    """

    session_id: str
    turn: TurnRecord
    origin: tuple[str, int] | None = None


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


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows of a session without reading its history. Pairs are spans and tokens."""

    history_length: int
    given: tuple[int, int]
    sampled: tuple[int, int]
    num_rewinds: int = 0
    num_recalled: int = 0  # tokens among the given ones
    num_turns: int | None = None  # of a chat, on the path to its latest turn; None: it was not noted


@dataclass(frozen=True, slots=True)
class SessionRested:
    """The session left the memory of its server. `summary` holds until something else is recorded of the session."""

    session_id: str
    at: float
    summary: SessionSummary | None  # None: not known


@dataclass(frozen=True, slots=True)
class SessionReleased:
    """The session has no owner from now on: any member of the cluster may acquire it."""

    session_id: str


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
    | SessionRested
    | SessionReleased
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


@dataclass(frozen=True, slots=True)
class ListedSession:
    """An open session without its steps. `summary` is None where it does not hold any more, or was never recorded.

    `member` is the name of the member of a cluster that owns it; empty: none does, or there is no cluster.
    """

    opened: SessionOpened
    reward: float | None
    summary: SessionSummary | None
    rested_at: float | None
    member: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A server of a cluster, as its row tells. `http` and `grpc` are addresses that other members reach, or empty."""

    name: str
    epoch: int  # higher each time that a server joins under this name: an earlier one is fenced
    http: str = ""
    grpc: str = ""
    has_tls: bool = False
    version: str = ""  # of Holdfast
    state: MemberState = "serving"
    room: int = 0  # sessions that it can take without parking another
    num_sessions: int = 0  # that it has in memory
    joined_at: float = 0.0
    lease_left_s: float = 0.0  # by the database's clock; 0 or less: it has expired, and anyone may mark the member dead


class Members(Protocol):
    """The members that share a journal, and this server's place among them. Used on one event loop."""

    @property
    def name(self) -> str:
        """This member's."""

    @property
    def lease_ends_at(self) -> float:
        """Until when, by `time.monotonic()`, this member's lease is valid for sure. After that it must tell nothing of
        its sessions until the lease is renewed."""

    async def join(self, member: Member) -> None:
        """Take the name of `member`, whose earlier holder is fenced from now on; its sessions become ours."""

    async def renew(self, *, state: MemberState, room: int, num_sessions: int) -> None:
        """Raises Fenced where this member was marked dead or replaced, and StorageUnavailable where the database does
        not answer. A lease that has expired is renewed as long as nobody has marked the member dead."""

    async def all(self) -> list[Member]:
        """By name; those that left are not among them."""

    async def owner_of(self, session_id: str) -> Member | None:
        """The member that owns the session, dead or alive; None where none does. Raises SessionNotFound."""

    async def leave(self) -> None:
        """This member's sessions are free at once, all of them. Nothing can be written afterwards."""


class Journal(Protocol):
    """Used on one event loop. `closed` blocks: in a thread."""

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
    def members(self) -> Members | None:
        """None where this server has the journal to itself."""

    @property
    def last_number(self) -> int:
        """The highest number of a session on record. Blocks for a moment."""

    async def next_number(self) -> int:
        """Of a session that is about to be made; higher than all before."""

    async def acquire(self, session_id: str, owner: str) -> StoredSession:
        """The owner's open session. From now on this server alone may write it.

        Raises SessionNotFound, which tells the owner why where the session was closed, and to anyone else that it is
        unknown; nothing is acquired then. Raises SessionElsewhere where another member that is alive owns it.
        """

    async def release(self, session_ids: Sequence[str]) -> None:
        """Others may acquire these sessions. Everything that was written of them before is on disk."""

    async def find_named(self, owner: str, name: str) -> str | None:
        """The id of the owner's open session of that name."""

    async def list_open(
        self, owner: str, *, after: int = 0, label: str | None = None, limit: int = 1000
    ) -> list[ListedSession]:
        """The owner's open sessions by number, from the one after number `after` on, at most `limit`."""

    async def list_all(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> list[ListedSession]:
        """All sessions, open and closed, by number and id, from the one after these on, at most `limit`."""

    async def count_all(self) -> int:
        """How many sessions are on record, open and closed."""

    async def count_open(self, owner: str) -> int:
        """How many open sessions the owner has."""

    async def rested(self, before: float, limit: int = 1000) -> list[tuple[str, str]]:
        """Id and owner of open sessions that came to rest before that time and that no other member owns. A session
        that never rested counts from when it was made."""

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
    members: Members | None = None

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    async def write(self, *entries: Entry) -> None:
        pass

    def note(self, *entries: Entry) -> None:
        pass

    async def next_number(self) -> int:
        return next(self._numbers)

    async def acquire(self, session_id: str, owner: str) -> StoredSession:
        raise SessionNotFound(session_id)

    async def release(self, session_ids: Sequence[str]) -> None:
        pass

    async def find_named(self, owner: str, name: str) -> str | None:
        return None

    async def list_open(
        self, owner: str, *, after: int = 0, label: str | None = None, limit: int = 1000
    ) -> list[ListedSession]:
        return []

    async def list_all(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> list[ListedSession]:
        return []

    async def count_all(self) -> int:
        return 0

    async def count_open(self, owner: str) -> int:
        return 0

    async def rested(self, before: float, limit: int = 1000) -> list[tuple[str, str]]:
        return []

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


class Writing(Protocol):
    """The part of a journal that purging needs."""

    async def write(self, *entries: Entry) -> None: ...


async def purge(journal: Writing, sessions: Sequence[ClosedSession]) -> None:
    """Nothing of these is on record afterwards."""
    for first in range(0, len(sessions), _PURGE_CHUNK):
        await journal.write(*(SessionPurged(session.session_id) for session in sessions[first : first + _PURGE_CHUNK]))
