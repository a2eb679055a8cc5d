"""What a session server costs: chats through it and straight to a canned upstream, in turns; and its memory."""

import contextlib
import os
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from holdfast.bench.canned import Script
from holdfast.bench.checking import check_record
from holdfast.bench.gates import Gate, all_right, median_at_least
from holdfast.bench.load import Order, Outcome
from holdfast.bench.measure import median, percentile
from holdfast.bench.page import Chart
from holdfast.bench.processes import Child, ProcessFailed, cpu_s_of, resident_bytes, serving, started
from holdfast.bench.recording import Recording
from holdfast.bench.report import Report
from holdfast.bench.runner import Scenario
from holdfast.config import DEFAULT_MODEL, option

Way = Literal["straight", "served"]
WAYS: tuple[Way, ...] = get_args(Way)

_START_S = 120.0
_CHECKPOINTS = 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    sessions: int = option(32, "chat sessions at once", least=1)
    turns: int = option(4, "turns of a session", least=1)
    tokens: int = option(64, "sampled tokens in each reply; each question has 64", least=1)
    rounds: int = option(10, "how often each way has its turn", least=1)
    seconds: float = option(3.0, "how long it lasts", least=0)
    ramp_s: float = option(0.5, "before that, under load but not counted", least=0)
    alone_s: float = option(1.0, "and how long with one session at a time", least=0)
    kept_sessions: int = option(2000, "sessions that stay open while memory is watched", least=_CHECKPOINTS)
    model: str = option(DEFAULT_MODEL, "gives tokenizer and chat template")


def measure(settings: Settings, recording: Recording) -> None:
    script = Script(settings.tokens)
    recording.step("starting the server")
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(started("canned", msgspec.json.encode(script).decode()))
        load = stack.enter_context(started("load"))
        canned_at = upstream.read(str, timeout_s=_START_S)
        load.read(str, timeout_s=_START_S)
        flags = (settings.model, "--backend", "sglang", "--upstream", f"http://{canned_at}")
        served_at, pid = stack.enter_context(serving(*flags))
        if problem := check_record(served_at, script):
            recording.report.notes.append(problem)
        recording.extend("records_wrong", "", [float(bool(problem))])
        bench = _Bench(settings, script, load, {"straight": canned_at, "served": served_at}, recording)
        recording.step("warming up")
        for way in WAYS:
            bench.drive(way, settings.sessions, min(1.0, settings.seconds))
        pids = (os.getpid(), upstream.pid, load.pid, pid)
        for index in range(settings.rounds):
            for way in WAYS if index % 2 else reversed(WAYS):
                recording.step(f"round {index + 1}, {way}")
                with recording.watching_others(lambda: cpu_s_of(pids)):
                    bench.round(way)
            bench.compare_round()
            recording.on_round()
        recording.step("memory")
        bench.watch_memory(pid)
        recording.on_round()


class _Bench:
    def __init__(
        self, settings: Settings, script: Script, load: Child, addresses: dict[Way, str], recording: Recording
    ) -> None:
        self._settings = settings
        self._script = script
        self._load = load
        self._addresses = addresses
        self._recording = recording

    def round(self, way: Way) -> None:
        together = self.drive(way, self._settings.sessions, self._settings.seconds)
        alone = self.drive(way, 1, self._settings.alone_s)
        record = self._recording
        if not (together.chat_ms and alone.chat_ms):
            raise ProcessFailed(f"{way}: no turn was answered within {self._settings.alone_s:g} s")
        record.extend(f"{way}/turn_ms", "ms", together.chat_ms)
        record.extend(f"{way}/alone_ms", "ms", alone.chat_ms)
        record.figure(f"{way}/turns_per_s", "1/s", len(together.chat_ms) / together.wall_s, "higher")
        record.figure(f"{way}/cpu_load", "ms a turn", together.cpu_s * 1000 / together.num_chats)
        for rank in (50, 95):
            record.figure(f"{way}/turn_p{rank}", "ms", percentile(together.chat_ms, rank), "lower")
        record.figure(f"{way}/alone_p50", "ms", median(alone.chat_ms), "lower")

    def compare_round(self) -> None:
        """What the server adds, within the round that was just measured."""

        def last(name: str) -> float:
            return self._recording.report.values(name)[-1]

        for name in ("turn_p50", "alone_p50"):
            added = last(f"served/{name}") - last(f"straight/{name}")
            self._recording.figure(f"added/{name}", "ms", added, "lower")

    def watch_memory(self, pid: int) -> None:
        """Open sessions and keep them: how much more does the process hold with each?"""
        batch = self._settings.kept_sessions // _CHECKPOINTS
        resident = [resident_bytes(pid)]
        for _ in range(_CHECKPOINTS):
            self._recording.step(f"memory, {len(resident) * batch} sessions")
            self.drive("served", batch, 0.0, is_kept=True)
            resident.append(resident_bytes(pid))
        self._recording.extend("rss", "MiB", [value / _MIB for value in resident])
        half = len(resident) // 2  # the first sessions fill what the allocator held already
        for before, after in zip(resident[half:], resident[half + 1 :], strict=False):
            self._recording.figure("memory_per_session", "KiB", (after - before) / batch / 1024, "lower")

    def drive(self, way: Way, num_sessions: int, duration_s: float, *, is_kept: bool = False) -> Outcome:
        order = Order(
            address=self._addresses[way],
            script=self._script,
            num_sessions=num_sessions,
            num_turns=self._settings.turns,
            duration_s=duration_s,
            ramp_s=self._settings.ramp_s if duration_s else 0.0,
            is_straight=way == "straight",
            is_kept=is_kept,
        )
        outcome = self._load.ask(order, Outcome, timeout_s=duration_s + _START_S)
        self._recording.extend("answered", "", [float(outcome.num_chats)])
        self._recording.extend("wrong", "", [float(outcome.num_wrong)])
        if outcome.wrong:
            self._recording.report.notes.append(f"{way}: {outcome.wrong}")
        return outcome


def judge(report: Report) -> list[Gate]:
    return [
        all_right("replies", int(sum(report.values("answered"))), int(sum(report.values("wrong")))),
        all_right("records", len(report.values("records_wrong")), int(sum(report.values("records_wrong")))),
        median_at_least("memory_was_seen_to_grow", report.values("memory_per_session"), 0.1, "KiB a session"),
    ]


def charts(settings: Settings) -> list[Chart]:
    turns = tuple(f"{way}/turn_ms" for way in WAYS)
    alone = tuple(f"{way}/alone_ms" for way in WAYS)
    step = settings.kept_sessions // _CHECKPOINTS
    return [
        Chart(f"a turn, {settings.sessions} sessions at once", "distribution", turns, "ms", is_log=True),
        Chart("a turn, one session alone", "distribution", alone, "ms", is_log=True),
        Chart("turns a second by round", "course", tuple(f"{way}/turns_per_s" for way in WAYS), "1/s", is_log=True),
        Chart(f"memory of the server, {step} sessions more each", "course", ("rss",), "MiB"),
    ]


SCENARIO = Scenario(
    name="overhead",
    about="turns/s, added latency and memory per session, beside the same chats straight to the upstream",
    settings=Settings,
    quick={"rounds": 4, "seconds": 1.5, "ramp_s": 0.2, "alone_s": 0.5, "kept_sessions": 500},
    num_rounds=lambda settings: settings.rounds + 1,
    measure=measure,
    judge=judge,
    charts=charts,
)
