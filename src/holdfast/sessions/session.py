"""One session: what was said, what it is bound to, and whether the two agree."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import SessionFailed
from holdfast.sessions.gate import SessionGate
from holdfast.sessions.history import History, SpanKind
from holdfast.sessions.journal.entries import SessionKind


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Mutable; touched only on the event loop that serves it, by whoever holds its gate."""

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
    num_holds: int = 0  # by those who will come back to it, and until then do nothing
    failure: str | None = None
    parking: "asyncio.Task[None] | None" = None  # its slab is being freed
    recomputed_tokens: int = 0  # when it was woken last
    created_at: float = field(default_factory=time.time)
    last_used: float = field(init=False)

    def __post_init__(self) -> None:
        self.gate = SessionGate(self.id)
        self.last_used = self.clock()

    def enter(self) -> None:
        """Claim the session for one operation. Raises at once where it is closed, busy or failed."""
        self.gate.enter()
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
        """Whether something runs on it or is about to: it is not to be taken away."""
        return self.gate.is_busy or self.num_holds > 0

    @property
    def idle_s(self) -> float:
        return 0.0 if self.is_busy else self.clock() - self.last_used

    def count(self, kind: SpanKind) -> tuple[int, int]:
        """How many spans of `kind` there are, and how many tokens in them."""
        return self.history.count(kind)
