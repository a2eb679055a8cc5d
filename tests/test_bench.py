"""Benches: the arithmetic, gates that can fail, reports, comparisons, and one short run of the real thing."""

import asyncio
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.bench import overhead, responsiveness, resting
from holdfast.bench import runner as drawing
from holdfast.bench.gates import (
    Gate,
    all_right,
    control,
    median,
    median_at_least,
    median_at_most,
    percentile,
    percentile_at_most,
    summarize,
    thinned,
)
from holdfast.bench.load import QUESTION, LoadPlan, _Load, record_problem, request
from holdfast.bench.processes import Child, ProcessFailed, ServerProcess, started
from holdfast.bench.relay_server import stage_of
from holdfast.bench.report import Figure, Report, Results, cautions, compare, encode, read, verdict, write
from holdfast.bench.runner import Chart, Output, Scenario, command_of, page, plot, require, run
from holdfast.bench.upstreams import Script, first_message, response
from holdfast.cli import main
from holdfast.cli.bench import SCENARIOS
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, InvalidArgument
from holdfast.extras import how_to_install
from holdfast.sessions import record as json_members
from tests.effort import THOROUGH
from tests.serving import default_chat
from tests.talking import until

# The arithmetic


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert percentile([7.0], 99) == 7.0
    assert (percentile([3.0, 1.0], 0), percentile([3.0, 1.0], 100)) == (1.0, 3.0)
    assert summarize([3.0, 1.0, 2.0]).median == median([1.0, 2.0, 3.0]) == 2.0


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_percentiles_of_nothing_or_of_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(InvalidArgument):
        percentile(values, 50)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_percentiles_never_leave_the_spread(values: list[float], rank: float) -> None:
    assert min(values) <= percentile(values, rank) <= max(values)


def test_thinning_keeps_the_course_and_the_limit() -> None:
    assert thinned([1.0, 2.0, 3.0], 5) == [1.0, 2.0, 3.0]
    assert thinned([float(i) for i in range(10)], 4) == [0.0, 3.0, 6.0, 9.0]
    assert thinned([], 4) == []


# Gates

JUDGES: dict[str, Callable[[list[float]], Gate]] = {
    "percentile_at_most": lambda values: percentile_at_most("g", values, 95, 25.0, "ms"),
    "median_at_least": lambda values: median_at_least("g", values, 85.0, "1/s"),
    "median_at_most": lambda values: median_at_most("g", values, 1.0, "times"),
}


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
@pytest.mark.parametrize("values", [[], [0.0, 0.0], [math.nan, 1.0], [math.inf]], ids=str)
def test_what_cannot_be_judged_fails(judge: Callable[[list[float]], Gate], values: list[float]) -> None:
    assert not judge(values).passed


def test_gates_hold_and_fail_at_their_limits() -> None:
    assert percentile_at_most("g", [25.0] * 100, 95, 25.0, "ms").passed
    assert percentile_at_most("g", [1.0] * 96 + [900.0] * 4, 95, 25.0, "ms").passed
    assert not percentile_at_most("g", [1.0] * 90 + [900.0] * 10, 95, 25.0, "ms").passed
    assert median_at_least("g", [85.0, 85.0, 1.0], 85.0, "1/s").passed
    assert not median_at_least("g", [84.0, 84.0, 500.0], 85.0, "1/s").passed
    assert median_at_most("g", [0.5, 2.0, 0.5], 1.0, "times").passed
    assert not median_at_most("g", [1.5, 2.0, 0.5], 1.0, "times").passed


def test_nothing_done_is_not_all_right() -> None:
    assert all_right("g", 10, 0).passed
    assert not all_right("g", 10, 1).passed
    assert not all_right("g", 0, 0).passed


def test_a_control_must_fail_and_must_be_measured() -> None:
    failed, held = Gate("g", False, "slow"), Gate("g", True, "fast")
    assert control("c", failed, 5).passed
    assert not control("c", held, 5).passed
    assert not control("c", failed, 0).passed


def _measured(lane_ms: float, inline_ms: float, *, num_wrong: int = 0) -> Report:
    results = Results("responsiveness", "holdfast bench responsiveness", {})
    for mode, value in (("inline", inline_ms), ("lane", lane_ms), ("threads", inline_ms)):
        results.extend(f"{mode}/health_ms", "ms", [value] * 20)
        results.extend(f"{mode}/answered", "", [20.0])
        results.extend(f"{mode}/wrong", "", [float(num_wrong)])
        results.extend(f"{mode}/records_wrong", "", [0.0])
        results.figure(f"{mode}/health_p95", "ms", value, "lower")
        results.figure(f"{mode}/chats_per_s", "1/s", 100.0, "higher")
    results.ratio("lane:inline/health_p95", "lane/health_p95", "inline/health_p95", "lower")
    results.close()
    return results.report


