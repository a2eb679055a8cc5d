"""`holdfast bench cluster`: what the history checker finds, and a real cluster under every kind of fault."""

from dataclasses import replace

import pytest

from holdfast.bench.cluster.history import Attempt, HistoryVerdict, RecordedTurn, check_history

# The history checker: a session of three turns by one client, the second of which was sent twice


def _attempt(position: int, turn: str, at: float, **changes: object) -> Attempt:
    known = Attempt(
        session_id="s",
        position=position,
        turn=turn,
        is_acknowledged=True,
        content=turn.upper(),
        member="m1",
        started_s=at,
        ended_s=at + 0.5,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def _recorded(position: int, turn: str) -> RecordedTurn:
    return RecordedTurn(position=position, turn=turn, contents=(turn.upper(), f"{turn} as a stream"))


FAILED = _attempt(1, "b", 1.0, is_acknowledged=False, content="", error="503")
LOG = [_attempt(0, "a", 0.0), FAILED, _attempt(1, "b", 2.0, content="b as a stream"), _attempt(2, "c", 3.0)]
RECORD = [_recorded(0, "a"), _recorded(1, "b"), _recorded(2, "c")]


def _counts(verdict: HistoryVerdict) -> dict[str, int]:
    names = ("lost", "doubled", "altered", "conflicting", "zombies", "unexplained")
    return {name: found for name in names if (found := getattr(verdict, f"num_{name}"))}


def _check(log: list[Attempt], record: list[RecordedTurn]) -> dict[str, int]:
    verdict = check_history(log, {"s": record})
    assert bool(verdict.problems) == bool(verdict.num_wrong)
    return _counts(verdict)


def test_a_history_that_is_all_there_has_nothing_wrong() -> None:
    verdict = check_history(LOG, {"s": RECORD})
    assert (_counts(verdict), verdict.problems) == ({}, [])
    assert (verdict.num_sessions, verdict.num_acknowledged, verdict.num_failed) == (1, 3, 0)


def test_a_turn_that_failed_is_on_record_once_or_not_at_all() -> None:
    log = [*LOG, _attempt(3, "d", 4.0, is_acknowledged=False, content="D", error="the connection broke")]
    partly = RecordedTurn(position=3, turn="d", contents=("D and more",))
    assert _check(log, RECORD) == {}
    assert _check(log, [*RECORD, partly]) == {}
    assert check_history(log, {"s": [*RECORD, partly]}).num_failed_on_record == 1
    assert _check(log, [*RECORD, partly, partly]) == {"doubled": 1}
    assert _check(log, [*RECORD, replace(partly, contents=("another",))]) == {"altered": 1}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (RECORD[:2], {"lost": 1}),
        ([], {"lost": 3}),
        ([*RECORD, RECORD[2]], {"doubled": 1, "altered": 1}),  # the second one is out of order, too
        ([RECORD[0], replace(RECORD[1], contents=("C",)), RECORD[2]], {"altered": 1}),
        ([RECORD[1], RECORD[0], RECORD[2]], {"altered": 1}),
        ([RECORD[0], replace(RECORD[1], position=2), RECORD[2]], {"altered": 2}),
        ([*RECORD, _recorded(3, "d")], {"unexplained": 1}),
    ],
)
def test_whatever_happens_to_the_record_is_found(record: list[RecordedTurn], expected: dict[str, int]) -> None:
    assert _check(LOG, record) == expected


def test_a_session_that_is_gone_has_lost_its_turns() -> None:
    assert _counts(check_history(LOG, {})) == {"lost": 3}


def test_a_repeated_answer_must_be_the_same() -> None:
    again = _attempt(2, "c", 4.0, content="c as a stream")
    assert _check([*LOG, replace(again, content="C")], RECORD) == {}
    assert _check([*LOG, again], RECORD) == {"altered": 1}


def test_a_second_turn_at_one_position_is_a_zombies_if_another_member_acknowledged_it() -> None:
    """m1 was stopped, m2 took over and acknowledged c; m1 wakes up and acknowledges d, from its older state."""
    taken_over = [*LOG[:3], replace(LOG[3], member="m2")]
    zombie = _attempt(2, "d", 3.2)
    assert _check([*taken_over, zombie], RECORD) == {"lost": 1, "conflicting": 1, "zombies": 1}
    assert _check([*taken_over, zombie], [*RECORD[:2], _recorded(2, "d")])["zombies"] == 1
    assert _check([*LOG, zombie], RECORD) == {"lost": 1, "conflicting": 1}


def test_a_turn_before_one_that_was_acknowledged_earlier_comes_from_an_older_state() -> None:
    taken_over = [*LOG[:3], replace(LOG[3], member="m2")]
    assert _check([*taken_over, _attempt(1, "d", 9.0)], [*RECORD, _recorded(1, "d")])["zombies"] == 1
    handed_back = _attempt(3, "d", 9.0)
    assert _check([*taken_over, handed_back], [*RECORD, _recorded(3, "d")]) == {}


def test_conversations_of_one_session_have_positions_of_their_own() -> None:
    other = [replace(one, conversation="other", member="m2", started_s=0.0, ended_s=9.0) for one in LOG[:1]]
    record = [RECORD[0], replace(RECORD[0], conversation="other"), *RECORD[1:]]
    assert _check([*LOG, *other], record) == {}
    assert _check([*LOG, *other], RECORD) == {"lost": 1}
