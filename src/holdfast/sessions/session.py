"""One session: its history, its cache, and who may write it now."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import SessionBusy, SessionFailed, SessionNotFound
from holdfast.sessions.history import History, SpanKind
from holdfast.sessions.journal.base import SessionKind


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
    number: int  # in order of creation
    owner: str
    handle: int | None  # None: parked
    sink: int
    eos_token_ids: frozenset[int]
    clock: Callable[[], float]
    kind: SessionKind = "tokens"
    is_kept: bool = True  # False: it ends with its request, and is not journaled
    label: str = ""
    group: str = ""
    pin_tokens: int | None = None  # what its creator asked for
    metadata: Mapping[str, str] = field(default_factory=dict)
    history: History = field(default_factory=History)
    gate: SessionGate = field(init=False)
    inv1_violations: int = 0
    num_rewinds: int = 0
    failure: str | None = None
    closed_why: str = ""  # closed, expired or evicted
    parking: "asyncio.Task[None] | None" = None  # its slab is being freed
    recomputed_tokens: int = 0  # when it was woken last
    created_at: float = field(default_factory=time.time)
    last_used: float = field(init=False)

    def __post_init__(self) -> None:
        self.gate = SessionGate(self.id)
        self.last_used = self.clock()

    def enter(self, turn_id: str = "") -> None:
        """Claim the session. Raises at once where it is closed, busy or failed."""
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

    @property
    def is_busy(self) -> bool:
        """Whether someone has claimed it: it must not be parked, evicted or expired."""
        return self.gate.is_busy

    @property
    def idle_s(self) -> float:
        return 0.0 if self.is_busy else self.clock() - self.last_used

    def count(self, kind: SpanKind) -> tuple[int, int]:
        """How many spans of `kind` there are, and how many tokens in them."""
        return self.history.count(kind)
