"""Sessions: the history and state of one, who may write it now, how it is recorded, and the registry of all."""

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.errors import CapacityExhausted, HoldfastError, SessionBusy, SessionFailed, SessionNotFound
from holdfast.sessions.history import History, SpanKind
from holdfast.sessions.journal.base import (
    ForkedFrom,
    HistoryRewound,
    SessionKind,
    SessionOpened,
    SessionSummary,
    Step,
    StoredSession,
)
from holdfast.sessions.record import TurnRecord

NAME = "holdfast-session"  # the key of a session's metadata under which its name is kept

_REMEMBERED = 10_000  # ids of gone sessions; beyond that the oldest become merely unknown


class SessionGate:
    """One writer at a time, and closing beats busy: `enter` and `leave` around every operation, `close` once.

    Pure state: used on one event loop, never waits. `turn_id` names the chat turn that holds the session.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._turn_id = ""
        self._is_busy = False
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def enter(self, turn_id: str = "") -> None:
        if self._is_closed:
            raise SessionNotFound(self._session_id, detail="closed")
        if self._is_busy:
            what = f"turn {self._turn_id}" if self._turn_id else "another operation"
            raise SessionBusy(f"session {self._session_id} is busy with {what}", turn_id=self._turn_id)
        self._is_busy = True
        self._turn_id = turn_id

    def leave(self) -> None:
        self._is_busy = False

    def close(self) -> None:
        if self._is_closed:
            raise SessionNotFound(self._session_id, detail="closed")
        self._is_closed = True


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Mutable; touched only on the event loop that serves it, by whoever has claimed it."""

    id: str
    number: int  # in order of creation; 0 of one that no list shows
    owner: str
    sink: int
    eos_token_ids: frozenset[int]
    clock: Callable[[], float]
    kind: SessionKind = "tokens"
    is_kept: bool = True  # False: it is not journaled; it ends with its request, or is a cache of `cache_of`
    cache_of: str = ""  # the chat session with many conversations of which this one holds one
    name: str = ""  # under which its owner finds it
    label: str = ""
    group: str = ""
    pin_tokens: int | None = None  # what its creator asked for
    metadata: Mapping[str, str] = field(default_factory=dict)
    history: History = field(default_factory=History)
    reward: float | None = None
    num_turns: int = 0  # of a chat, on the path to its latest turn
    last_turn: int = 0  # the number of that turn; 0: there is none
    num_bytes: int = 0  # that were recorded since this process has it
    snapshot_id: str = ""  # under which its snapshot is kept: its own id, or what names the conversation that it caches
    gate: SessionGate = field(init=False)
    on_handle: "Callable[[Session], None] | None" = field(default=None, init=False)  # of the registry that has it
    _handle: int | None = field(default=None, init=False)
    inv1_violations: int = 0
    num_rewinds: int = 0
    failure: str | None = None
    closed_why: str = ""  # closed, expired or evicted
    dropped: HoldfastError | None = None  # why it is not in memory any more, though it was not closed
    is_counted: bool = False  # among the sessions that its owner has, as long as the journal does not count it
    num_writes: int = 0  # to the journal, under way
    num_users: int = 0  # requests that need it in memory
    is_leaving: bool = False  # the memory: nobody may begin to use it
    parking: "asyncio.Task[None] | None" = None  # its slab is being freed
    recomputed_tokens: int = 0  # when it was woken last
    created_at: float = field(default_factory=time.time)
    last_used: float = field(init=False)

    def __post_init__(self) -> None:
        self.gate = SessionGate(self.id)
        self.snapshot_id = self.snapshot_id or self.id
        self.last_used = self.clock()

    @property
    def handle(self) -> int | None:
        """The backend's, as long as the session has a slab. None: parked."""
        return self._handle

    @handle.setter
    def handle(self, handle: int | None) -> None:
        self._handle = handle
        if self.on_handle is not None:
            self.on_handle(self)

    def enter(self, turn_id: str = "") -> None:
        """Claim the session. Raises at once where it is closed, busy or failed."""
        if self.is_leaving:
            raise SessionNotFound(self.id, detail="evicted")
        self.gate.enter(turn_id)
        if self.failure:
            self.gate.leave()
            raise SessionFailed(f"session {self.id} has failed: {self.failure}")

    def leave(self) -> None:
        self.last_used = self.clock()
        self.gate.leave()

    def check(self, backend_length: int) -> None:
        """INV-1 between session and backend; a session that breaks it is failed for good, never reset."""
        if backend_length != len(self.history):
            self.inv1_violations += 1
            self.failure = f"INV-1: the session has {len(self.history)} tokens, its backend {backend_length}"
            raise SessionFailed(f"session {self.id} has failed: {self.failure}")

    def check_here(self) -> None:
        """Raises where the session was closed, or dropped, meanwhile."""
        if self.dropped is not None:
            raise type(self.dropped)(str(self.dropped))
        if self.gate.is_closed:
            raise SessionNotFound(self.id, detail=self.closed_why or "closed")

    @property
    def is_busy(self) -> bool:
        """Whether someone has claimed it: it must not be parked, evicted or expired."""
        return self.gate.is_busy

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all goes on: it may leave the memory."""
        return not (self.is_busy or self.num_users or self.is_leaving or self.parking)

    @property
    def summary(self) -> SessionSummary:
        return SessionSummary(
            history_length=len(self.history),
            given=self.given,
            sampled=self.history.count(SpanKind.SAMPLED),
            num_rewinds=self.num_rewinds,
            num_recalled=self.num_recalled,
            num_turns=self.num_turns,
        )

    @property
    def idle_s(self) -> float:
        return 0.0 if self.is_busy else self.clock() - self.last_used

    def num_dropped(self, recent: int) -> int:
        """How many tokens have left a window that keeps the last `recent` ones."""
        return max(0, len(self.history) - self.sink - recent)

    @property
    def given(self) -> tuple[int, int]:
        """How many spans were not sampled, and how many tokens are in them."""
        return self.history.count(SpanKind.GIVEN, SpanKind.RECALLED)

    @property
    def num_recalled(self) -> int:
        return self.history.count(SpanKind.RECALLED)[1]


def opened(session: Session, forked_from: ForkedFrom | None = None) -> SessionOpened:
    return SessionOpened(
        session_id=session.id,
        number=session.number,
        owner=session.owner,
        created_at=session.created_at,
        kind=session.kind,
        name=session.name,
        label=session.label,
        group=session.group,
        metadata=session.metadata,
        sink=session.sink,
        pin_tokens=session.pin_tokens,
        eos_token_ids=tuple(sorted(session.eos_token_ids)),
        forked_from=forked_from,
    )


def restored(stored: StoredSession, clock: Callable[[], float]) -> Session:
    """The session, parked. A chat's history is the path to the turn that was recorded last."""
    facts = stored.opened
    session = Session(
        id=facts.session_id,
        number=facts.number,
        owner=facts.owner,
        sink=facts.sink,
        eos_token_ids=frozenset(facts.eos_token_ids),
        clock=clock,
        kind=facts.kind,
        name=facts.name,
        label=facts.label,
        group=facts.group,
        metadata=dict(facts.metadata),
        pin_tokens=facts.pin_tokens,
        failure=stored.failure,
        num_rewinds=sum(isinstance(step, HistoryRewound) for step in stored.steps),
        created_at=facts.created_at,
        reward=stored.reward,
    )
    steps: Sequence[Step] = stored.steps
    if facts.kind != "tokens":
        steps = path = _path(stored)
        session.num_turns, session.last_turn = len(path), path[-1].number if path else 0
        if path and (pinned := path[0].facts.pinned) is not None:
            session.sink = pinned
    for step in steps:
        session.history.repeat(step)
    return session


