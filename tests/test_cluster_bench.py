"""`holdfast bench cluster`: what the history checker finds, and a real cluster under every kind of fault."""

import asyncio
import dataclasses
import threading
import time
from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.bench.agents import Token
from holdfast.bench.cluster import scenario
from holdfast.bench.cluster.clients import SessionStuck, split_turns
from holdfast.bench.cluster.faults import KINDS, FaultKind, FaultRun, plan_faults
from holdfast.bench.cluster.history import Attempt, HistoryVerdict, RecordedTurn, check_history
from holdfast.bench.cluster.postgres import PostgresProcess
from holdfast.bench.cluster.scenario import ClusterRun, ClusterSettings, judge, record_run, run_cluster, unanswered
from holdfast.bench.report import Results
from holdfast.bench.upstreams import PromptedUpstream
from holdfast.errors import Fenced
from holdfast.sessions.journal import postgres
from holdfast.sessions.journal.base import Journal, Member, SessionOpened, StoredSession, TokensGiven
from holdfast.sessions.journal.postgres import PostgresJournal
from tests.effort import THOROUGH
from tests.postgres import execute, fresh_database

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
    return FaultRun(kind, began_s, over_s, over_s, frozenset({session_id}), list(codes))


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
    hit, roll = _fault("pause", "s", 1.0, 2.0), _fault("roll", "", 4.1, 4.2)
    assert _failed_gates(_run(LATE, [hit, roll, END])) == set()
    assert _failed_gates(_run([*LATE, _attempt(3, "d", 5.0)], [hit, roll, END])) == {"nothing_lost"}
    assert _failed_gates(_run(LATE, [hit, roll, END], stuck=("session s",))) == {"every_session_goes_on"}
    assert _failed_gates(_run(LATE, [_fault("pause", "s", 0.5, 2.0), roll, END])) == {"answered_again"}
    assert _failed_gates(_run(LATE, [hit, replace(roll, exit_codes=[0, 1]), END])) == {"stops_cleanly"}
    refused = [_attempt(2, "c", at, is_acknowledged=False, content="", ended_s=at) for at in (4.11, 4.12)]
    assert _failed_gates(_run([*LATE, refused[0]], [hit, roll, END])) == set()
    assert _failed_gates(_run([*LATE, *refused], [hit, roll, END])) == {"a_retry_passes_a_restart"}


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


# The real thing: two members, a database, links, and faults


async def test_a_cluster_under_faults_has_all_that_it_acknowledged() -> None:
    faults = len(KINDS) if THOROUGH else 4  # the first four of this seed: deaf, database, pause, kill
    settings = ClusterSettings(
        faults=faults, members=2, lease_s=1.0, patience_s=0.5, chats=3, token_sessions=2, turns=12, seed=960
    )
    results = Results("cluster", "", dataclasses.asdict(settings))
    async with PromptedUpstream(delay_s=0.001) as upstream:
        with PostgresProcess(fsync="off") as database:
            flags = ["--backend", "sglang", "--upstream", upstream.url]
            run = await run_cluster(settings, database, flags, results)
    verdict = run.verdict
    assert (verdict.problems, run.stuck) == ([], [])
    assert verdict.num_acknowledged > 100
    expected = set(KINDS) if THOROUGH else {"deaf", "database", "pause", "kill"}
    assert {fault.kind for fault in run.faults} >= expected
    longest = max(run.record.values(), key=len)
    del longest[-2]
    assert _counts(run.verdict) == {"lost": 1}


# The control: what the checker says of a cluster whose commits do not hold the lease


class _StoppingJournal(PostgresJournal):
    """Stands still in the middle of a commit, as a process does that was stopped; until it may go on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_stopping = False
        self.has_stopped, self.may_go_on = threading.Event(), threading.Event()

    def _begin(self, *arguments: Any) -> Any:
        begun = super()._begin(*arguments)
        if self.is_stopping:
            self.has_stopped.set()
            assert self.may_go_on.wait(30)
        return begun


async def _give(journal: Journal, position: int, first: int, log: list[Attempt]) -> None:
    """Have a turn at the position that this member believes to be next, as a client's log tells it."""
    given = list(range(first, first + 8))
    started = time.monotonic()
    await journal.write(TokensGiven("s", array("i", given)))
    assert journal.members is not None
    [turn] = split_turns([Token(id) for id in given], position)
    log.append(
        Attempt(
            session_id="s",
            position=position,
            turn=turn.turn,
            is_acknowledged=True,
            content=turn.contents[0],
            member=journal.members.name,
            started_s=started,
            ended_s=time.monotonic(),
        )
    )


def _num_waiting(url: str) -> int:
    [(number,)] = execute(url, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    return int(number)


def _length(stored: StoredSession) -> int:
    return sum(len(step.tokens) for step in stored.steps if isinstance(step, TokensGiven))


@pytest.mark.parametrize("holds_lease", [True, False])
async def test_a_commit_that_does_not_hold_its_lease_lets_a_zombie_acknowledge(
    holds_lease: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holds_lease:
        monkeypatch.setattr(postgres, "_BEGIN", postgres._BEGIN.removesuffix(b" FOR SHARE OF m"))
    with fresh_database() as url:
        stopped, other = _StoppingJournal(url), PostgresJournal(url)
        try:
            await stopped.members.join(Member(name="m1", epoch=0))
            await other.members.join(Member(name="m2", epoch=0))
            other.members._may_mark_at = 0.0  # it has been there for long
            log: list[Attempt] = []
            await stopped.write(SessionOpened(session_id="s", number=1, owner="", created_at=1.0))
            await _give(stopped, 0, 100, log)
            stopped.is_stopping = True
            zombie = asyncio.ensure_future(_give(stopped, 8, 200, log))
            await asyncio.to_thread(stopped.has_stopped.wait, 30)
            execute(url, "UPDATE leases SET until = clock_timestamp() - interval '1 hour' WHERE name = 'm1'")
            taking = asyncio.ensure_future(other.acquire("s", ""))
            if holds_lease:  # whoever takes over waits for the commit that is under way
                while not await asyncio.to_thread(_num_waiting, url):
                    assert not taking.done()
            else:
                await _give(other, _length(await taking), 300, log)
            stopped.may_go_on.set()
            await zombie
            if holds_lease:
                await _give(other, _length(await taking), 300, log)
            with pytest.raises(Fenced):
                await _give(stopped, 16, 400, log)
            tokens = [Token(id) for step in (await other.read_session("s")).steps for id in step.tokens]
        finally:
            stopped.may_go_on.set()
            await stopped.close()
            await other.close()
    verdict = check_history(log, {"s": split_turns(tokens, 0)})
    assert verdict.num_zombies == (0 if holds_lease else 1), verdict.problems
    assert bool(verdict.num_wrong) is not holds_lease


async def test_a_session_that_cannot_be_read_for_a_moment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [SessionStuck("503")]

    async def read_record(session: Any, *_: Any) -> list[RecordedTurn]:
        if session.session_id == "b" or failures:
            raise failures.pop() if failures else SessionStuck("404")
        return []

    monkeypatch.setattr(scenario, "read_record", read_record)
    monkeypatch.setattr(scenario, "_READ_AGAIN_S", 0.0)
    sessions = [SimpleNamespace(session_id=name) for name in "ab"]
    playground: Any = SimpleNamespace(sessions=sessions, http=None, stuck=[])
    assert await scenario._read_all(playground, "", "127.0.0.1:1") == {"a": []}
    assert playground.stuck == ["session b: 404"]
