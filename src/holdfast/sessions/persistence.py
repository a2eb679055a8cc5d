"""What of a session goes into the journal, and a session as the journal has it."""

from array import array
from collections.abc import Callable

from holdfast.generation import Sampled, StopReason
from holdfast.sessions.history import History, Span, SpanKind
from holdfast.sessions.journal.base import (
    Entry,
    ForkedFrom,
    HistoryRewound,
    SessionOpened,
    Step,
    StoredSession,
    TokensGiven,
    TokensSampled,
)
from holdfast.sessions.record import TurnRecord
from holdfast.sessions.session import Session


def opened(session: Session, forked_from: ForkedFrom | None = None) -> SessionOpened:
    return SessionOpened(
        session_id=session.id,
        number=session.number,
        owner=session.owner,
        created_at=session.created_at,
        kind=session.kind,
        label=session.label,
        group=session.group,
        metadata=session.metadata,
        sink=session.sink,
        pin_tokens=session.pin_tokens,
        eos_token_ids=tuple(sorted(session.eos_token_ids)),
        forked_from=forked_from,
    )


def spans_since(session: Session, start: int) -> list[Entry]:
    """What the history holds from position `start` on. Looks from the end: histories are long, turns are not."""
    found = []
    for span in reversed(session.history.spans):
        if span.end <= start:
            break
        found.append(_entry(session, span, max(start, span.start)))
    return found[::-1]


def _entry(session: Session, span: Span, start: int) -> Entry:
    tokens = session.history.slice(start, span.end)
    if span.kind is SpanKind.GIVEN:
        return TokensGiven(session.id, tokens)
    inner = slice(start - span.start, None)
    reason = span.stop_reason.value if span.stop_reason else None
    return TokensSampled(session.id, tokens, span.logprobs[inner], span.sampling_logprobs[inner], reason)


def restored(stored: StoredSession, clock: Callable[[], float]) -> Session:
    """The session, parked. A chat's history is the path to the turn that was recorded last."""
    facts = stored.opened
    session = Session(
        id=facts.session_id,
        number=facts.number,
        owner=facts.owner,
        handle=None,
        sink=facts.sink,
        eos_token_ids=frozenset(facts.eos_token_ids),
        clock=clock,
        kind=facts.kind,
        label=facts.label,
        group=facts.group,
        metadata=dict(facts.metadata),
        pin_tokens=facts.pin_tokens,
        failure=stored.failure,
        created_at=facts.created_at,
    )
    for step in _path(stored) if facts.kind == "chat" else stored.steps:
        _repeat(session.history, step)
    return session


def _path(stored: StoredSession) -> list[TurnRecord]:
    turns = {turn.number: turn for turn in stored.turns}
    path: list[TurnRecord] = []
    number = max(turns, default=0)
    while number:
        path.append(turns[number])
        number = turns[number].parent
    return path[::-1]


def _repeat(history: History, step: Step) -> None:
    match step:
        case HistoryRewound():
            history.rewind(step.length)
        case TokensGiven():
            history.give(step.tokens)
        case TurnRecord():
            history.give(step.given)
            reason = StopReason.MAX_TOKENS if step.finish_reason == "length" else StopReason.EOS
            _sample(history, step.sampled, step.logprobs, step.sampling_logprobs, reason)
        case TokensSampled():
            own_reason = StopReason(step.stop_reason) if step.stop_reason else None
            _sample(history, step.tokens, step.logprobs, step.sampling_logprobs, own_reason)


def _sample(
    history: History,
    tokens: "array[int]",
    logprobs: "array[float]",
    sampling_logprobs: "array[float]",
    reason: StopReason | None,
) -> None:
    span = history.begin_sampled()
    for token, logprob, sampling in zip(tokens, logprobs, sampling_logprobs, strict=True):
        history.sample(span, Sampled(token=token, logprob=logprob, sampling_logprob=sampling))
    span.stop_reason = reason
