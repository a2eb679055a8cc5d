"""How fast /health answers while large replies come in, with replies decoded inline, in the lane or in threads.

The lane is what the server itself does: one large reply per pass of the event loop. All three take turns in one run.
"""

import contextlib
import os
from dataclasses import dataclass, field

from holdfast.bench.gates import (
    Gate,
    all_right,
    control,
    median,
    median_at_least,
    median_at_most,
    percentile,
    percentile_at_most,
)
from holdfast.bench.load import LoadClient, LoadPlan, LoadResult
from holdfast.bench.machine import MIB
from holdfast.bench.processes import Child, started
from holdfast.bench.relay_server import MODES, STAGES, Mode, ServerUsage
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.upstreams import Script
from holdfast.config import DEFAULT_MODEL, option

HEALTH_P95_MS = 25.0
CHATS_PER_S = 85.0
_USAGE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsivenessSettings:
    sessions: int = option(64, "concurrent chat sessions", least=1)
    turns: int = option(4, "turns of a session before it is closed and another one is opened", least=1)
    payload_kib: int = option(1331, "size of the routed experts in each upstream reply, as base64", least=1)
    tokens: int = option(64, "sampled tokens in each reply", least=1)
    rounds: int = option(5, "rounds, in each of which every mode is measured once", least=1)
    seconds: float = option(8.0, "duration of one measurement", least=0)
    ramp_s: float = option(1.0, "time under load before a measurement", least=0)
    warmup_s: float = option(2.0, "load on each server before the first round", least=0)
    health_interval_ms: float = option(10.0, "time between two polls of /health", least=1)
    model: str = option(DEFAULT_MODEL, "model that provides the tokenizer and the chat template")


def measure(settings: ResponsivenessSettings, results: Results) -> None:
    script = Script(settings.tokens, settings.payload_kib * 1024)
    results.step("starting the servers")
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(started("upstreams", "canned", script))
        load = stack.enter_context(started("load"))
        url = upstream.read(str)
        load.read(str)
        servers = {mode: stack.enter_context(started("relay_server", url, mode, settings.model)) for mode in MODES}
        run = _ResponsivenessRun(
            settings=settings, script=script, upstream=upstream, load=LoadClient(load, results), servers=servers
        )
        for mode in MODES:
            run.prepare(mode)
        pids = [os.getpid(), *(child.pid for child in (upstream, load, *servers.values()))]
        for _ in results.rounds(MODES, settings.rounds, pids, run.round):
            for other in ("inline", "threads"):
                results.ratio(f"lane:{other}/health_p95", "lane/health_p95", f"{other}/health_p95", "lower")
                results.ratio(f"lane:{other}/chats_per_s", "lane/chats_per_s", f"{other}/chats_per_s", "higher")


