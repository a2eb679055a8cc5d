"""Several servers with one journal, while members, the database and the links between them fail again and again.

Is every acknowledged turn on record exactly once, as its client received it? And how long does a dead member's session
wait for an answer?
"""

import asyncio
import bisect
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from holdfast.bench.cluster.clients import (
    ChatClient,
    ClusterClient,
    Playground,
    SessionStuck,
    TokenClient,
    read_record,
    together,
)
from holdfast.bench.cluster.faults import KINDS, LOSING, PLANNED, FaultKind, FaultRun, Saboteur, plan_faults
from holdfast.bench.cluster.history import Attempt, HistoryVerdict, RecordedTurn, check_history
from holdfast.bench.cluster.members import MemberProcesses, members_of
from holdfast.bench.cluster.postgres import PostgresProcess
from holdfast.bench.gates import Gate, all_right, percentile_at_most
from holdfast.bench.processes import started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.config import DEFAULT_MODEL, option
from holdfast.errors import ConfigError

_DELAY_S = 0.001  # of the upstream, for each token
_GUEST = "guest"
_READER = "reader"
_LAST_TURN_S = 60.0  # how long a session may take for its last turn, once all faults are over
_SLACK_S = 2.0  # beyond the lease, until a session of a dead member is answered
_CONCURRENT_READS = 8
_READS, _READ_AGAIN_S = 10, 0.5  # of a session that cannot be read
_UNDISTURBED_S = 0.5  # after a fault that the next one waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    faults: int = option(300, "faults, each kind equally often", least=1)
    kinds: str = option("", f"kinds of faults, separated by commas: {', '.join(KINDS)}; empty: all", metavar="KINDS")
    members: int = option(3, "members", least=2)
    chats: int = option(8, "concurrent chat sessions over HTTP", least=1)
    token_sessions: int = option(4, "concurrent sessions of raw tokens over gRPC", least=1)
    turns: int = option(30, "turns of a session before a new one replaces it", least=1)
    lease_s: float = option(3.0, "lease of a member", least=1)
    patience_s: float = option(1.0, "seconds after which a client sends a request again", least=1)
    reply_tokens: int = option(6, "sampled tokens in each reply", least=1)
    seed: int = option(0, "seed of the faults and of the messages")
    postgres: str = option("", "directory of PostgreSQL's programs; empty: found", metavar="DIR")
    model: str = option(DEFAULT_MODEL, "model that provides the tokenizer and the chat template")

    @property
    def chosen_kinds(self) -> list[FaultKind]:
        names = self.kinds.split(",") if self.kinds else KINDS
        chosen = [kind for kind in KINDS if kind in names]
        if len(chosen) != len(names):
            raise ConfigError(f"kinds must be some of {', '.join(KINDS)}, each once, got {self.kinds!r}")
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """All that a run under faults leaves behind."""

    began_s: float
    ended_s: float
    attempts: Sequence[Attempt]
    record: dict[str, list[RecordedTurn]]
    faults: Sequence[FaultRun]
    exits: Sequence[str]
    stuck: Sequence[str]

    @property
    def verdict(self) -> HistoryVerdict:
        return check_history(self.attempts, self.record)


def measure(settings: ClusterSettings, results: Results) -> None:
    # What a process that was killed had written is safe without fsync: only a loss of power would lose it.
    with (
        started("upstreams", "prompted", str(_DELAY_S)) as upstream,
        PostgresProcess(settings.postgres, fsync="off") as database,
    ):
        flags = [settings.model, "--backend", "sglang", "--upstream", upstream.read(str)]
        record_run(settings, asyncio.run(run_cluster(settings, database, flags, results)), results)


async def run_cluster(
    settings: ClusterSettings, database: PostgresProcess, flags: Sequence[str], results: Results
) -> ClusterRun:
    """Start members and clients, cause all faults, then let every session have a last turn and read all of them."""
    names = [f"m{number + 1}" for number in range(settings.members)]
    flags = [*flags, "--lease-s", str(settings.lease_s), "--drain-s", "2"]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a broken connection fails one request alone
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        members_of(database, [*names, _GUEST, _READER], flags, http) as members,
    ):
        *regular, guest, reader = members.everyone
        for member in regular:
            member.is_wanted = True
        playground = Playground(
            http=http,
            addresses=members.addresses,
            num_turns=settings.turns,
            reply_tokens=settings.reply_tokens,
            patience_s=settings.patience_s,
        )
        saboteur = Saboteur(members, database, settings.lease_s, regular, guest)
        async with _in_background(members.keep()):
            results.step("starting the members")
            await members.all_ready()
            began_s = time.monotonic()
            clients = [asyncio.ensure_future(client.run()) for client in _clients(settings, playground)]
            async with _cancelled(clients):
                await _cause_all(settings, saboteur, members, results)
                results.step("the last turn of every session")
                playground.ends_at = time.monotonic() + _LAST_TURN_S
                await asyncio.gather(*clients)
            ended_s = time.monotonic()
        exits = [f"{one.name} ended with {one.code}: {one.said}" for one in members.exits]
        results.step("reading all sessions")
        last = FaultRun("roll", ended_s, ended_s, ended_s)
        last.exit_codes.extend(await asyncio.gather(*(member.stop() for member in regular if member.server)))
        for member in regular:
            member.is_wanted = False
        reader.start()
        reader.is_wanted = True
        await members.all_ready()
        record = await _read_all(playground, reader.address.http, reader.address.grpc)
        last.exit_codes.append(await reader.stop())
    return ClusterRun(
        began_s=began_s,
        ended_s=ended_s,
        attempts=playground.attempts,
        record=record,
        faults=[*saboteur.runs, last],
        exits=exits,
        stuck=playground.stuck,
    )


