"""`holdfast bench cluster`: what the history checker finds, and a real cluster under every kind of fault."""

import dataclasses
from collections import Counter
from dataclasses import replace

import pytest

from holdfast.bench.agents import Token
from holdfast.bench.cluster.clients import split_turns
from holdfast.bench.cluster.faults import KINDS, FaultKind, FaultRun, plan_faults
from holdfast.bench.cluster.history import Attempt, HistoryVerdict, RecordedTurn, check_history
from holdfast.bench.cluster.scenario import ClusterRun, ClusterSettings, judge, record_run, unanswered
from holdfast.bench.report import Results

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


# What else a run is judged by


def _run(attempts: list[Attempt], faults: list[FaultRun], *, stuck: tuple[str, ...] = ()) -> ClusterRun:
    return ClusterRun(
        began_s=0.0, ended_s=10.0, attempts=attempts, record={"s": RECORD}, faults=faults, exits=(), stuck=stuck
    )


def _fault(kind: FaultKind, session_id: str, began_s: float, over_s: float, *codes: int) -> FaultRun:
    return FaultRun(kind, began_s, over_s, frozenset({session_id}), list(codes))


LATE = [LOG[0], FAILED, replace(LOG[2], ended_s=4.0), replace(LOG[3], started_s=4.0, ended_s=4.5)]
END = _fault("roll", "", 10.0, 10.0, 0, 0)


def test_a_session_waits_from_the_fault_of_its_member_until_its_next_answer() -> None:
    hit, miss = _fault("kill", "s", 1.0, 2.0), _fault("kill", "another", 1.0, 2.0)
    assert unanswered(_run(LATE, [hit, END]))["kill"] == [(3.0, True)]
    assert unanswered(_run(LATE, [miss, END]))["kill"] == []
    meanwhile = _fault("database", "", 3.0, 3.5)
    assert unanswered(_run(LATE, [hit, meanwhile, END]))["kill"] == [(3.0, False)]


def _failed_gates(run: ClusterRun, lease_s: float = 1.0) -> set[str]:
    settings = ClusterSettings(lease_s=lease_s)
    results = Results("cluster", "", dataclasses.asdict(settings))
    record_run(settings, run, results)
    return {gate.name for gate in judge(results.report) if not gate.passed}


def test_a_cluster_is_judged_by_all_that_can_go_wrong() -> None:
    hit = _fault("pause", "s", 1.0, 2.0)
    assert _failed_gates(_run(LATE, [hit, END])) == set()
    assert _failed_gates(_run([*LATE, _attempt(3, "d", 5.0)], [hit, END])) == {"nothing_lost"}
    assert _failed_gates(_run(LATE, [hit, END], stuck=("session s",))) == {"every_session_goes_on"}
    assert _failed_gates(_run(LATE, [_fault("pause", "s", 0.5, 2.0), END])) == {"answered_again"}
    assert _failed_gates(_run(LATE, [hit, _fault("roll", "", 9.0, 9.5, 0, 1), END])) == {"stops_cleanly"}


def test_the_same_seed_plans_the_same_faults_and_every_kind_comes() -> None:
    planned = plan_faults(14, 3, seed=5)
    assert planned == plan_faults(14, 3, seed=5) != plan_faults(14, 3, seed=6)
    assert Counter(fault.kind for fault in planned) == dict.fromkeys(KINDS, 2)


def test_a_history_of_tokens_is_split_into_its_turns() -> None:
    blocks = [Token(id) for id in range(100, 108)], [Token(id) for id in range(200, 208)]
    sampled = [Token(3, -0.5, -0.25), Token(4, -1.0, -1.0)]
    turns = split_turns([*blocks[0], *sampled, *blocks[1], *blocks[0], *sampled[:1]], 10)
    assert [(one.position, one.turn[:7]) for one in turns] == [(10, "100-101"), (20, "200-201"), (28, "100-101")]
    assert turns[0].contents[0].endswith("107 3:-0.5:-0.25 4:-1.0:-1.0")