def _failed(report: Report) -> set[str]:
    return {gate.name for gate in responsiveness.judge(report) if not gate.passed}


def test_responsiveness_is_judged_by_the_lane_with_inline_as_its_control() -> None:
    assert not _failed(_measured(10.0, 100.0))
    assert _failed(_measured(30.0, 100.0)) == {"health_p95"}
    assert _failed(_measured(10.0, 8.0)) == {"control_inline", "lane_beats_inline"}
    assert _failed(_measured(10.0, 100.0, num_wrong=1)) == {"replies"}
    assert len(_failed(Report(scenario="responsiveness", command="", started_at=""))) == 6


@pytest.mark.parametrize(("share", "is_cheap"), [(0.96, True), (0.94, False)])
def test_a_journal_that_costs_more_than_5_percent_or_15_of_large_replies_is_found_out(
    share: float, is_cheap: bool
) -> None:
    results = Results("overhead", "holdfast bench overhead", {})
    for _ in range(3):
        results.figure("served/turns_per_s", "1/s", 500.0)
        results.figure("journaled/turns_per_s", "1/s", 500.0 * share)
        results.figure("large/turns_per_s", "1/s", 100.0)
        results.figure("large_journaled/turns_per_s", "1/s", 100.0 * (share - 0.1))
        for pair in ("journaled:served", "large_journaled:large"):
            journaled, plain = pair.split(":")
            results.ratio(f"{pair}/turns_per_s", f"{journaled}/turns_per_s", f"{plain}/turns_per_s", "higher")
    gates = {gate.name: gate.passed for gate in overhead.judge(results.report)}
    assert gates["journaling_costs_less_than_5_percent"] is is_cheap
    assert gates["journaling_large_replies"] is is_cheap


def test_a_server_that_reads_all_its_sessions_at_start_is_found_out() -> None:
    def failed(start_s: float, first_ms: float, rss_mib: float) -> set[str]:
        results = Results("resting", "holdfast bench resting", {})
        for name in ("few", "many"):
            is_many = name == "many"
            results.figure(f"{name}/start_s", "s", start_s if is_many else 1.0)
            results.figure(f"{name}:none/start_cpu", "times", start_s if is_many else 1.0)
            results.figure(f"{name}/rss", "MiB", rss_mib if is_many else 150.0)
            results.extend(f"{name}/first_turn_added_ms", "ms", [first_ms if is_many else 5.0] * 20)
        results.count("answered", 10)
        results.count("wrong", 0)
        results.count("records_wrong", 0)
        return {gate.name for gate in resting.judge(results.report) if not gate.passed}

    assert failed(1.1, 50.0, 155.0) == set()
    assert failed(5.0, 50.0, 155.0) == {"starts_within_2_s", "start_costs_the_same"}
    assert failed(1.1, 150.0, 155.0) == {"first_turn_within_100_ms"}
    assert failed(1.1, 50.0, 250.0) == {"memory_does_not_grow_with_the_journal"}


# Reports


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    report = _measured(10.0, 100.0)
    report.gates = responsiveness.judge(report)
    path = tmp_path / "results" / "one.json"
    write(path, encode(report))
    assert read(path) == report
    assert report.passed
    assert report.hardware["cores"]
    assert report.versions["holdfast"]
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for content in (b"{}", b"not JSON", encode(_measured(1.0, 1.0)).replace(b"holdfast-bench/1", b"holdfast-bench/0")):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            read(path)
    with pytest.raises(ConfigError):
        read(tmp_path / "missing.json")
    with pytest.raises(ConfigError):
        write(path / "below-a-file.json", b"")


CHARTS = (
    Chart("a", "distribution", ("lane/health_ms", "inline/health_ms"), "ms", is_log=True),
    Chart("b", "course", ("lane/chats_per_s",), "1/s"),
    Chart("c", "bars", ("lane/health_p95", "inline/health_p95"), "ms"),
    Chart("d", "bars", ("nobody measured this",), "ms"),
)