def without_gap(stored: StoredSession) -> StoredSession:
    """The session up to the first turn that is missing. Turns are numbered from 1 on, so a gap is damage."""
    for number, turn in enumerate(stored.turns, start=1):
        if turn.number != number:
            steps = stored.steps[: stored.steps.index(turn)]
            why = f"turn {number} is not on record; the {number - 1} turns before it are intact"
            return replace(stored, steps=steps, failure=stored.failure or why)
    return stored


def _path(stored: StoredSession) -> list[TurnRecord]:
    turns = {turn.number: turn for turn in stored.turns}
    path: list[TurnRecord] = []
    number = max(turns, default=0)
    while number:
        path.append(turns[number])
        number = turns[number].parent
    return path[::-1]


def new_session_id() -> str:
    """Unguessable: 128 random bits in hex."""
    return secrets.token_hex(16)


class SessionRegistry:
    """Sessions by id. Room is claimed before a session is opened, so that two creators never share a place.

    `is_kept_elsewhere`: a journal has what is removed from here; only what it has may be given up for others.
    """

    def __init__(self, capacity: int, *, is_kept_elsewhere: bool = False) -> None:
        self.capacity = capacity
        self._is_kept_elsewhere = is_kept_elsewhere
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._live: dict[str, Session] = {}  # those with a slab: found without a look at the many parked ones
        self._claimed = 0
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> (owner, why)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_parked(self) -> int:
        return len(self._sessions) - self.num_live

    @property
    def is_full(self) -> bool:
        return self.num_free == 0

    @property
    def num_free(self) -> int:
        return max(0, self.capacity - self.num_live - self._claimed)

    def claim_place(self) -> Session | None:
        """Reserve a place; where all are taken, the idle session that has to make room for it."""
        victim = self.longest_live() if self.is_full else None
        self._claimed += 1
        return victim

    def longest_live(self) -> Session:
        """The session that was used least recently of those that have a slab and can be parked."""
        idle = [s for s in self._live.values() if not (s.is_busy or s.parking or s.is_leaving)]
        if not idle:
            raise CapacityExhausted(f"all {self.capacity} sessions are busy; try again soon or raise --sessions")
        return min(idle, key=lambda session: session.last_used)

    def longest_unused(self, *, is_parked: bool) -> Session | None:
        """The session that can be given up and was used least recently, of those that are parked, or live. Of parked
        ones, that of the owner that has most of them: nobody loses sessions because another owner makes many. Mere
        caches go first."""
        idle = [s for s in self._sessions.values() if (s.handle is None) is is_parked and self.may_go(s)]
        num_idle = Counter(session.owner for session in idle)

        def order(session: Session) -> tuple[bool, int, float]:
            rank = (not session.cache_of, -num_idle[session.owner]) if is_parked else (True, 0)
            return *rank, session.last_used

        return min(idle, key=order, default=None)

    def may_go(self, session: Session) -> bool:
        """Whether it may be given up: nobody uses it, and where there is a journal, that has it."""
        is_on_record = (session.is_kept or bool(session.cache_of)) and not session.failure
        return session.is_idle and (is_on_record or not self._is_kept_elsewhere)

    def hold_place(self) -> None:
        """Keep the place of a session that was removed, until its slab is free."""
        self._claimed += 1

    def release_place(self) -> None:
        """Give a claimed place back, or have it filled by a session that is here already."""
        self._claimed -= 1

    def add(self, session: Session) -> None:
        """Fill a claimed place."""
        self._claimed -= 1
        self._register(session)

    def add_parked(self, session: Session) -> None:
        self._register(session)

    def remove(self, session: Session, why: str) -> None:
        """Remove a session and remember why. From now on it cannot be claimed."""
        self.discard(session)
        session.closed_why = why
        self.remember(session.id, session.owner, why)

    def discard(self, session: Session) -> None:
        """Remove a session that goes on elsewhere. Here it cannot be claimed from now on."""
        session.gate.close()
        session.on_handle = None
        del self._sessions[session.id]
        self._live.pop(session.id, None)

    def remember(self, session_id: str, owner: str, why: str) -> None:
        """What became of a session that is gone."""
        self._gone[session_id] = (owner, why)
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """It is not known any more what became of the session."""
        self._gone.pop(session_id, None)

    def find(self, session_id: str, owner: str) -> Session | None:
        """The owner's session; None where nothing is known of it. Raises SessionNotFound where it is gone."""
        if session_id in self._sessions or self._gone.get(session_id, ("",))[0] == owner:
            return self.get(session_id, owner)
        return None

    def get(self, session_id: str, owner: str) -> Session:
        """The owner's session. To anyone else it does not exist and never did."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            return session
        gone_owner, why = self._gone.get(session_id, ("", "unknown"))
        raise SessionNotFound(session_id, detail=why if gone_owner == owner else "unknown")

    def caches_of(self, session_id: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.cache_of == session_id]

    def idle_longer_than(self, seconds: float) -> list[Session]:
        return [s for s in self._sessions.values() if s.is_idle and s.idle_s > seconds]

    def _register(self, session: Session) -> None:
        self._sessions[session.id] = session
        session.on_handle = self._note_slab
        self._note_slab(session)

    def _note_slab(self, session: Session) -> None:
        if session.handle is None:
            self._live.pop(session.id, None)
        else:
            self._live[session.id] = session
