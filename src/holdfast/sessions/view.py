"""What can be said about a session at one moment, for any door."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.sessions.history import SpanKind
from holdfast.sessions.journal.base import SessionKind
from holdfast.sessions.ports import BackendView
from holdfast.sessions.session import Session


class SessionState(StrEnum):
    LIVE = "live"
    PARKED = "parked"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    session_id: str
    number: int
    label: str
    created_at: float
    kind: SessionKind
    group: str
    metadata: Mapping[str, str]
    state: SessionState
    is_busy: bool
    history_length: int
    dropped_token_count: int
    sink: int
    recent: int
    kv_live_bytes: int | None
    kv_reserved_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    idle_s: float
    given: tuple[int, int]  # spans, tokens
    sampled: tuple[int, int]
    failure: str
    rewind_count: int
    recomputed_tokens: int  # when it was woken last


PARKED = BackendView(
    history_length=0,
    num_dropped=0,
    kv_live_bytes=None,  # there is no cache: nothing, not zero bytes of one
    kv_reserved_bytes=None,
    inv1_violations=0,
    inv2_violations=0,
    failure=None,
)


def view_of(session: Session, backend: BackendView, recent: int) -> SessionView:
    failure = session.failure or backend.failure or ""
    return SessionView(
        session_id=session.id,
        number=session.number,
        label=session.label,
        created_at=session.created_at,
        kind=session.kind,
        group=session.group,
        metadata=session.metadata,
        state=SessionState.FAILED if failure else SessionState.PARKED if backend is PARKED else SessionState.LIVE,
        is_busy=session.is_busy,
        history_length=len(session.history),
        dropped_token_count=max(0, len(session.history) - session.sink - recent),
        sink=session.sink,
        recent=recent,
        kv_live_bytes=backend.kv_live_bytes,
        kv_reserved_bytes=backend.kv_reserved_bytes,
        inv1_violations=session.inv1_violations + backend.inv1_violations,
        inv2_violations=backend.inv2_violations,
        idle_s=session.idle_s,
        given=session.count(SpanKind.GIVEN),
        sampled=session.count(SpanKind.SAMPLED),
        failure=failure,
        rewind_count=session.num_rewinds,
        recomputed_tokens=session.recomputed_tokens,
    )
