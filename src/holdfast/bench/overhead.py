"""What a session server costs: chats through it and straight to a canned upstream, in turns; and its memory.

What journaling adds is measured beside the same server without it, with small replies and with large ones.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from holdfast.bench.canned_upstream import Script
from holdfast.bench.gates import Gate, all_right, median_at_least
from holdfast.bench.load import LoadPlan, LoadResult
from holdfast.bench.page import Chart
from holdfast.bench.processes import Child, ProcessFailed, cpu_s_of, resident_bytes, started
from holdfast.bench.record_check import check_record
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.bench.server_process import ServerProcess
from holdfast.bench.summary import median, percentile
from holdfast.config import DEFAULT_MODEL, option

Way = Literal["straight", "served", "journaled", "large", "large_journaled"]
WAYS: tuple[Way, ...] = get_args(Way)
SMALL: tuple[Way, ...] = ("straight", "served", "journaled")

JOURNALED_SHARE = 0.95  # of the turns a second that there are without a journal

_START_S = 120.0
_CHECKPOINTS = 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSettings:
    sessions: int = option(32, "chat sessions at once", least=1)
    turns: int = option(4, "turns of a session", least=1)
    tokens: int = option(64, "sampled tokens in each reply; each question has 64", least=1)
    rounds: int = option(10, "how often each way has its turn", least=1)
    seconds: float = option(3.0, "how long it lasts", least=0)
    ramp_s: float = option(0.5, "before that, under load but not counted", least=0)
    alone_s: float = option(1.0, "and how long with one session at a time", least=0)
    large_kib: int = option(1331, "routed experts in each large reply, as base64", least=1)
    large_s: float = option(1.5, "how long large replies have their turn", least=0)
    kept_sessions: int = option(2000, "sessions that stay open while memory is watched", least=_CHECKPOINTS)
    model: str = option(DEFAULT_MODEL, "gives tokenizer and chat template")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a way leads, and the reply that is to be expected there. `pid` 0: not a server of ours."""

    address: str
    script: Script
    pid: int = 0


def measure(settings: OverheadSettings, results: Results) -> None:
    results.step("starting the servers")
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(started("load"))
        load.read(str, timeout_s=_START_S)
        places = stack.enter_context(_places(settings))
        bench = _OverheadRun(settings, load, places, results)
        for way in WAYS[1:]:
            bench.check_record(way)
        results.step("warming up")
        for way in WAYS:
            bench.drive(way, settings.sessions, min(1.0, settings.seconds))
        pids = (os.getpid(), load.pid, *(place.pid for place in places.values() if place.pid))
        for index in range(settings.rounds):
            first = index % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):  # nobody always comes first
                results.step(f"round {index + 1}, {way}")
                with results.watching_others(lambda: cpu_s_of(pids)):
                    bench.round(way)
            bench.compare_round()
            results.on_round()
        results.step("memory")
        bench.watch_memory(places["served"].pid)
        results.on_round()


@contextlib.contextmanager
def _places(settings: OverheadSettings) -> Iterator[dict[Way, _Place]]:
    """Two upstreams, and in front of each a server with a journal and one without."""
    with contextlib.ExitStack() as stack:
        places: dict[Way, _Place] = {}
        servers: dict[Way, ServerProcess] = {}
        scripts = {"small": Script(settings.tokens), "large": Script(settings.tokens, settings.large_kib * 1024)}
        ways: dict[str, tuple[Way, Way]] = {"small": ("served", "journaled"), "large": ("large", "large_journaled")}
        for size, script in scripts.items():
            upstream = stack.enter_context(started("canned_upstream", msgspec.json.encode(script).decode()))
            address = upstream.read(str, timeout_s=_START_S)
            if size == "small":
                places["straight"] = _Place(address, script, upstream.pid)
            flags = [settings.model, "--backend", "sglang", "--upstream", f"http://{address}"]
            flags += ["--routing-replay", "full"]
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-overhead-"))
            for way, more in zip(ways[size], ([], ["--data-dir", folder]), strict=True):
                servers[way] = server = ServerProcess(*flags, *more)
                stack.callback(server.stop)
        for way, server in servers.items():
            served, _ = server.wait_until_served()
            places[way] = _Place(
                served.http.partition("://")[2], scripts["large" if "large" in way else "small"], served.pid
            )
        yield places


