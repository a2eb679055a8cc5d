"""What the server costs compared with chats sent straight to a canned upstream; and what the journal costs.

Every way of chatting is measured in turn in one run, with small replies and with large ones; then memory per session.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.bench.gates import Gate, all_right, median, median_at_least, percentile
from holdfast.bench.load import LoadClient, LoadPlan, LoadResult
from holdfast.bench.machine import MIB, cpu_s_of, resident_bytes
from holdfast.bench.processes import ProcessFailed, ServerProcess, started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.upstreams import Script
from holdfast.config import DEFAULT_MODEL, option

Way = Literal["straight", "served", "journaled", "large", "large_journaled"]
WAYS: tuple[Way, ...] = get_args(Way)
SMALL: tuple[Way, ...] = ("straight", "served", "journaled")

JOURNALED_SHARE = 0.95  # of the turns per second without a journal
LARGE_JOURNALED_SHARE = 0.85  # with large replies

_CHECKPOINTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSettings:
    sessions: int = option(32, "concurrent chat sessions", least=1)
    turns: int = option(4, "turns of a session", least=1)
    tokens: int = option(64, "sampled tokens in each reply; each question has 64", least=1)
    rounds: int = option(10, "rounds, in each of which every way of chatting is measured once", least=1)
    seconds: float = option(3.0, "duration of one measurement", least=0)
    ramp_s: float = option(0.5, "time under load before a measurement", least=0)
    alone_s: float = option(1.0, "duration of a measurement with a single session", least=0)
    large_kib: int = option(1331, "size of the routed experts in each large reply, as base64", least=1)
    large_s: float = option(1.5, "duration of a measurement with large replies", least=0)
    kept_sessions: int = option(2000, "sessions kept open to measure memory", least=_CHECKPOINTS)
    model: str = option(DEFAULT_MODEL, "model that provides the tokenizer and the chat template")


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the chats of one way go, and the reply that is expected from there."""

    address: str
    script: Script
    pid: int


def measure(settings: OverheadSettings, results: Results) -> None:
    results.step("starting the servers")
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(started("load"))
        load.read(str)
        targets, pids = stack.enter_context(_targets(settings))
        run = _OverheadRun(settings, LoadClient(load, results), targets)
        for way in WAYS[1:]:
            run.load.check_record(targets[way].address, targets[way].script, way)
        results.step("warming up")
        for way in WAYS:
            run.chat(way, settings.sessions, min(1.0, settings.seconds))
        for _ in results.rounds(WAYS, settings.rounds, [os.getpid(), load.pid, *pids], run.round):
            run.compare_round()
        results.step("memory")
        run.measure_memory(targets["served"].pid)
        results.on_round()


@contextlib.contextmanager
def _targets(settings: OverheadSettings) -> Iterator[tuple[dict[Way, _Target], list[int]]]:
    """Two upstreams, and in front of each a server with a journal and one without; also the ids of all processes."""
    small, large = Script(settings.tokens), Script(settings.tokens, settings.large_kib * 1024)
    served: tuple[tuple[Script, Way, Way], ...] = ((small, "served", "journaled"), (large, "large", "large_journaled"))
    targets: dict[Way, _Target] = {}
    pids: list[int] = []
    servers: list[tuple[Way, Script, ServerProcess]] = []
    with contextlib.ExitStack() as stack:
        for script, plain, journaled in served:
            upstream = stack.enter_context(started("upstreams", "canned", script))
            url = upstream.read(str)
            pids.append(upstream.pid)
            if script is small:
                targets["straight"] = _Target(url.removeprefix("http://"), script, upstream.pid)
            flags = [settings.model, "--backend", "sglang", "--upstream", url]
            flags += ["--routing-replay", "additional"] if script is large else []
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-overhead-"))
            for way, more in ((plain, []), (journaled, ["--data-dir", folder])):
                server = ServerProcess(*flags, *more)
                stack.callback(server.stop)
                servers.append((way, script, server))
                pids.append(server.pid)
        for way, script, server in servers:  # all of them start at the same time
            running, _ = server.wait_until_served()
            targets[way] = _Target(running.http.removeprefix("http://"), script, running.pid)
        yield targets, pids


