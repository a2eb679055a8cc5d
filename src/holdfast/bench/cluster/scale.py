"""How many turns per second several members of one cluster serve, and where the time goes.

Members, database, upstreams and load generators are processes on one machine: it needs about two cores for each member.
Each member has clients of its own; what it costs to ask another member than the owner is measured by itself.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.bench.cluster.postgres import PostgresProcess
from holdfast.bench.gates import Gate, all_right, median, median_at_least, median_at_most, percentile
from holdfast.bench.load import LoadClient, LoadPlan, LoadResult
from holdfast.bench.machine import cpu_s_of
from holdfast.bench.processes import Child, ProcessFailed, ServerProcess, started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.upstreams import Script
from holdfast.config import DEFAULT_MODEL, option
from holdfast.errors import ConfigError

SQLITE_SHARE = 0.85  # of the turns per second with SQLite that one member on PostgreSQL has at least
HOP_MS = 1.0
_SQLITE, _HOP = "sqlite", "hop"
_MEMBERS_OF_AN_UPSTREAM = 2
_STATISTICS_S = 1.2  # until PostgreSQL's processes have told what they counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    members: str = option("1,2,4,8", "numbers of members to compare, separated by commas", metavar="NUMBERS")
    sessions: int = option(16, "concurrent chat sessions of each member", least=1)
    turns: int = option(8, "turns of a session", least=1)
    tokens: int = option(64, "sampled tokens in each reply; each question has 64", least=1)
    rounds: int = option(5, "rounds, in each of which everything is measured once", least=1)
    seconds: float = option(5.0, "duration of one measurement", least=0)
    ramp_s: float = option(1.0, "time under load before a measurement", least=0)
    alone_s: float = option(2.0, "duration of a measurement with a single session", least=0)
    postgres: str = option("", "directory of PostgreSQL's programs; empty: found", metavar="DIR")
    model: str = option(DEFAULT_MODEL, "model that provides the tokenizer and the chat template")

    @property
    def numbers(self) -> list[int]:
        try:
            found = sorted({int(word) for word in self.members.split(",")})
        except ValueError:
            found = []
        if not found or found[0] < 1:
            raise ConfigError(f"members must be numbers above zero, separated by commas, got {self.members!r}")
        return found


class _Served(NamedTuple):
    http: str  # HOST:PORT
    pid: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """All processes. Each load generator is a process of its own, as many as there are members."""

    members: Sequence[_Served]
    sqlite: _Served
    loads: Sequence[Child]
    upstreams: Sequence[Child]
    database: PostgresProcess

    @property
    def pids(self) -> list[int]:
        helpers = [one.pid for one in (*self.loads, *self.upstreams)]
        return [*(one.pid for one in (*self.members, self.sqlite)), *helpers, *self.database.pids()]


def measure(settings: ScaleSettings, results: Results) -> None:
    numbers = settings.numbers
    results.step("starting the servers")
    with _parts(settings) as parts, ThreadPoolExecutor(len(parts.loads)) as threads:
        run = _ScaleRun(settings, results, parts, threads)
        contestants = [_SQLITE, *map(str, numbers), *([_HOP] if numbers[-1] > 1 else [])]
        results.step("warming up")
        for contestant in contestants:
            run.load(contestant, settings.sessions, min(1.0, settings.seconds), 0.0)
        pids = [os.getpid(), *parts.pids]
        for _ in results.rounds(contestants, settings.rounds, pids, run.round):
            run.compare_round()


@contextlib.contextmanager
def _parts(settings: ScaleSettings) -> Iterator[_Parts]:
    num_members = settings.numbers[-1]
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(PostgresProcess(settings.postgres))
        num_upstreams = -(-num_members // _MEMBERS_OF_AN_UPSTREAM)
        script = Script(settings.tokens)
        upstreams = [stack.enter_context(started("upstreams", "canned", script)) for _ in range(num_upstreams)]
        urls = [upstream.read(str) for upstream in upstreams]
        loads = [stack.enter_context(started("load")) for _ in range(num_members)]
        for load in loads:
            load.read(str)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-scale-"))
        places = [["--journal", database.url(), "--member", f"m{index + 1}"] for index in range(num_members)]
        servers = []
        for index, place in enumerate([*places, ["--data-dir", folder]]):
            backend = ["--backend", "sglang", "--upstream", urls[index % num_upstreams]]
            servers.append(ServerProcess(settings.model, *backend, *place))
            stack.callback(servers[-1].stop)
            if not index:
                servers[0].wait_until_served()  # the first one makes the tables
        running = [server.wait_until_served()[0] for server in servers]
        *members, sqlite = [_Served(one.http.removeprefix("http://"), one.pid) for one in running]
        yield _Parts(members, sqlite, loads, upstreams, database)


class _Usage(NamedTuple):
    """CPU seconds so far, and what PostgreSQL has counted."""

    servers: float
    postgres: float
    load: float
    upstream: float
    wal_bytes: float
    rows: float
    commits: float


@dataclass(frozen=True, slots=True)
class _ScaleRun:
    settings: ScaleSettings
    results: Results
    parts: _Parts
    threads: ThreadPoolExecutor

    def round(self, contestant: str) -> None:
        settings, results = self.settings, self.results
        before = self._usage()
        done = self.load(contestant, settings.sessions, settings.seconds, settings.ramp_s)
        after = self._usage()
        num_turns = sum(one.num_chats for one in done)
        times = [one for result in done for one in result.chat_ms]
        if not times:
            raise ProcessFailed(f"{contestant}: no turn was answered within {settings.seconds:g} s")
        used = _Usage(*(new - old for new, old in zip(after, before, strict=True)))
        results.extend(f"{contestant}/turn_ms", "ms", times)
        results.figure(f"{contestant}/turns_per_s", "1/s", len(times) / settings.seconds, "higher")
        for rank in (50, 95):
            results.figure(f"{contestant}/turn_p{rank}", "ms", percentile(times, rank), "lower")
        for name in ("servers", "postgres", "load", "upstream"):
            results.figure(f"{contestant}/cpu_{name}", "ms a turn", getattr(used, name) * 1000 / num_turns, "lower")
        if contestant != _SQLITE:
            share = used.postgres / (used.postgres + used.servers)
            results.figure(f"{contestant}/postgres_share", "of the CPU time of both", share)
            for name, unit in (("wal_bytes", "bytes a turn"), ("rows", "rows a turn"), ("commits", "a turn")):
                results.figure(f"{contestant}/{name}", unit, getattr(used, name) / num_turns, "lower")
        if contestant in (_SQLITE, _HOP, "1"):
            alone = self.load(contestant, 1, settings.alone_s, 0.0)[0]
            results.figure(f"{contestant}/alone_p50", "ms", median(alone.chat_ms), "lower")

    def compare_round(self) -> None:
        """What a further member adds, within the round that was just measured."""
        results = self.results

        def last(name: str) -> float:
            return results.report.values(name)[-1]

        numbers = self.settings.numbers
        for number in numbers[1:]:
            ratio = last(f"{number}/turns_per_s") / last(f"{numbers[0]}/turns_per_s")
            results.figure(f"{number}/times_{numbers[0]}", "times the turns", ratio, "higher")
            results.figure(f"{number}/efficiency", "of linear", ratio * numbers[0] / number, "higher")
        results.ratio("1:sqlite/turns_per_s", "1/turns_per_s", "sqlite/turns_per_s", "higher")
        if report_has(results.report, "hop/alone_p50", "1/alone_p50"):
            results.figure("hop:1/alone_p50", "ms more", last("hop/alone_p50") - last("1/alone_p50"), "lower")

    def load(self, contestant: str, num_sessions: int, duration_s: float, ramp_s: float) -> list[LoadResult]:
        """One load for each member that takes part, all at the same time."""
        members = self.parts.members
        if contestant == _HOP:
            targets = [(members[1].http, members[0].http)]
        elif contestant == _SQLITE:
            targets = [(self.parts.sqlite.http, "")]
        else:
            targets = [(one.http, "") for one in members[: int(contestant)]]
        plans = [
            LoadPlan(
                address=address,
                opened_at=opened_at,
                script=Script(self.settings.tokens),
                num_sessions=num_sessions,
                num_turns=self.settings.turns,
                duration_s=duration_s,
                ramp_s=ramp_s,
            )
            for address, opened_at in targets
        ]
        clients = [LoadClient(child, self.results) for child in self.parts.loads[: len(plans)]]
        done = list(self.threads.map(LoadClient.run, clients, plans))
        for client, result in zip(clients, done, strict=True):
            client.count(result, contestant)
        return done

    def _usage(self) -> _Usage:
        parts = self.parts
        servers = cpu_s_of(one.pid for one in (*parts.members, parts.sqlite))
        cpu_s = (
            servers,
            cpu_s_of(parts.database.pids()),
            cpu_s_of(one.pid for one in parts.loads),
            cpu_s_of(one.pid for one in parts.upstreams),
        )
        time.sleep(_STATISTICS_S)
        return _Usage(*cpu_s, *_counted(parts.database))


def _counted(database: PostgresProcess) -> tuple[int, int, int]:
    """Bytes of write-ahead log, rows written, and commits so far."""
    import psycopg

    query = """SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint,
        (tup_inserted + tup_updated + tup_deleted)::bigint, xact_commit::bigint
        FROM pg_stat_database WHERE datname = current_database()"""
    with psycopg.connect(database.url()) as connection:
        found: Any = connection.execute(query).fetchone()
    return found[0], found[1], found[2]


def report_has(report: Report, *names: str) -> bool:
    return all(report.values(name) for name in names)


def judge(report: Report) -> list[Gate]:
    gates = [all_right("replies", report.total("answered"), report.total("wrong"))]
    if report_has(report, "1/turns_per_s"):
        ratio = report.values("1:sqlite/turns_per_s")
        gates.append(median_at_least("postgres_beside_sqlite", ratio, SQLITE_SHARE, "times the turns with SQLite"))
    if report_has(report, "hop/turns_per_s"):
        gates.append(median_at_most("hop", report.values("hop:1/alone_p50"), HOP_MS, "ms"))
    return gates


def charts(settings: ScaleSettings) -> list[Chart]:
    numbers = list(map(str, settings.numbers))
    everyone = (_SQLITE, *numbers, _HOP)
    cpu = tuple(f"{one}/cpu_{part}" for one in numbers for part in ("servers", "postgres", "load", "upstream"))
    return [
        Chart("turns per second", "bars", tuple(f"{one}/turns_per_s" for one in everyone), "1/s"),
        Chart("efficiency", "bars", tuple(f"{one}/efficiency" for one in numbers[1:]), "of linear"),
        Chart("CPU time of a turn", "bars", cpu, "ms"),
        Chart("a turn", "distribution", tuple(f"{one}/turn_ms" for one in everyone), "ms", is_log=True),
    ]


SCENARIO = Scenario(
    name="scale",
    about="turns/s by the number of members of a cluster, the database's share, the cost of asking another member",
    settings=ScaleSettings,
    quick={"members": "1,2", "rounds": 2, "seconds": 1.5, "ramp_s": 0.3, "alone_s": 0.5},
    quick_s=60,
    num_rounds=lambda settings: settings.rounds,
    needs=lambda settings: ("psycopg",),
    measure=measure,
    judge=judge,
    charts=charts,
)