class _OverheadRun:
    def __init__(self, settings: OverheadSettings, load: Child, places: dict[Way, _Place], results: Results) -> None:
        self._settings = settings
        self._load = load
        self._places = places
        self._results = results

    def check_record(self, way: Way) -> None:
        place = self._places[way]
        if problem := check_record(place.address, place.script):
            self._results.report.notes.append(f"{way}: {problem}")
        self._results.extend("records_wrong", "", [float(bool(problem))])

    def round(self, way: Way) -> None:
        is_small = way in SMALL
        before_s = cpu_s_of([self._places[way].pid])
        together = self.drive(
            way, self._settings.sessions, self._settings.seconds if is_small else self._settings.large_s
        )
        used_s = cpu_s_of([self._places[way].pid]) - before_s
        alone = self.drive(way, 1, self._settings.alone_s)
        record = self._results
        if not (together.chat_ms and alone.chat_ms):
            raise ProcessFailed(f"{way}: no turn was answered within {self._settings.alone_s:g} s")
        record.extend(f"{way}/turn_ms", "ms", together.chat_ms)
        record.extend(f"{way}/alone_ms", "ms", alone.chat_ms)
        record.figure(f"{way}/turns_per_s", "1/s", len(together.chat_ms) / together.wall_s, "higher")
        record.figure(f"{way}/cpu_server", "ms a turn", used_s * 1000 / together.num_chats, "lower")
        record.figure(f"{way}/cpu_load", "ms a turn", together.cpu_s * 1000 / together.num_chats)
        for rank in (50, 95):
            record.figure(f"{way}/turn_p{rank}", "ms", percentile(together.chat_ms, rank), "lower")
        record.figure(f"{way}/alone_p50", "ms", median(alone.chat_ms), "lower")

    def compare_round(self) -> None:
        """What the server adds, within the round that was just measured."""

        def last(name: str) -> float:
            return self._results.report.values(name)[-1]

        for name in ("turn_p50", "alone_p50"):
            added = last(f"served/{name}") - last(f"straight/{name}")
            self._results.figure(f"added/{name}", "ms", added, "lower")
        for with_journal, without in (("journaled", "served"), ("large_journaled", "large")):
            names = f"{with_journal}/turns_per_s", f"{without}/turns_per_s"
            self._results.ratio(f"{with_journal}:{without}/turns_per_s", *names, "higher")
            names = f"{with_journal}/cpu_server", f"{without}/cpu_server"
            self._results.ratio(f"{with_journal}:{without}/cpu_server", *names, "lower")
            added = last(f"{with_journal}/alone_p50") - last(f"{without}/alone_p50")
            self._results.figure(f"added_by_journal/{without}_alone_p50", "ms", added, "lower")

    def watch_memory(self, pid: int) -> None:
        """Open sessions and keep them: how much more does the process hold with each?"""
        batch = self._settings.kept_sessions // _CHECKPOINTS
        resident = [resident_bytes(pid)]
        for _ in range(_CHECKPOINTS):
            self._results.step(f"memory, {len(resident) * batch} sessions")
            self.drive("served", batch, 0.0, is_kept=True)
            resident.append(resident_bytes(pid))
        self._results.extend("rss", "MiB", [value / _MIB for value in resident])
        half = len(resident) // 2  # the first sessions fill what the allocator held already
        for before, after in zip(resident[half:], resident[half + 1 :], strict=False):
            self._results.figure("memory_per_session", "KiB", (after - before) / batch / 1024, "lower")

    def drive(self, way: Way, num_sessions: int, duration_s: float, *, is_kept: bool = False) -> LoadResult:
        order = LoadPlan(
            address=self._places[way].address,
            script=self._places[way].script,
            num_sessions=num_sessions,
            num_turns=self._settings.turns,
            duration_s=duration_s,
            ramp_s=self._settings.ramp_s if duration_s else 0.0,
            is_straight=way == "straight",
            is_kept=is_kept,
        )
        outcome = self._load.ask(order, LoadResult, timeout_s=duration_s + _START_S)
        self._results.extend("answered", "", [float(outcome.num_chats)])
        self._results.extend("wrong", "", [float(outcome.num_wrong)])
        if outcome.wrong:
            self._results.report.notes.append(f"{way}: {outcome.wrong}")
        return outcome


def judge(report: Report) -> list[Gate]:
    return [
        all_right("replies", int(sum(report.values("answered"))), int(sum(report.values("wrong")))),
        all_right("records", len(report.values("records_wrong")), int(sum(report.values("records_wrong")))),
        median_at_least(
            "journaling_costs_less_than_5_percent",
            report.values("journaled:served/turns_per_s"),
            JOURNALED_SHARE,
            "times the turns without it",
        ),
        median_at_least("memory_was_seen_to_grow", report.values("memory_per_session"), 0.1, "KiB a session"),
    ]


def charts(settings: OverheadSettings) -> list[Chart]:
    turns = tuple(f"{way}/turn_ms" for way in SMALL)
    alone = tuple(f"{way}/alone_ms" for way in SMALL)
    step = settings.kept_sessions // _CHECKPOINTS
    return [
        Chart(f"a turn, {settings.sessions} sessions at once", "distribution", turns, "ms", is_log=True),
        Chart("a turn, one session alone", "distribution", alone, "ms", is_log=True),
        Chart("turns a second by round", "course", tuple(f"{way}/turns_per_s" for way in WAYS), "1/s", is_log=True),
        Chart(
            "turns a second with a journal to those without",
            "course",
            ("journaled:served/turns_per_s", "large_journaled:large/turns_per_s"),
            "times",
        ),
        Chart(f"memory of the server, {step} sessions more each", "course", ("rss",), "MiB"),
    ]


SCENARIO = Scenario(
    name="overhead",
    about="turns/s, added latency and memory per session, beside the straight way; with a journal and without",
    settings=OverheadSettings,
    quick={"rounds": 3, "seconds": 1.2, "ramp_s": 0.2, "alone_s": 0.5, "large_s": 0.8, "kept_sessions": 500},
    num_rounds=lambda settings: settings.rounds + 1,
    measure=measure,
    judge=judge,
    charts=charts,
)