def _clients(settings: ClusterSettings, playground: Playground) -> Iterator[ClusterClient]:
    """Every second chat is streamed, and every third has several conversations side by side."""
    seeds = itertools.count(settings.seed * 1_000_003)
    for number in range(settings.chats):
        conversations = 2 if number % 3 == 2 else 1
        yield ChatClient(playground, next(seeds), num_conversations=conversations, is_streaming=number % 2 == 1)
    for _ in range(settings.token_sessions):
        yield TokenClient(playground, next(seeds))


async def _cause_all(settings: ClusterSettings, saboteur: Saboteur, members: MemberProcesses, results: Results) -> None:
    planned = plan_faults(settings.faults, settings.members, settings.seed, settings.chosen_kinds)
    await asyncio.sleep(2 * _UNDISTURBED_S)
    async with together() as pending:
        for number, fault in enumerate(planned, 1):
            results.step(f"fault {number} of {len(planned)}, {fault.kind}")
            cause = pending.create_task(saboteur.cause(fault))
            if fault.waits:
                await cause
                await members.all_ready()
                saboteur.settle()
                await asyncio.sleep(_UNDISTURBED_S)
            else:
                await asyncio.sleep(fault.lasts * settings.lease_s / 2)
            results.on_round()
    await members.all_ready()


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    async with _cancelled([task]):
        yield
        if task.done():
            task.result()


@contextlib.asynccontextmanager
async def _cancelled(tasks: "Sequence[asyncio.Future[None]]") -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_all(playground: Playground, base: str, grpc: str) -> dict[str, list[RecordedTurn]]:
    from holdfast_sdk import AsyncClient

    found: dict[str, list[RecordedTurn]] = {}
    free = asyncio.Semaphore(_CONCURRENT_READS)
    async with AsyncClient(grpc) as sdk:

        async def read(number: int) -> None:
            session = playground.sessions[number]
            for left in reversed(range(_READS)):
                try:
                    async with free:
                        turns = await read_record(session, playground.http, sdk, base)
                except SessionStuck as exc:
                    if not left:
                        playground.stuck.append(f"session {session.session_id}: {exc}")
                    await asyncio.sleep(_READ_AGAIN_S)  # the reader's lease may have expired on a busy machine
                else:
                    if turns is not None:
                        found[session.session_id] = turns
                    break

        await asyncio.gather(*map(read, range(len(playground.sessions))))
    return found


# What it means


def unanswered(run: ClusterRun) -> dict[FaultKind, list[tuple[float, bool]]]:
    """By kind of fault: how long each session of the member that it hit went without an answer, and whether no other
    fault came in between."""
    found: dict[FaultKind, list[tuple[float, bool]]] = {kind: [] for kind in LOSING}
    answers: dict[str, list[Attempt]] = {}
    for attempt in run.attempts:
        if attempt.is_acknowledged:
            answers.setdefault(attempt.session_id, []).append(attempt)
    for fault in run.faults:
        if fault.kind not in LOSING:
            continue
        for session_id in fault.sessions & answers.keys():
            same = answers[session_id]
            index = bisect.bisect_right(same, fault.began_s, key=lambda one: one.ended_s)
            if 0 < index < len(same):
                until_s = same[index].ended_s
                found[fault.kind].append((until_s - fault.began_s, is_alone(fault, run.faults, until_s)))
    return found


def is_alone(fault: FaultRun, everyone: Sequence[FaultRun], until_s: float) -> bool:
    """Whether nothing else was wrong between its begin and then."""
    others = (other for other in everyone if other is not fault)
    return not any(other.began_s < until_s and other.settled_s > fault.began_s for other in others)


def failures_by_turn(run: ClusterRun, kinds: Sequence[FaultKind]) -> list[list[Attempt]]:
    """The attempts that failed of each turn that was asked for during faults of these kinds, while nothing else was
    wrong."""
    found: list[list[Attempt]] = []
    for fault in run.faults[:-1]:
        if fault.kind in kinds and is_alone(fault, run.faults, fault.over_s):
            turns: dict[tuple[str, str], list[Attempt]] = {}
            for one in run.attempts:
                if fault.began_s <= one.ended_s and one.started_s <= fault.over_s:
                    turns.setdefault((one.session_id, one.turn), []).extend([] if one.is_acknowledged else [one])
            found += turns.values()
    return found


