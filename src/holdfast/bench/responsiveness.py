"""Does /health answer while large replies come in? Inline, lane and threads take turns on one machine in one run."""

import contextlib
import os
from dataclasses import dataclass, field

import msgspec

from holdfast.bench.canned_upstream import Script
from holdfast.bench.gates import Gate, all_right, control, median_at_least, median_at_most, percentile_at_most
from holdfast.bench.load import LoadPlan, LoadResult
from holdfast.bench.page import Chart
from holdfast.bench.processes import Child, cpu_s_of, started
from holdfast.bench.record_check import check_record
from holdfast.bench.relay_server import MODES, Mode, RelaySetup, ServerUsage
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.bench.stage_clock import STAGES
from holdfast.bench.summary import median, percentile
from holdfast.config import DEFAULT_MODEL, option

HEALTH_P95_MS = 25.0
CHATS_PER_S = 85.0

_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsivenessSettings:
    sessions: int = option(64, "chat sessions at once", least=1)
    turns: int = option(4, "turns of a session, before it is closed and another one opened", least=1)
    payload_kib: int = option(1331, "routed experts in each upstream reply, as base64", least=1)
    tokens: int = option(64, "sampled tokens in each reply", least=1)
    rounds: int = option(5, "how often each way of decoding has its turn", least=1)
    seconds: float = option(8.0, "how long it lasts", least=0)
    ramp_s: float = option(1.0, "before that, under load but not counted", least=0)
    warmup_s: float = option(2.0, "load on each server before anything is measured", least=0)
    health_interval_ms: float = option(10.0, "between two polls of /health", least=1)
    model: str = option(DEFAULT_MODEL, "gives tokenizer and chat template")


def measure(settings: ResponsivenessSettings, results: Results) -> None:
    script = Script(settings.tokens, settings.payload_kib * 1024)
    results.step("starting the servers")
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(started("canned_upstream", _json(script)))
        load = stack.enter_context(started("load"))
        url = "http://" + upstream.read(str, timeout_s=_START_S)
        load.read(str, timeout_s=_START_S)
        servers = {
            mode: stack.enter_context(started("relay_server", _json(RelaySetup(url, mode, settings.model))))
            for mode in MODES
        }
        bench = _ResponsivenessRun(
            settings=settings, script=script, upstream=upstream, load=load, servers=servers, results=results
        )
        for mode in MODES:
            bench.prepare(mode)
        pids = [os.getpid(), *(child.pid for child in (upstream, load, *servers.values()))]
        for index in range(settings.rounds):
            first = index % len(MODES)
            for mode in (*MODES[first:], *MODES[:first]):  # nobody always comes first
                results.step(f"round {index + 1}, {mode}")
                with results.watching_others(lambda: cpu_s_of(pids)):
                    bench.round(mode)
            for other in ("inline", "threads"):
                results.ratio(f"lane:{other}/health_p95", "lane/health_p95", f"{other}/health_p95", "lower")
                results.ratio(f"lane:{other}/chats_per_s", "lane/chats_per_s", f"{other}/chats_per_s", "higher")
            results.on_round()


