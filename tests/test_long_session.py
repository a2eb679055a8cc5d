"""The bench of a long session: gates that a zero, a growing or a missing series fails, and one short real run."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bench import long_session
from holdfast.bench.conversation import OpenAIChat, SdkChat, TimedReply, question_of
from holdfast.bench.gates import Gate, kv_bounded, prefill_bounded
from holdfast.bench.long_session import CLIENTS, CONTROL, LongSessionSettings, commands, judge
from holdfast.bench.report import Report, Results
from holdfast.bench.turn_series import (
    TurnMeasurement,
    aggregate_run,
    bucket_width_s,
    bucketize,
    in_buckets,
    turns_of,
)
from holdfast.cli import main
from holdfast.config import EngineConfig
from holdfast.engine.factory import build_engine
from holdfast.errors import ConfigError
from holdfast.models import open_model
from tests.engine_cases import needs_native
from tests.serving import default_chat

FULL = 6_000_000.0
MEMORY = [[1.5e9] * 5, [1.51e9] * 5]
FLAT = [[200.0, 210.0, 190.0], [205.0, 195.0, 200.0]]

# The cache


def _kv(
    live: Sequence[float], memory: Sequence[Sequence[float]] = MEMORY, formula: Sequence[float] | None = None
) -> Gate:
    return kv_bounded("kv", live, [FULL] * len(live) if formula is None else formula, memory)


def test_a_cache_at_its_formula_in_flat_memory_is_bounded() -> None:
    assert _kv([FULL] * 10).passed


def test_a_cache_that_is_said_to_be_zero_is_not_bounded() -> None:
    assert not _kv([0.0] * 10).passed
    assert not _kv([0.0] * 10, formula=[0.0] * 10).passed
    assert not _kv([FULL, 0.0, FULL]).passed


def test_a_cache_that_grows_or_differs_from_its_formula_is_not_bounded() -> None:
    growing = [FULL * (1 + turn / 100) for turn in range(10)]
    assert "spread" in _kv(growing, formula=growing).reason
    assert not _kv(growing, formula=growing).passed
    assert "formula" in _kv([FULL + 1] * 10).reason
    assert not _kv([FULL + 1] * 10).passed
    assert not _kv([FULL] * 9, formula=[FULL] * 10).passed


def test_memory_may_differ_by_a_tenth_between_buckets() -> None:
    assert _kv([FULL] * 10, [[1.0e9], [1.1e9]]).passed
    assert not _kv([FULL] * 10, [[1.0e9], [1.2e9], [1.0e9]]).passed


@pytest.mark.parametrize(
    "memory", [[], [[1.5e9]], [[1.5e9], [], [1.5e9]], [[0.0], [0.0]], [[math.nan], [1.0]]], ids=str
)
def test_memory_that_was_not_measured_in_every_bucket_fails(memory: list[list[float]]) -> None:
    assert not _kv([FULL] * 10, memory).passed


def test_nothing_measured_is_not_bounded() -> None:
    assert not _kv([]).passed
    assert not prefill_bounded("prefill", [], [], FLAT).passed


# The prefill


def test_new_tokens_alone_are_bounded() -> None:
    assert prefill_bounded("prefill", [40.0, 29.0, 31.0], [40.0, 29.0, 31.0], FLAT).passed


def test_a_single_token_too_many_or_too_few_fails() -> None:
    for found in (28.0, 30.0):
        assert not prefill_bounded("prefill", [40.0, 29.0, found], [40.0, 29.0, 29.0], FLAT).passed
    assert not prefill_bounded("prefill", [40.0, 29.0], [40.0, 29.0, 29.0], FLAT).passed


def test_a_prefill_that_grows_with_the_history_fails() -> None:
    growing = [29.0 * turn for turn in range(1, 11)]
    gate = prefill_bounded("prefill", growing, [29.0] * 10, FLAT)
    assert not gate.passed
    assert "9 of 10" in gate.reason


def test_a_first_token_that_comes_later_with_time_fails() -> None:
    tokens = [29.0] * 6
    assert prefill_bounded("prefill", tokens, tokens, [[200.0], [220.0]]).passed
    assert not prefill_bounded("prefill", tokens, tokens, [[200.0], [221.0]]).passed
    assert prefill_bounded("prefill", tokens, tokens, [[200.0], [900.0], [180.0]]).passed


def test_a_missing_bucket_fails() -> None:
    tokens = [29.0] * 6
    for buckets in ([], [[200.0]], [[200.0], [], [200.0]], [[], [200.0]], [[0.0], [200.0]]):
        assert not prefill_bounded("prefill", tokens, tokens, buckets).passed


# Buckets


def test_turns_fall_into_buckets_by_time_and_empty_ones_stay() -> None:
    assert bucketize([5.0, 14.0, 15.0, 40.0, 45.0], 10.0) == [[0, 1], [2], [], [3, 4]]
    assert bucketize([3.0], 10.0) == [[0]]
    assert bucketize([3.0, 3.0], 0.0) == [[0, 1]]
    assert bucketize([], 10.0) == []


@given(st.lists(st.floats(0, 1e5), min_size=2).map(sorted), st.integers(1, 50))
def test_every_turn_is_in_one_bucket(at_s: list[float], num: int) -> None:
    buckets = bucketize(at_s, (at_s[-1] - at_s[0]) / num)
    assert [index for bucket in buckets for index in bucket] == list(range(len(at_s)))


def test_buckets_last_ten_minutes_or_a_part_of_a_short_run() -> None:
    assert bucket_width_s(14_400.0, 5000) == 600.0
    assert 590 < bucket_width_s(1_000 * 3.1, 1000) < 630
    assert bucket_width_s(100.0, 50) == 25.0
    assert bucket_width_s(20.0, 9) == 10.0


# A whole run


def _turn(number: int, **changed: float) -> TurnMeasurement:
    """The window is full from the third turn on."""
    turn = TurnMeasurement(
        at_s=number * 2.0,
        turn_ms=500.0,
        first_token_ms=200.0,
        pace_ms=100.0,
        forwarded_tokens=29.0,
        wanted_tokens=29.0,
        kv_live_bytes=FULL if number >= 3 else FULL * number / 3,
        kv_formula_bytes=FULL if number >= 3 else FULL * number / 3,
        kv_reserved_bytes=4 * FULL,
        is_full=float(number >= 3),
        memory_bytes=1.5e9,
    )
    return dataclasses.replace(turn, **changed)


def _growing(number: int) -> TurnMeasurement:
    tokens = 33.0 * (number + 1)
    times = {"turn_ms": 300 + 5 * tokens, "first_token_ms": 5 * tokens}
    return _turn(number, forwarded_tokens=tokens, kv_live_bytes=tokens * 46_080, **times)


FLAT_RUN = [_turn(number) for number in range(100)]
GROWING_RUN = [_growing(number) for number in range(0, 100, 3)]


def _report(
    sdk: Sequence[TurnMeasurement] = FLAT_RUN,
    openai: Sequence[TurnMeasurement] = FLAT_RUN,
    stateless: Sequence[TurnMeasurement] = GROWING_RUN,
) -> Report:
    results = Results("long-session", "holdfast bench long-session", {})
    for contestant, turns in (("sdk", sdk), ("openai", openai), (CONTROL, stateless)):
        for turn in turns:
            for name, value in dataclasses.asdict(turn).items():
                results.extend(f"{contestant}/{name}", "", [value])
    right = {"script/is_same": 1.0, "invariant_violations": 0.0, "doors_agree": 1.0, "turn_failed": 0.0}
    for name, value in right.items():
        results.extend(name, "", [value] * 10)
    return results.report


def _failed(report: Report) -> set[str]:
    return {gate.name for gate in judge(report) if not gate.passed}


def test_two_flat_doors_beside_a_growing_control_pass() -> None:
    report = _report()
    assert turns_of(report, "sdk") == FLAT_RUN
    assert _failed(report) == set()


def test_a_door_that_behaves_like_the_control_fails() -> None:
    assert _failed(_report(openai=GROWING_RUN)) == {"openai/kv_bounded", "openai/prefill_bounded"}


def test_a_control_that_passes_fails_the_run() -> None:
    controls = {f"control/{CONTROL}/{name}" for name in ("kv_bounded", "prefill_bounded")}
    assert _failed(_report(stateless=FLAT_RUN)) == controls
    assert _failed(_report(stateless=[])) == controls
    assert _failed(_report(stateless=GROWING_RUN[:1])) == controls


def test_a_pause_of_a_whole_bucket_fails() -> None:
    paused = [turn for turn in FLAT_RUN if not 50 <= turn.at_s <= 104]
    assert _failed(_report(sdk=paused)) == {"sdk/kv_bounded", "sdk/prefill_bounded"}


def test_a_machine_that_slows_down_is_told_from_a_session_that_does() -> None:
    busy = [_turn(n, first_token_ms=200.0 + 10 * n, pace_ms=100.0 + 5 * n) for n in range(40)]
    late = [_turn(n, first_token_ms=200.0 + 10 * n) for n in range(40)]
    assert _failed(_report(sdk=busy)) == set()
    assert _failed(_report(sdk=late)) == {"sdk/prefill_bounded"}


@pytest.mark.parametrize(
    ("series", "value", "gate"),
    [
        ("script/is_same", 0.0, "determinism"),
        ("invariant_violations", 1.0, "invariants"),
        ("doors_agree", 0.0, "doors_agree"),
        ("turn_failed", 1.0, "every_turn_answered"),
    ],
)
def test_one_token_one_violation_or_one_reply_is_enough_to_fail(series: str, value: float, gate: str) -> None:
    report = _report()
    report.series[series].values[-1] = value
    assert _failed(report) == {gate}
    del report.series[series]
    assert _failed(report) == {gate}


def test_a_run_that_measured_nothing_fails_every_gate() -> None:
    gates = judge(Report(scenario="long-session", command="", started_at=""))
    assert len(gates) == 10
    assert not any(gate.passed for gate in gates)


def test_the_drift_is_between_the_first_and_the_last_bucket_with_a_full_window() -> None:
    drifting = [_turn(number, turn_ms=9000.0 if number < 3 else 500.0 + number) for number in range(83)]
    found = aggregate_run(drifting)
    assert (found.num_turns, found.num_full, len(found.by_bucket["turn_ms_p50"])) == (83, 80, 4)
    assert found.latency_drift_p50_s == pytest.approx(0.06, abs=0.001)
    assert found.by_bucket["kv_live_bytes_p50"] == [FULL] * 4


def test_a_run_without_a_full_window_has_no_drift() -> None:
    for turns in ([], FLAT_RUN[:2], FLAT_RUN[:4]):
        assert math.isnan(aggregate_run(turns).latency_drift_p50_s)
    assert in_buckets(FLAT_RUN[:2]) == []


def test_an_engine_without_deterministic_is_not_judged_by_it() -> None:
    report = _report()
    del report.series["script/is_same"]
    report.notes = [long_session.INEXACT]
    assert _failed(report) == set()


# Settings and commands


def test_a_server_on_mlx_gets_no_flags_that_mlx_refuses() -> None:
    flags = LongSessionSettings(device="mlx").server_flags()
    assert "--deterministic" not in flags
    assert flags[flags.index("--dtype") + 1] == "bfloat16"
    with pytest.raises(ConfigError, match="device mlx does not support"):
        build_engine(open_model("smollm2-135m-instruct"), EngineConfig(device="mlx", deterministic=True))


@needs_native
def test_a_server_on_the_cpu_is_deterministic_in_int8() -> None:
    flags = LongSessionSettings(device="cpu").server_flags()
    assert "--deterministic" in flags
    assert flags[flags.index("--dtype") + 1] == "int8"


def test_a_run_ends_with_its_turns_or_its_time() -> None:
    assert LongSessionSettings().num_turns == 500
    assert LongSessionSettings(duration_s=60.0).num_turns == 0
    assert LongSessionSettings(turns=10).progress(5, 1000.0) == 0.5
    assert LongSessionSettings(turns=10, duration_s=60.0).progress(5, 45.0) == 0.75


def test_half_a_server_and_unknown_dtypes_are_refused() -> None:
    for wrong in ({"server": "127.0.0.1:1"}, {"http": "http://127.0.0.1:1"}, {"dtype": "int3"}):
        with pytest.raises(ConfigError):
            LongSessionSettings(**wrong)  # type: ignore[arg-type]


def test_two_terminals_run_four_hours_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "long-session", "--print-commands"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "holdfast serve smollm2-135m-instruct --grpc 127.0.0.1:50051" in told[1]
    assert "--duration-s 14400.0 --server 127.0.0.1:50051 --http http://127.0.0.1:8000" in told[-1]
    assert "--duration-s" not in commands(LongSessionSettings(turns=20))


def test_questions_differ_and_are_equally_long() -> None:
    tokenizer = default_chat().model.tokenizer
    asked = [question_of(number) for number in (0, 7, 999, 12_345)]
    assert len(set(asked)) == 4
    for is_about_past in (False, True):
        texts = [question_of(number, is_about_past=is_about_past) for number in range(200)]
        assert len({len(tokenizer.encode(text)) for text in texts}) == 1


# The real thing, for a moment


def test_failed_turns_are_counted_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = dict.fromkeys(("sdk", "openai"), 0)

    def failing_after(name: str, ask: Callable[..., TimedReply], number: int) -> Callable[..., TimedReply]:
        def wrapped(*arguments: Any, **more: Any) -> TimedReply:
            reply = ask(*arguments, **more)
            calls[name] += 1
            if calls[name] == number:
                raise ConnectionResetError(f"{name}: connection lost")
            return reply

        return wrapped

    # The server has recorded these turns, but the client does not learn it.
    monkeypatch.setattr(SdkChat, "ask", failing_after("sdk", SdkChat.ask, 2))
    monkeypatch.setattr(OpenAIChat, "ask", failing_after("openai", OpenAIChat.ask, 11))
    short = {"turns": 7, "recent": 64, "reply-tokens": 2, "retry-every": 0, "control-share": 1, "script-turns": 1}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "long-session", *flags, "--json", "-", "--output", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["is_partial"]
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert gates["every_turn_answered"]["reason"] == "2 of 7 were wrong"
    assert sum(": connection lost" in note for note in report["notes"]) == 2
    series = {name: found["values"] for name, found in report["series"].items()}
    assert len(series["sdk/turn_ms"]) == len(series["openai/turn_ms"]) == 5
    assert gates["doors_agree"]["passed"]
    for door in CLIENTS:
        assert series[f"{door}/forwarded_tokens"] == series[f"{door}/wanted_tokens"]


def test_a_short_run_shows_both_doors_flat_and_the_control_growing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"turns": 6, "recent": 64, "reply-tokens": 2, "retry-every": 3, "control-share": 1, "script-turns": 1}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "long-session", *flags, "--json", "-", "--output", str(tmp_path)]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate for gate in report["gates"]}
    timed = {f"{door}/prefill_bounded" for door in CLIENTS}  # by the clock too, and six turns are few
    failed = [gate for name, gate in gates.items() if not gate["passed"] and name not in timed]
    assert (len(gates), failed) == (10, [])
    series = {name: found["values"] for name, found in report["series"].items()}
    for door in CLIENTS:
        assert series[f"{door}/forwarded_tokens"] == series[f"{door}/wanted_tokens"]
        assert len(series[f"{door}/kv_live_bytes"]) == 6
        assert series[f"{door}/kv_live_bytes"] == series[f"{door}/kv_formula_bytes"]
        assert min(series[f"{door}/memory_bytes"]) > 1e8
    control = series[f"{CONTROL}/forwarded_tokens"]
    assert control == sorted(set(control))
    assert control[-1] > 3 * series["openai/forwarded_tokens"][-1]
    assert len(series[f"{CONTROL}/latest_turn_ms"]) == 6
    assert len(series["retry/recomputed_tokens"]) == 2
    assert all(
        0 < spent < felt for spent, felt in zip(series["openai/client_ms"], series["openai/turn_ms"], strict=True)
    )
    assert "openai/latency_drift_p50_s" in report["figures"]
    assert report["scenario"] == long_session.SCENARIO.name
    assert not report["is_partial"]
    assert {file.suffix for file in tmp_path.iterdir()} >= {".json", ".html"}
