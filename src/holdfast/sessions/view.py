"""The state of sessions as both endpoints report it: one session, a page of a list, and the gauges of all."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from prometheus_client import Gauge

from holdfast.errors import InvalidArgument
from holdfast.metrics import Metrics
from holdfast.sessions.history import SpanKind
from holdfast.sessions.journal.base import SessionKind, SessionOpened, SessionSummary
from holdfast.sessions.ports import BackendView
from holdfast.sessions.session import Session

MAX_PAGE = 1000


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
    num_recalled: int  # tokens among the given ones that are quotes
    failure: str
    rewind_count: int
    recomputed_tokens: int  # when it was woken last
    num_turns: int | None  # of a chat on the path to its latest turn, else sampled spans; None: not known
    reward: float | None


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
        dropped_token_count=session.num_dropped(recent),
        sink=session.sink,
        recent=recent,
        kv_live_bytes=backend.kv_live_bytes,
        kv_reserved_bytes=backend.kv_reserved_bytes,
        inv1_violations=session.inv1_violations + backend.inv1_violations,
        inv2_violations=backend.inv2_violations,
        idle_s=session.idle_s,
        given=session.given,
        sampled=session.history.count(SpanKind.SAMPLED),
        num_recalled=session.num_recalled,
        failure=failure,
        rewind_count=session.num_rewinds,
        recomputed_tokens=session.recomputed_tokens,
        num_turns=session.num_turns if session.kind != "tokens" else session.history.count(SpanKind.SAMPLED)[0],
        reward=session.reward,
    )


def resting_view(
    opened: SessionOpened, summary: SessionSummary, reward: float | None, recent: int, idle_s: float
) -> SessionView:
    """A session that is not in memory, which is as good as parked."""
    return SessionView(
        session_id=opened.session_id,
        number=opened.number,
        label=opened.label,
        created_at=opened.created_at,
        kind=opened.kind,
        group=opened.group,
        metadata=opened.metadata,
        state=SessionState.PARKED,
        is_busy=False,
        history_length=summary.history_length,
        dropped_token_count=max(0, summary.history_length - opened.sink - recent),
        sink=opened.sink,
        recent=recent,
        kv_live_bytes=PARKED.kv_live_bytes,
        kv_reserved_bytes=PARKED.kv_reserved_bytes,
        inv1_violations=0,
        inv2_violations=0,
        idle_s=idle_s,
        given=summary.given,
        sampled=summary.sampled,
        num_recalled=summary.num_recalled,
        failure="",
        rewind_count=summary.num_rewinds,
        recomputed_tokens=0,
        num_turns=summary.num_turns if opened.kind != "tokens" else summary.sampled[0],
        reward=reward,
    )


class FoundPassage(NamedTuple):
    """A passage of a session's history, among the tokens from `start` to `end`, that a search has found."""

    turn: int
    role: str
    text: str
    start: int
    end: int
    score: float


class Search(Protocol):
    async def __call__(
        self, session_id: str, owner: str, query: str | Sequence[int], *, limit: int, in_view: bool
    ) -> list[FoundPassage]:
        """The passages of the owner's session that a text, or the text of tokens, is most about, the best first.
        `in_view`: also those that the model sees anyway."""


class Page(NamedTuple):
    """`next_token` is empty where there are no more."""

    views: list[SessionView]
    next_token: str


class Wanted(NamedTuple):
    """Which sessions a list shows. `text`: part of the id, the label or the group, in whatever case."""

    label: str | None = None
    state: SessionState | None = None
    text: str = ""

    def may_be(self, session_id: str, label: str, group: str) -> bool:
        """Whether it is one of them, as far as its names tell."""
        if self.label is not None and label != self.label:
            return False
        text = self.text.casefold()
        return not text or any(text in name.casefold() for name in (session_id, label, group))


ANY = Wanted()


def page_of(views: Iterable[SessionView], state: SessionState | None, size: int) -> Page:
    """The first `size` of the views in that state, which come by number. Looks at no more of them than it takes."""
    fitting = list(itertools.islice((view for view in views if state in (None, view.state)), size + 1))
    if len(fitting) <= size:
        return Page(fitting, "")
    return Page(fitting[:size], str(fitting[size - 1].number))


def checked_page_size(size: int) -> int:
    if not 1 <= size <= MAX_PAGE:
        raise InvalidArgument(f"page_size must be 1 to {MAX_PAGE}, got {size}", param="page_size")
    return size


def page_start(token: str) -> int:
    """After which session a page begins."""
    if token and not (token.isascii() and token.isdigit() and len(token) < 20):
        raise InvalidArgument("page_token is not one that this server returned", param="page_token")
    return int(token or 0)


def watch_sessions(metrics: Metrics, views: Callable[[], Iterable[SessionView]]) -> None:
    """Gauges that look when they are asked. Sessions may be many, so the first gauge looks at them for all."""
    seen: dict[Gauge, float] = {}

    def look() -> None:
        seen.clear()
        for view in views():
            is_parked = view.state is SessionState.PARKED
            for gauge, amount in (
                (metrics.session_parked if is_parked else metrics.session_active, 1),
                (metrics.session_kv_live_bytes, view.kv_live_bytes or 0),
                (metrics.session_kv_reserved_bytes, view.kv_reserved_bytes or 0),
                (metrics.session_history_tokens, view.history_length),
            ):
                seen[gauge] = seen.get(gauge, 0.0) + amount

    def total(gauge: Gauge) -> Callable[[], float]:
        def read() -> float:
            if gauge is metrics.session_active:  # which is read before the others
                look()
            return seen.get(gauge, 0.0)

        return read

    for gauge in (
        metrics.session_active,
        metrics.session_parked,
        metrics.session_kv_live_bytes,
        metrics.session_kv_reserved_bytes,
        metrics.session_history_tokens,
    ):
        gauge.set_function(total(gauge))