@dataclass(slots=True, kw_only=True)
class _ResponsivenessRun:
    settings: ResponsivenessSettings
    script: Script
    upstream: Child
    load: Child
    servers: dict[Mode, Child]
    results: Results
    addresses: dict[Mode, str] = field(default_factory=dict)

    def prepare(self, mode: Mode) -> None:
        self.addresses[mode] = self.servers[mode].read(str, timeout_s=_START_S)
        self.results.step(f"warming up, {mode}")
        if problem := check_record(self.addresses[mode], self.script):
            self.results.report.notes.append(f"{mode}: {problem}")
        self.results.extend(f"{mode}/records_wrong", "", [float(bool(problem))])
        if self.settings.warmup_s:
            self._drive(mode, self.settings.warmup_s)

    def round(self, mode: Mode) -> None:
        served, canned_before = self._usage(mode), self.upstream.ask({}, float, timeout_s=_START_S)
        outcome = self._drive(mode, self.settings.seconds)
        after, canned_after = self._usage(mode), self.upstream.ask({}, float, timeout_s=_START_S)
        self.results.extend(f"{mode}/health_ms", "ms", outcome.health_ms)
        self.results.extend(f"{mode}/chat_ms", "ms", outcome.chat_ms)
        self.results.extend(f"{mode}/answered", "", [float(outcome.num_chats)])
        self.results.extend(f"{mode}/wrong", "", [float(outcome.num_wrong)])
        if outcome.wrong:
            self.results.report.notes.append(f"{mode}: {outcome.wrong}")
        if not (outcome.health_ms and outcome.chat_ms):
            self.results.report.notes.append(f"{mode}: nothing was answered in a round of {outcome.wall_s:g} s")
            return
        figure = self.results.figure
        for rank in (50, 95, 99):
            figure(f"{mode}/health_p{rank}", "ms", percentile(outcome.health_ms, rank), "lower")
        figure(f"{mode}/chats_per_s", "1/s", len(outcome.chat_ms) / outcome.wall_s, "higher")
        figure(f"{mode}/chat_p50", "ms", median(outcome.chat_ms), "lower")
        per_chat = 1000 / outcome.num_chats
        figure(f"{mode}/cpu_server", "ms a chat", (after.cpu_s - served.cpu_s) * per_chat, "lower")
        for stage, seconds in _stages(served, after).items():
            figure(f"{mode}/cpu_{stage}", "ms a chat", seconds * per_chat, "lower")
        figure(f"{mode}/cpu_canned", "ms a chat", (canned_after - canned_before) * per_chat)
        figure(f"{mode}/cpu_load", "ms a chat", outcome.cpu_s * per_chat)
        figure(f"{mode}/load_late_p95", "ms", percentile(outcome.late_ms, 95))
        figure(f"{mode}/rss", "MiB", after.rss_bytes / (1 << 20), "lower")

    def _drive(self, mode: Mode, duration_s: float) -> LoadResult:
        order = LoadPlan(
            address=self.addresses[mode],
            script=self.script,
            num_sessions=self.settings.sessions,
            num_turns=self.settings.turns,
            duration_s=duration_s,
            ramp_s=self.settings.ramp_s,
            health_interval_s=self.settings.health_interval_ms / 1000,
        )
        return self.load.ask(order, LoadResult, timeout_s=duration_s + _START_S)

    def _usage(self, mode: Mode) -> ServerUsage:
        return self.servers[mode].ask({}, ServerUsage, timeout_s=_START_S)


def _stages(before: ServerUsage, after: ServerUsage) -> dict[str, float]:
    """CPU seconds by stage: the main thread's by what it was seen doing, those of the pool are decoding."""
    threads_s = after.threads_cpu_s - before.threads_cpu_s
    main_s = after.cpu_s - before.cpu_s - threads_s
    looks = {stage: after.looks.get(stage, 0) - before.looks.get(stage, 0) for stage in STAGES}
    if not looks["other"]:
        del looks["other"]
    total = sum(looks.values()) or 1
    return {stage: main_s * num / total + threads_s * (stage == "decode") for stage, num in looks.items()}


def judge(report: Report) -> list[Gate]:
    def health(mode: Mode) -> Gate:
        return percentile_at_most("health_p95", report.values(f"{mode}/health_ms"), 95, HEALTH_P95_MS, "ms")

    answered, wrong = (
        int(sum(sum(report.values(f"{mode}/{name}")) for mode in MODES)) for name in ("answered", "wrong")
    )
    checked = [value for mode in MODES for value in report.values(f"{mode}/records_wrong")]
    return [
        health("lane"),
        median_at_least("chats_per_s", report.values("lane/chats_per_s"), CHATS_PER_S, "chats/s"),
        median_at_most("lane_beats_inline", report.values("lane:inline/health_p95"), 1.0, "times inline's p95"),
        control("control_inline", health("inline"), len(report.values("inline/health_ms"))),
        all_right("replies", answered, wrong),
        all_right("records", len(checked), int(sum(checked))),
    ]


def charts(settings: ResponsivenessSettings) -> list[Chart]:
    return [
        Chart("/health", "distribution", tuple(f"{mode}/health_ms" for mode in MODES), "ms", is_log=True),
        Chart("p95 of /health by round", "course", tuple(f"{mode}/health_p95" for mode in MODES), "ms"),
        Chart("chats a second by round", "course", tuple(f"{mode}/chats_per_s" for mode in MODES), "1/s"),
        Chart(
            "CPU time of the server",
            "bars",
            tuple(f"{mode}/cpu_{stage}" for mode in MODES for stage in STAGES),
            "ms a chat",
        ),
    ]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


SCENARIO = Scenario(
    name="responsiveness",
    about="p95 of /health and chats/s while 64 sessions get 1.3 MiB replies; inline, lane and threads side by side",
    settings=ResponsivenessSettings,
    quick={"rounds": 4, "seconds": 1.2, "ramp_s": 0.3, "warmup_s": 0.5},
    num_rounds=lambda settings: settings.rounds,
    measure=measure,
    judge=judge,
    charts=charts,
)