@dataclass(slots=True, kw_only=True)
class _ResponsivenessRun:
    settings: ResponsivenessSettings
    script: Script
    upstream: Child
    load: LoadClient
    servers: dict[Mode, Child]
    addresses: dict[Mode, str] = field(default_factory=dict)

    def prepare(self, mode: Mode) -> None:
        self.addresses[mode] = self.servers[mode].read(str)
        self.load.results.step(f"warming up, {mode}")
        self.load.check_record(self.addresses[mode], self.script, mode, f"{mode}/")
        if self.settings.warmup_s:
            self._run(mode, self.settings.warmup_s)

    def round(self, mode: Mode) -> None:
        before, canned_before_s = self._usage(mode), self._canned_cpu_s()
        result = self._run(mode, self.settings.seconds)
        after, canned_after_s = self._usage(mode), self._canned_cpu_s()
        results = self.load.results
        results.extend(f"{mode}/health_ms", "ms", result.health_ms)
        results.extend(f"{mode}/chat_ms", "ms", result.chat_ms)
        self.load.count(result, mode, f"{mode}/")
        if not (result.health_ms and result.chat_ms):
            results.note(f"{mode}: no chat or no poll was answered in a round of {result.wall_s:g} s")
            return
        figure = results.figure
        for rank in (50, 95, 99):
            figure(f"{mode}/health_p{rank}", "ms", percentile(result.health_ms, rank), "lower")
        figure(f"{mode}/chats_per_s", "1/s", len(result.chat_ms) / result.wall_s, "higher")
        figure(f"{mode}/chat_p50", "ms", median(result.chat_ms), "lower")
        per_chat = 1000 / result.num_chats
        figure(f"{mode}/cpu_server", "ms a chat", (after.cpu_s - before.cpu_s) * per_chat, "lower")
        for stage, seconds in _cpu_s_by_stage(before, after).items():
            figure(f"{mode}/cpu_{stage}", "ms a chat", seconds * per_chat, "lower")
        figure(f"{mode}/cpu_canned", "ms a chat", (canned_after_s - canned_before_s) * per_chat)
        figure(f"{mode}/cpu_load", "ms a chat", result.cpu_s * per_chat)
        figure(f"{mode}/load_late_p95", "ms", percentile(result.late_ms, 95))
        figure(f"{mode}/rss", "MiB", after.rss_bytes / MIB, "lower")

    def _run(self, mode: Mode, duration_s: float) -> LoadResult:
        plan = LoadPlan(
            address=self.addresses[mode],
            script=self.script,
            num_sessions=self.settings.sessions,
            num_turns=self.settings.turns,
            duration_s=duration_s,
            ramp_s=self.settings.ramp_s,
            health_interval_s=self.settings.health_interval_ms / 1000,
        )
        return self.load.run(plan)

    def _usage(self, mode: Mode) -> ServerUsage:
        return self.servers[mode].ask({}, ServerUsage, timeout_s=_USAGE_TIMEOUT_S)

    def _canned_cpu_s(self) -> float:
        return self.upstream.ask({}, float, timeout_s=_USAGE_TIMEOUT_S)


def _cpu_s_by_stage(before: ServerUsage, after: ServerUsage) -> dict[str, float]:
    """The main thread's CPU time split by its stack samples; the CPU time of the thread pool is all decoding."""
    threads_s = after.threads_cpu_s - before.threads_cpu_s
    main_s = after.cpu_s - before.cpu_s - threads_s
    samples = {stage: after.num_samples.get(stage, 0) - before.num_samples.get(stage, 0) for stage in STAGES}
    if not samples["other"]:
        del samples["other"]
    total = sum(samples.values()) or 1
    return {stage: main_s * num / total + threads_s * (stage == "decode") for stage, num in samples.items()}


def judge(report: Report) -> list[Gate]:
    def health(mode: Mode) -> Gate:
        return percentile_at_most("health_p95", report.values(f"{mode}/health_ms"), 95, HEALTH_P95_MS, "ms")

    answered, wrong = (sum(report.total(f"{mode}/{name}") for mode in MODES) for name in ("answered", "wrong"))
    checked = [value for mode in MODES for value in report.values(f"{mode}/records_wrong")]
    return [
        health("lane"),
        median_at_least("chats_per_s", report.values("lane/chats_per_s"), CHATS_PER_S, "chats/s"),
        median_at_most("lane_beats_inline", report.values("lane:inline/health_p95"), 1.0, "times the p95 of inline"),
        control("control_inline", health("inline"), len(report.values("inline/health_ms"))),
        all_right("replies", answered, wrong),
        all_right("records", len(checked), int(sum(checked))),
    ]


def charts(settings: ResponsivenessSettings) -> list[Chart]:
    stages = tuple(f"{mode}/cpu_{stage}" for mode in MODES for stage in STAGES)
    return [
        Chart("/health", "distribution", tuple(f"{mode}/health_ms" for mode in MODES), "ms", is_log=True),
        Chart("p95 of /health by round", "course", tuple(f"{mode}/health_p95" for mode in MODES), "ms"),
        Chart("chats per second by round", "course", tuple(f"{mode}/chats_per_s" for mode in MODES), "1/s"),
        Chart("CPU time of the server", "bars", stages, "ms a chat"),
    ]


SCENARIO = Scenario(
    name="responsiveness",
    about="p95 of /health and chats/s while 64 sessions get 1.3 MiB replies; inline, lane and threads side by side",
    settings=ResponsivenessSettings,
    quick={"rounds": 4, "seconds": 1.2, "ramp_s": 0.3, "warmup_s": 0.5},
    quick_s=30,
    num_rounds=lambda settings: settings.rounds,
    measure=measure,
    judge=judge,
    charts=charts,
)