def test_the_page_needs_nothing_else_and_escapes_what_it_shows() -> None:
    report = _measured(10.0, 100.0)
    report.notes = ["<script>"]
    report.gates = [Gate("health_p95", False, "too <slow>")]
    text = page(report, b"\x89PNG")
    assert "data:image/png;base64," in text
    assert "&lt;script&gt;" in text
    assert "too &lt;slow&gt;" in text
    assert "://" not in text
    assert drawing.HOW_TO_PLOT.partition(":")[0] in page(report, None)


def test_plots_are_drawn_where_matplotlib_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _measured(10.0, 100.0)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert plot(report, CHARTS) is None
    pytest.importorskip("matplotlib")
    image = plot(report, CHARTS)
    assert image is not None
    assert image.startswith(b"\x89PNG")
    assert plot(report, CHARTS[3:]) is None


def test_the_hint_for_plots_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = io.StringIO()
    drawing._save(_measured(10.0, 100.0), CHARTS, tmp_path / "report.json", Output(), Console(file=shown))
    assert how_to_install("bench") in shown.getvalue()  # rich would take [bench] for a colour


# Comparisons


def _figure(*values: float, better: Any = "lower") -> Figure:
    figure = Figure("ms", better)
    for value in values:
        figure.add(value)
    return figure


def test_a_difference_within_the_spread_is_noise() -> None:
    before = _figure(10.0, 11.0, 12.0, 14.0)
    assert verdict(before, _figure(9.0, 9.5, 10.5, 11.0)) == "noise"
    assert verdict(before, _figure(5.0, 6.0, 7.0, 8.0)) == "better"
    assert verdict(before, _figure(15.0, 16.0, 17.0, 18.0)) == "worse"
    assert verdict(before, before) == "noise"
    assert verdict(before, _figure(1.0, 1.0, 1.0)) == "too few rounds"


def test_the_direction_belongs_to_the_figure() -> None:
    low, high = (1.0, 1.0, 1.1, 1.2), (2.0, 2.1, 2.2, 2.3)
    assert verdict(_figure(*low, better="higher"), _figure(*high)) == "better"
    assert verdict(_figure(*high, better="higher"), _figure(*low)) == "worse"
    assert verdict(_figure(*low, better=""), _figure(*high)) == "changed"


def test_reports_are_compared_with_a_word_of_caution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = _measured(20.0, 100.0), _measured(10.0, 100.0)
    before.figures = {"lane/health_p95": _figure(20.0, 21.0, 22.0, 23.0)}
    after.figures = {"lane/health_p95": _figure(10.0, 10.5, 11.0, 11.5), "new": _figure(1.0)}
    (found,) = compare(before, after)
    assert (found.verdict, found.ratio) == ("better", pytest.approx(0.5))
    before.load_before, after.load_before = [0.1], [64.0]
    after.settings, after.is_quick, after.is_partial = {"rounds": 1}, True, True
    after.hardware = before.hardware | {"cpu": "another"}
    assert len(cautions(before, after)) == 5
    assert not cautions(before, before)
    for name, report in (("a", before), ("b", after)):
        write(tmp_path / f"{name}.json", encode(report))
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "better" in out
    assert "different machines" in out
    before.scenario = "overhead"
    with pytest.raises(InvalidArgument):
        compare(before, after)


# The runner


def _scenario(measure: Callable[[Any, Results], None]) -> tuple[Scenario, Any]:
    settings = responsiveness.ResponsivenessSettings(rounds=2)
    scenario = Scenario(
        name="tried",
        about="nothing",
        settings=responsiveness.ResponsivenessSettings,
        quick={"seconds": 1.5},
        quick_s=3,
        num_rounds=lambda settings: settings.rounds,
        measure=measure,
        judge=lambda report: [median_at_least("speed", report.values("speed"), 1.0, "1/s")],
        charts=lambda settings: [Chart("speed", "course", ("speed",), "1/s")],
    )
    return scenario, settings


def _one_round(settings: Any, results: Results) -> None:
    results.step("round 1")
    results.figure("speed", "1/s", 2.0, "higher")
    results.on_round()