def record_run(settings: ClusterSettings, run: ClusterRun, results: Results) -> None:
    """Everything about a run as figures and series of the report."""
    verdict = run.verdict
    for name in ("acknowledged", "failed", "failed_on_record", "lost", "doubled", "altered", "conflicting", "zombies"):
        results.figure(name, "turns", getattr(verdict, f"num_{name}"))
    results.figure("unexplained", "turns", verdict.num_unexplained)
    results.figure("sessions", "", verdict.num_sessions)
    for problem in (*verdict.problems, *run.stuck):
        results.note(problem)
    results.figure("stuck", "sessions", len(run.stuck))
    for kind, waits in unanswered(run).items():
        results.extend(f"{kind}/unanswered_s", "s", [wait_s for wait_s, alone in waits if alone])
        results.extend("unanswered_s", "s", [wait_s for wait_s, alone in waits if alone])
        results.extend("overlapping/unanswered_s", "s", [wait_s for wait_s, alone in waits if not alone])
    for name in ("unanswered_s", "overlapping/unanswered_s", *(f"{kind}/unanswered_s" for kind in LOSING)):
        for value in results.report.values(name):
            results.figure(f"{name.removesuffix('_s')}", "s", value, "lower")
    failures = failures_by_turn(run, PLANNED)
    results.figure("planned/turns", "turns", len(failures))
    results.figure("planned/failed_once", "turns", sum(len(failed) == 1 for failed in failures))
    again = [failed for failed in failures if len(failed) > 1]
    results.figure("planned/failed_again", "turns", len(again))
    for failed in again:
        told = (f"{one.member} {one.error} after {one.ended_s - one.started_s:.2f} s" for one in failed)
        results.note(f"session {failed[0].session_id}, a turn failed again: {', '.join(told)}")
    counted = Counter(fault.kind for fault in run.faults[:-1])
    for kind in KINDS:
        results.figure(f"faults/{kind}", "", counted[kind])
    for fault in run.faults:
        if is_alone(fault, run.faults, fault.over_s):
            results.extend("exit_codes", "", [float(code) for code in fault.exit_codes])
    for error, number in Counter(one.error for one in run.attempts if not one.is_acknowledged).most_common():
        results.figure(f"failed/{error}", "attempts", number)
    for said, number in Counter(run.exits).most_common():
        results.note(f"{number} times: {said}")
    _record_course(run, results)


def _record_course(run: ClusterRun, results: Results) -> None:
    """Turns in each second, and the seconds in which faults began."""
    seconds = Counter(int(one.ended_s - run.began_s) for one in run.attempts if one.is_acknowledged)
    course = [float(seconds[second]) for second in range(int(run.ended_s - run.began_s))]
    results.extend("turns_per_s", "1/s", course)
    step = -(-len(course) // len(results.report.values("turns_per_s"))) if course else 1
    for fault in run.faults[:-1]:
        results.extend(f"began/{fault.kind}", "s", [(fault.began_s - run.began_s) / step + 1])


def judge(report: Report) -> list[Gate]:
    limit = report.settings["lease_s"] + _SLACK_S
    num_turns, num_sessions = report.total("acknowledged"), report.total("sessions")
    exit_codes, waits = report.values("exit_codes"), report.values("unanswered_s")
    hits = sum(report.total(f"faults/{kind}") for kind in LOSING)
    return [
        *(
            all_right(f"nothing_{name}", num_turns, report.total(name))
            for name in ("lost", "doubled", "altered", "conflicting", "unexplained")
        ),
        all_right("every_session_goes_on", num_sessions, report.total("stuck")),
        all_right("a_retry_passes_a_restart", report.total("planned/turns"), report.total("planned/failed_again")),
        *([percentile_at_most("answered_again", waits, 100, limit, "s")] if hits else []),
        all_right("stops_cleanly", len(exit_codes), sum(map(bool, exit_codes))),
    ]


def charts(settings: ClusterSettings) -> list[Chart]:
    marks = tuple(f"began/{kind}" for kind in KINDS)
    waits = tuple(f"{kind}/unanswered_s" for kind in LOSING)
    return [
        Chart("turns acknowledged in each second, and the faults", "course", ("turns_per_s",), "turns", marks=marks),
        Chart("sessions of a member that was hit: time without an answer", "distribution", waits, "s"),
    ]


SCENARIO = Scenario(
    name="cluster",
    about="members, database and links fail again and again: no acknowledged turn is lost, doubled or altered",
    settings=ClusterSettings,
    quick={"faults": 7, "lease_s": 1.0, "chats": 4, "token_sessions": 2},
    quick_s=60,
    num_rounds=lambda settings: settings.faults,
    needs=lambda settings: ("holdfast_sdk", "psycopg"),
    measure=measure,
    judge=judge,
    charts=charts,
)
