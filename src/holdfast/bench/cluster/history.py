"""Decides from the clients' own logs and the final record whether a cluster lost, doubled or altered a turn. Pure.

A conversation is linear and belongs to one client, which asks for one turn at a time: each turn has a position, and the
client names it (`turn`) by something that no other turn has. What a client was told by reading counts as acknowledged.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_SHOWN = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One request for a turn, as its client saw it. Failed: `content` is what had arrived before, `error` says why."""

    session_id: str
    conversation: str = ""
    position: int
    turn: str
    is_acknowledged: bool
    content: str = ""
    member: str = ""  # that answered
    error: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn as it is on record at the end. `contents`: what a client may have got of it, in any of its forms."""

    conversation: str = ""
    position: int
    turn: str
    contents: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class HistoryVerdict:
    """What is wrong. `num_conflicting`: positions at which two different turns were acknowledged, or that came after a
    later one; `num_zombies`: those of them that a member acknowledged after another one had the session."""

    num_sessions: int = 0
    num_acknowledged: int = 0  # turns
    num_failed: int = 0  # turns that were never acknowledged
    num_failed_on_record: int = 0
    num_lost: int = 0
    num_doubled: int = 0
    num_altered: int = 0
    num_conflicting: int = 0
    num_zombies: int = 0
    num_unexplained: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_wrong(self) -> int:
        return self.num_lost + self.num_doubled + self.num_altered + self.num_conflicting + self.num_unexplained


def check_history(attempts: Iterable[Attempt], record: Mapping[str, Sequence[RecordedTurn]]) -> HistoryVerdict:
    """`record` has the turns of each session in the order in which they were recorded; one that it lacks is gone."""
    verdict = HistoryVerdict()
    by_session: dict[str, list[Attempt]] = {session_id: [] for session_id in record}
    for attempt in attempts:
        by_session.setdefault(attempt.session_id, []).append(attempt)
    for session_id, tried in by_session.items():
        verdict.num_sessions += 1
        _check_record(session_id, tried, record.get(session_id, ()), verdict)
        conversations: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in tried:
            if attempt.is_acknowledged:
                conversations[attempt.conversation].append(attempt)
        on_record = {(one.conversation, one.position, one.turn) for one in record.get(session_id, ())}
        for acknowledged in conversations.values():
            _check_order(acknowledged, on_record, verdict)
    return verdict


def _check_record(
    session_id: str, tried: Sequence[Attempt], record: Sequence[RecordedTurn], verdict: HistoryVerdict
) -> None:
    """Each acknowledged turn is on record exactly once, as acknowledged; a failed one once or not at all."""
    turns: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in tried:
        turns[attempt.conversation, attempt.turn].append(attempt)
    found = Counter((one.conversation, one.turn) for one in record)
    for key, same in turns.items():
        acknowledged = [one for one in same if one.is_acknowledged]
        what = f"session {session_id}, turn {key[1]!r} at {same[0].position}"
        if acknowledged:
            verdict.num_acknowledged += 1
            told = {(one.position, one.content) for one in acknowledged}
            if len(told) > 1:
                verdict.num_altered += 1
                _tell(verdict, f"{what}: acknowledged {len(acknowledged)} times, and not always the same")
            if not found[key]:
                verdict.num_lost += 1
                member = acknowledged[-1].member
                _tell(verdict, f"{what}: acknowledged by {member or 'a member'}, and not on record")
        else:
            verdict.num_failed += 1
            verdict.num_failed_on_record += bool(found[key])
        if found[key] > 1:
            verdict.num_doubled += 1
            _tell(verdict, f"{what}: on record {found[key]} times")
    ends: dict[str, int] = {}
    for one in record:
        known = turns.get((one.conversation, one.turn), [])
        what = f"session {session_id}, turn {one.turn!r} at {one.position}"
        if not known:
            verdict.num_unexplained += 1
            _tell(verdict, f"{what}: on record, but nobody asked for it")
        elif problem := _difference(one, known):
            verdict.num_altered += 1
            _tell(verdict, f"{what}: {problem}")
        if any(attempt.is_acknowledged for attempt in known):
            if one.position <= ends.get(one.conversation, -1):
                verdict.num_altered += 1
                _tell(verdict, f"{what}: on record after position {ends[one.conversation]}")
            ends[one.conversation] = max(one.position, ends.get(one.conversation, -1))


def _difference(one: RecordedTurn, attempts: Sequence[Attempt]) -> str:
    """How a recorded turn differs from what its client knows of it; empty if it does not."""
    if any(attempt.position != one.position for attempt in attempts):
        return f"asked for at position {attempts[0].position}"
    acknowledged = [attempt for attempt in attempts if attempt.is_acknowledged]
    for attempt in acknowledged:
        if attempt.content not in one.contents:
            return f"acknowledged as {attempt.content[:_SHOWN]!r}, on record as {one.contents[0][:_SHOWN]!r}"
    received = [attempt.content for attempt in attempts]
    if not acknowledged and not any(content.startswith(part) for content in one.contents for part in received):
        return f"on record as {one.contents[0][:_SHOWN]!r}, which does not begin with what arrived"
    return ""


def _check_order(
    acknowledged: Sequence[Attempt], on_record: set[tuple[str, int, str]], verdict: HistoryVerdict
) -> None:
    """No position twice; and whatever was asked for after an acknowledgement comes after its position."""
    firsts: dict[str, Attempt] = {}
    for attempt in sorted(acknowledged, key=lambda one: one.ended_s):
        firsts.setdefault(attempt.turn, attempt)
    ordered = list(firsts.values())
    for index, late in enumerate(ordered):
        earlier = [one for one in ordered[:index] if one.position >= late.position]
        rivals = [one for one in earlier if one.position == late.position or one.ended_s <= late.started_s]
        if not rivals:
            continue
        verdict.num_conflicting += 1
        # Of two turns at one position the zombie's is the one that did not stay.
        is_kept = (late.conversation, late.position, late.turn) in on_record
        rival = rivals[-1]
        if rival.member != late.member:
            verdict.num_zombies += 1
        zombie, other = (rival, late) if is_kept and rival.position == late.position else (late, rival)
        _tell(
            verdict,
            f"session {late.session_id}: turn {zombie.turn!r} was acknowledged at {zombie.position} by "
            f"{zombie.member or 'a member'}, although {other.member or 'a member'} acknowledged {other.turn!r} at "
            f"{other.position}",
        )


def _tell(verdict: HistoryVerdict, problem: str) -> None:
    verdict.problems.append(problem)