def test_a_gate_that_fails_fails_the_run(tmp_path: Path) -> None:
    scenario, settings = _scenario(_one_round)
    assert run(scenario, settings, Output(tmp_path)) == 0
    slow, _ = _scenario(lambda settings, results: results.figure("speed", "1/s", 0.5))
    assert run(slow, settings, Output(tmp_path / "slow", str(tmp_path / "copy.json"))) == 1
    assert not read(tmp_path / "copy.json").passed


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(settings: Any, results: Results) -> None:
        _one_round(settings, results)
        (checkpoint,) = (read(file) for file in tmp_path.glob("*.json"))
        assert (checkpoint.is_partial, checkpoint.values("speed")) == (True, [2.0])
        raise KeyboardInterrupt

    scenario, settings = _scenario(interrupted)
    assert run(scenario, settings, Output(tmp_path, "-"), is_quick=True) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["is_partial"] is True
    assert "quick" in captured.err
    (report,) = (read(file) for file in tmp_path.glob("*.json"))
    assert report.is_partial
    assert report.values("speed") == [2.0]
    assert report.duration_s >= 0
    assert {file.suffix for file in tmp_path.iterdir()} >= {".json", ".html"}


def test_sigterm_ends_a_run_as_ctrl_c_does_and_with_it_its_child_processes(tmp_path: Path) -> None:
    children: list[Child] = []

    def terminated(settings: Any, results: Results) -> None:
        _one_round(settings, results)
        with started("load") as child:
            children.append(child)
            child.read(str)
            os.kill(os.getpid(), signal.SIGTERM)
            child.read(str, timeout_s=60)  # never answers, and is interrupted

    scenario, settings = _scenario(terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert run(scenario, settings, Output(tmp_path)) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    (report,) = (read(file) for file in tmp_path.glob("*.json"))
    assert report.notes == ["ended early by Terminated"]
    with pytest.raises(ProcessLookupError):
        os.kill(children[0].pid, 0)


def test_a_second_signal_ends_the_wait_for_a_server_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProcess("no-such-model")
    monkeypatch.setattr(server._process, "wait", _interrupted_once(server._process.wait))
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert server._process.returncode is not None


def _interrupted_once(wait: Callable[..., int]) -> Callable[..., int]:
    waits = iter([True])

    def wrapped(*arguments: Any) -> int:
        if next(waits, False):
            raise KeyboardInterrupt
        return wait(*arguments)

    return wrapped


async def test_a_server_ends_with_a_bench_that_was_killed() -> None:
    program = (
        "import time\n"
        "from holdfast.bench.processes import ServerProcess\n"
        "flags = ('--recent', '64', '--max-pin', '16', '--sessions', '1', '--drain-s', '1')\n"
        "server, _ = ServerProcess(*flags).wait_until_served()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    bench = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert bench.stdout
    pid = int(await bench.stdout.readline())
    bench.kill()
    await bench.wait()
    await until(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended all the same."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def test_signals_do_not_interrupt_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(*arguments: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(drawing, "plot", signalled)
    scenario, settings = _scenario(_one_round)
    assert run(scenario, settings, Output(tmp_path)) == 0
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_an_error_before_the_first_measurement_leaves_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(settings: Any, results: Results) -> None:
        raise ConfigError("no")

    scenario, settings = _scenario(refused)
    with pytest.raises(ConfigError):
        run(scenario, settings, Output(tmp_path))
    assert not list(tmp_path.iterdir())
    assert "FAIL" not in capsys.readouterr().err


def test_packages_are_missed_before_anything_is_started(tmp_path: Path) -> None:
    scenario, settings = _scenario(lambda settings, results: pytest.fail("it was started"))
    needing = dataclasses.replace(scenario, needs=lambda settings: ("json", "no_such_package"))
    with pytest.raises(ConfigError, match=r"needs no_such_package; to install it, run: \S+ -m pip install "):
        run(needing, settings, Output(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scenario", ["long-session", "recovery", "capacity", "decode"])
def test_every_scenario_names_the_packages_that_a_plain_installation_lacks(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find, extras = importlib.util.find_spec, ("holdfast_sdk", "openai", "matplotlib", "psutil")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in extras else find(name, *rest))
    assert main(["bench", scenario, "--quick"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("holdfast: this scenario needs holdfast_sdk")
    assert len(error.splitlines()) == 1


def test_rounds_and_the_time_that_is_left_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, settings = _scenario(_one_round)
    assert run(scenario, settings, Output(tmp_path), is_quick=True) == 0
    error = capsys.readouterr().err
    assert "about 3 s on two idle cores" in error
    assert re.search(r"tried: 1 of 2 rounds in \d+ s, about \d+ s left", error)


def test_the_help_of_every_scenario_says_how_long_quick_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for scenario in SCENARIOS:
        with pytest.raises(SystemExit):
            main(["bench", scenario.name, "--help"])
        assert f"about {scenario.quick_s} s on two idle cores" in " ".join(capsys.readouterr().out.split())


def test_a_missing_optional_package_is_named() -> None:
    require("json")
    with pytest.raises(ConfigError, match="no_such_package"):
        require("json", "no_such_package")


def test_an_error_is_raised_once_all_is_saved(tmp_path: Path) -> None:
    def broken(settings: Any, results: Results) -> None:
        _one_round(settings, results)
        raise ProcessFailed("gone")

    scenario, settings = _scenario(broken)
    with pytest.raises(ProcessFailed):
        run(scenario, settings, Output(tmp_path))
    (report,) = (read(file) for file in tmp_path.glob("*.json"))
    assert report.is_partial
    assert report.notes == ["ended early by ProcessFailed"]


def test_the_command_in_a_report_runs_it_again() -> None:
    scenario, settings = _scenario(_one_round)
    assert command_of(scenario, settings, is_quick=False) == "holdfast bench tried --rounds 2"
    assert command_of(scenario, settings, is_quick=True) == "holdfast bench tried --quick --rounds 2 --seconds 8.0"


def test_settings_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overhead", "--rounds", "0"]) == 2
    assert "rounds must be 1 or more" in capsys.readouterr().err
    assert main(["bench", "list"]) == 0
    assert "responsiveness" in capsys.readouterr().out


# The ends of a bench


def test_a_message_is_whole_or_not_there() -> None:
    sent = request("POST", "/sessions", b"{}") + response(b"[1]")
    first = first_message(bytearray(sent))
    assert first is not None
    assert sent[slice(*first)] == b"{}"
    second = first_message(bytearray(sent[first[1] :]))
    assert second is not None
    assert sent[first[1] :][slice(*second)] == b"[1]"
    assert all(first_message(bytearray(sent[:end])) is None for end in range(first[1]))
    assert first_message(bytearray(b"HTTP/1.1 204 No Content\r\n\r\n")) == (27, 27)


def test_a_question_has_64_tokens() -> None:
    assert len(default_chat().model.tokenizer.encode(QUESTION)) == 64


def test_a_record_that_lost_something_is_found_out() -> None:
    script = Script(4, 64)
    record = {"response": json.loads(script.reply(4))}
    assert record_problem([record], [1, *script.token_ids], script) == ""
    assert "records" in record_problem([], script.token_ids, script)
    assert "token ids" in record_problem([record], [1, 1, 2, 3, 4], script)
    cut = {"response": json.loads(script.reply())}
    assert "not what the upstream sent" in record_problem([cut], script.token_ids, script)


def test_stages_are_told_apart_by_file() -> None:
    assert stage_of("/x/holdfast/backends/validation.py") == "decode"
    assert stage_of(json_members.__file__) == "decode"
    assert stage_of("/x/holdfast/backends/transport.py") == "upstream"
    assert stage_of("/x/site-packages/uvicorn/protocols/http/h11_impl.py") == "client"
    assert stage_of("/x/asyncio/selector_events.py") == "sockets"
    assert stage_of("/x/json/decoder.py") is None


def test_what_a_helper_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_NATIVE", "off")
    config = EngineConfig(device="cpu", dtype="int8")
    with started("engine_speed", "smollm2-135m-instruct", config) as child, pytest.raises(ProcessFailed) as failed:
        child.read(str, timeout_s=60)
    assert "needs the native engine" in str(failed.value)
    assert "Traceback" not in str(failed.value)


async def test_a_lost_connection_is_a_wrong_reply_and_the_load_goes_on() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        body = script.reply()
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
            if len(connections) > 1:
                writer.write(response(body))
            else:
                writer.close()
                return

    script = Script(4)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        plan = LoadPlan(
            address=f"{host}:{port}", script=script, is_straight=True, num_sessions=1, num_turns=1, duration_s=0.5
        )
        found = await _Load(plan).run()
        for writer in connections:
            writer.close()
    assert found.num_wrong == 1
    assert "closed the connection" in found.wrong
    assert found.num_chats > 2


def test_a_process_that_dies_says_why() -> None:
    with started("upstreams", "canned", "not JSON") as child, pytest.raises(ProcessFailed, match="JSON is malformed"):
        child.read(str, timeout_s=60)


# The real thing, for a moment


def test_json_on_stdout_is_all_there_is_and_the_report_is_whole(tmp_path: Path) -> None:
    short = {"sessions": 4, "turns": 2, "payload-kib": 100, "rounds": 1, "seconds": 0.5, "ramp-s": 0.1, "warmup-s": 0}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "holdfast.cli", "bench", "responsiveness", *flags]
    done = subprocess.run(
        [*command, "--json", "-", "--output", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["scenario"] == "responsiveness"
    assert report["command"].startswith("holdfast bench responsiveness --sessions 4 --turns 2")
    assert report["settings"]["payload_kib"] == 100
    assert not report["is_partial"]
    assert report["load_before"]
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert set(gates) == {
        "health_p95",
        "chats_per_s",
        "lane_beats_inline",
        "control_inline",
        "replies",
        "records",
    }
    assert gates["replies"]["passed"], report["notes"]
    assert gates["records"]["passed"], report["notes"]
    for mode in ("inline", "lane", "threads"):
        assert report["series"][f"{mode}/health_ms"]["values"]
        for name in ("health_p50", "health_p95", "health_p99", "chats_per_s", "cpu_server", "cpu_decode", "rss"):
            assert report["figures"][f"{mode}/{name}"]["summary"]["count"] == 1
    assert "pass replies" in done.stderr
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text()) == report
    assert path.with_suffix(".html").exists()


def test_overhead_is_measured_beside_the_straight_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"sessions": 4, "rounds": 1, "seconds": 0.5, "ramp-s": 0, "alone-s": 0.5, "kept-sessions": 100}
    short |= {"large-kib": 100, "large-s": 0.5}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    main(["bench", "overhead", *flags, "--json", "-", "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate for gate in report["gates"]}
    journaling = {"journaling_costs_less_than_5_percent", "journaling_large_replies"}
    judged = {"replies", "records", *journaling, "memory_was_seen_to_grow"}
    assert set(gates) == judged
    assert gates["replies"]["passed"], report["notes"]
    assert gates["records"]["passed"], report["notes"]
    figures = report["figures"]
    assert figures["straight/turns_per_s"]["values"][0] > figures["served/turns_per_s"]["values"][0] > 0
    assert figures["added/alone_p50"]["values"][0] > 0
    for ratio in ("journaled:served/turns_per_s", "large_journaled:large/turns_per_s"):
        assert figures[ratio]["values"][0] > 0
    assert len(report["series"]["rss"]["values"]) == 11


def test_decoding_is_measured_by_dtype_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"tokens": 4, "history": 16, "long": 0, "rounds": 1, "stream": 4}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    main(["bench", "decode", *flags, "--json", "-", "--output", str(tmp_path)])
    figures = json.loads(capsys.readouterr().out)["figures"]
    rates = {name: figure["values"] for name, figure in figures.items() if figure["unit"] == "tokens/s"}
    assert {"int8", "engine_alone", "grpc_stream", "http_stream_hammered"} <= set(rates)
    assert all(value > 0 for values in rates.values() for value in values)


def test_scale_is_measured_beside_sqlite_and_with_a_hop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"members": "1,2", "sessions": 2, "turns": 2, "tokens": 4, "rounds": 1, "seconds": 0.3, "ramp-s": 0}
    flags = [word for name, value in (short | {"alone-s": 0.3}).items() for word in (f"--{name}", str(value))]
    main(["bench", "scale", *flags, "--json", "-", "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert set(gates) == {"replies", "postgres_beside_sqlite", "hop"}
    assert gates["replies"]["passed"], report["notes"]
    for contestant in ("sqlite", "1", "2", "hop"):
        assert report["figures"][f"{contestant}/turns_per_s"]["values"][0] > 0


@pytest.mark.parametrize("journal", ["url", *(["own", ""] if THOROUGH else [])])
def test_resting_sessions_are_written_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: str, journal: str
) -> None:
    place = postgres if journal == "url" else journal
    short = {"sessions": 6, "few": 4, "turns": 3, "starts": 1, "asked": 2, "fillers": 2, "journal": place}
    flags = [word for name, value in short.items() for word in (f"--{name}", str(value))]
    main(["bench", "resting", *flags, "--json", "-", "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    gates = {gate["name"]: gate["passed"] for gate in report["gates"]}
    assert gates["replies"], report["notes"]
    assert gates["records"], report["notes"]
    assert report["figures"]["many/start_s"]["summary"]["count"] == 1
    if place == postgres:
        assert main(["journal", "check", postgres]) == 0
        assert "7 of 7 sessions are intact, with 29 turns" in capsys.readouterr().out