@dataclass(frozen=True, slots=True)
class _OverheadRun:
    settings: OverheadSettings
    load: LoadClient
    targets: dict[Way, _Target]

    def round(self, way: Way) -> None:
        settings, results = self.settings, self.load.results
        before_s = cpu_s_of([self.targets[way].pid])
        together = self.chat(way, settings.sessions, settings.seconds if way in SMALL else settings.large_s)
        used_s = cpu_s_of([self.targets[way].pid]) - before_s
        alone = self.chat(way, 1, settings.alone_s)
        if not (together.chat_ms and alone.chat_ms):
            raise ProcessFailed(f"{way}: no turn was answered within {settings.alone_s:g} s")
        results.extend(f"{way}/turn_ms", "ms", together.chat_ms)
        results.extend(f"{way}/alone_ms", "ms", alone.chat_ms)
        results.figure(f"{way}/turns_per_s", "1/s", len(together.chat_ms) / together.wall_s, "higher")
        results.figure(f"{way}/cpu_server", "ms a turn", used_s * 1000 / together.num_chats, "lower")
        results.figure(f"{way}/cpu_load", "ms a turn", together.cpu_s * 1000 / together.num_chats)
        for rank in (50, 95):
            results.figure(f"{way}/turn_p{rank}", "ms", percentile(together.chat_ms, rank), "lower")
        results.figure(f"{way}/alone_p50", "ms", median(alone.chat_ms), "lower")

    def compare_round(self) -> None:
        """What the server and the journal add, within the round that was just measured."""
        results = self.load.results

        def last(name: str) -> float:
            return results.report.values(name)[-1]

        for name in ("turn_p50", "alone_p50"):
            results.figure(f"added/{name}", "ms", last(f"served/{name}") - last(f"straight/{name}"), "lower")
        for journaled, plain in (("journaled", "served"), ("large_journaled", "large")):
            pair = f"{journaled}:{plain}"
            results.ratio(f"{pair}/turns_per_s", f"{journaled}/turns_per_s", f"{plain}/turns_per_s", "higher")
            results.ratio(f"{pair}/cpu_server", f"{journaled}/cpu_server", f"{plain}/cpu_server", "lower")
            added = last(f"{journaled}/alone_p50") - last(f"{plain}/alone_p50")
            results.figure(f"added_by_journal/{plain}_alone_p50", "ms", added, "lower")

    def measure_memory(self, pid: int) -> None:
        """Open sessions and keep them: by how much does the process grow with each?"""
        results = self.load.results
        batch = self.settings.kept_sessions // _CHECKPOINTS
        resident = [resident_bytes(pid)]
        for _ in range(_CHECKPOINTS):
            results.step(f"memory, {len(resident) * batch} sessions")
            self.chat("served", batch, 0.0, is_kept=True)
            resident.append(resident_bytes(pid))
        results.extend("rss", "MiB", [value / MIB for value in resident])
        half = len(resident) // 2  # the first sessions fill memory that the allocator already held
        for before, after in zip(resident[half:], resident[half + 1 :], strict=False):
            results.figure("memory_per_session", "KiB", (after - before) / batch / 1024, "lower")

    def chat(self, way: Way, num_sessions: int, duration_s: float, *, is_kept: bool = False) -> LoadResult:
        plan = LoadPlan(
            address=self.targets[way].address,
            script=self.targets[way].script,
            num_sessions=num_sessions,
            num_turns=self.settings.turns,
            duration_s=duration_s,
            ramp_s=self.settings.ramp_s if duration_s else 0.0,
            is_straight=way == "straight",
            is_kept=is_kept,
        )
        result = self.load.run(plan)
        self.load.count(result, way)
        return result


def judge(report: Report) -> list[Gate]:
    journaled = report.values("journaled:served/turns_per_s")
    large = report.values("large_journaled:large/turns_per_s")
    without = "times the turns without a journal"
    return [
        all_right("replies", report.total("answered"), report.total("wrong")),
        all_right("records", len(report.values("records_wrong")), report.total("records_wrong")),
        median_at_least("journaling_costs_less_than_5_percent", journaled, JOURNALED_SHARE, without),
        median_at_least("journaling_large_replies", large, LARGE_JOURNALED_SHARE, without),
        median_at_least("memory_was_seen_to_grow", report.values("memory_per_session"), 0.1, "KiB a session"),
    ]


def charts(settings: OverheadSettings) -> list[Chart]:
    turns = tuple(f"{way}/turn_ms" for way in SMALL)
    alone = tuple(f"{way}/alone_ms" for way in SMALL)
    ratios = ("journaled:served/turns_per_s", "large_journaled:large/turns_per_s")
    step = settings.kept_sessions // _CHECKPOINTS
    return [
        Chart(f"a turn, {settings.sessions} sessions at once", "distribution", turns, "ms", is_log=True),
        Chart("a turn, one session alone", "distribution", alone, "ms", is_log=True),
        Chart("turns per second by round", "course", tuple(f"{way}/turns_per_s" for way in WAYS), "1/s", is_log=True),
        Chart("turns per second, with a journal to without", "course", ratios, "times"),
        Chart(f"memory of the server after each {step} sessions", "course", ("rss",), "MiB"),
    ]


SCENARIO = Scenario(
    name="overhead",
    about="turns/s, added latency and memory per session, compared with the upstream alone; with and without a journal",
    settings=OverheadSettings,
    quick={"rounds": 3, "seconds": 1.2, "ramp_s": 0.2, "alone_s": 0.5, "large_s": 0.8, "kept_sessions": 500},
    quick_s=55,
    num_rounds=lambda settings: settings.rounds + 1,
    measure=measure,
    judge=judge,
    charts=charts,
)
