"""Runs a scenario: shows progress on stderr, saves after every round, and writes a report however the run ends.

A report is JSON, a plot (with matplotlib) and one self-contained HTML page.
"""

import base64
import contextlib
import dataclasses
import html
import importlib.util
import io
import itertools
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from holdfast.bench.gates import Gate
from holdfast.bench.machine import load_averages
from holdfast.bench.report import Report, Results, encode, write
from holdfast.errors import ConfigError, HoldfastError
from holdfast.extras import how_to_install

RESULTS = Path("bench/results")
HOW_TO_PLOT = f"no plot without matplotlib; {how_to_install('bench')}"
_COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#2e4057", "#8d96a3", "#a05195")
_SIGNALLED = 128  # exit codes are this and the number of the signal


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures or series `names`: their distribution, their values in order, or their medians with the spread.

    `marks`: series of places in a course, drawn as lines.
    """

    title: str
    kind: Literal["distribution", "course", "bars"]
    names: tuple[str, ...]
    label: str
    is_log: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How something is measured, judged and drawn. `settings` is a dataclass of `config.option`s."""

    name: str
    about: str
    settings: type[Any]
    quick: Mapping[str, Any]  # settings that --quick changes
    quick_s: int  # how long that takes on two cores that have nothing else to do, rounded up
    num_rounds: Callable[[Any], int]
    measure: Callable[[Any, Results], None]
    judge: Callable[[Report], list[Gate]]
    charts: Callable[[Any], Sequence[Chart]]
    needs: Callable[[Any], Sequence[str]] = lambda settings: ()  # optional packages


@dataclass(frozen=True, slots=True)
class Output:
    """Where a report goes. `json`: a further file, or `-` for stdout, which then holds nothing else."""

    folder: Path = RESULTS
    json: str = ""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: ends a run as Ctrl-C does, so that servers and other child processes are stopped."""


def require(*modules: str) -> None:
    """Raises ConfigError if one of these optional packages is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this scenario needs {', '.join(missing)}; {how_to_install('bench')}")


def run(scenario: Scenario, settings: Any, output: Output, *, is_quick: bool = False) -> int:
    """0 if every gate passed, 1 if one failed, 130 after Ctrl-C. Raises what went wrong once the report is saved."""
    require(*scenario.needs(settings))
    console = Console(stderr=True, highlight=False)
    if is_quick:
        console.print(f"[yellow]{scenario.name}, quick: {quick_note(scenario)}{_busy_note()}[/]", soft_wrap=True)
    with _progress(console, scenario.name, scenario.num_rounds(settings)) as (step, advance):
        results = Results(
            scenario.name,
            command_of(scenario, settings, is_quick=is_quick),
            dataclasses.asdict(settings),
            is_quick=is_quick,
            on_step=step,
        )
        stamp = results.report.started_at.replace(":", "").replace("-", "").partition("+")[0]
        path = output.folder / f"{scenario.name}-{stamp}Z.json"

        def checkpoint() -> None:
            results.close()
            write(path, encode(dataclasses.replace(results.report, is_partial=True)))
            advance()

        results.on_round = checkpoint
        end = _measure(scenario, settings, results)
    report = results.report
    if isinstance(end, HoldfastError) and not report.series and not report.figures:
        raise end  # a wrong setting, a model that is not there: there is nothing to report
    report.gates = scenario.judge(report)
    with _signals(signal.SIG_IGN, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        _save(report, scenario.charts(settings), path, output, console)
    if isinstance(end, HoldfastError):
        raise end
    if end is not None:
        return _SIGNALLED + (signal.SIGTERM if isinstance(end, Terminated) else signal.SIGINT)
    return 0 if report.passed else 1


def quick_note(scenario: Scenario) -> str:
    return f"shorter and noisier than the full run, about {scenario.quick_s} s on two idle cores"


def _busy_note() -> str:
    load, cores = (*load_averages(), 0.0)[0], os.cpu_count() or 1
    return f"; this machine is busy (load {load:g} on {cores} cores), so it takes longer" if load > cores / 2 else ""


def _measure(scenario: Scenario, settings: Any, results: Results) -> BaseException | None:
    """What ended the run early, if anything. What was measured until then stays in the report."""
    end = None
    try:
        with _signals(_terminate, signal.SIGTERM, signal.SIGHUP):
            scenario.measure(settings, results)
    except (KeyboardInterrupt, HoldfastError) as exc:
        results.report.is_partial = True
        results.note(f"ended early by {type(exc).__name__}")
        end = exc
    results.close()
    results.note_busy_machine()
    return end


def _terminate(number: int, frame: object) -> None:
    raise Terminated


@contextlib.contextmanager
def _signals(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals so. Only the main thread may set signal handlers; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def command_of(scenario: Scenario, settings: Any, *, is_quick: bool) -> str:
    """The command that repeats this run."""
    words = ["holdfast", "bench", scenario.name, *(["--quick"] if is_quick else [])]
    for field in dataclasses.fields(settings):
        default = scenario.quick.get(field.name, field.default) if is_quick else field.default
        if (value := getattr(settings, field.name)) != default:
            words += ["--" + field.name.replace("_", "-"), str(value)]
    return shlex.join(words)


def _save(report: Report, charts: Sequence[Chart], path: Path, output: Output, console: Console) -> None:
    image = plot(report, charts)
    content = encode(report)
    write(path, content)
    write(path.with_suffix(".html"), page(report, image).encode())
    if image:
        write(path.with_suffix(".png"), image)
    _show(report, console)
    if not image and report.figures:
        console.print(HOW_TO_PLOT, style="yellow", markup=False, soft_wrap=True)
    console.print(f"[dim]report: {escape(str(path))} and {path.with_suffix('.html').name}[/]", soft_wrap=True)
    if output.json == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    elif output.json:
        write(Path(output.json), content)


def _show(report: Report, console: Console) -> None:
    table = Table("figure", "median", "spread", "unit", box=None)
    for name, figure in report.figures.items():
        if found := figure.summary:
            table.add_row(name, f"{found.median:.4g}", f"{found.low:.4g} to {found.high:.4g}", figure.unit)
    console.print(table)
    for note in report.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    for gate in report.gates:
        mark = "[green]pass[/]" if gate.passed else "[red]FAIL[/]"
        console.print(f"{mark} {gate.name}: ", end="")
        console.print(gate.reason, markup=False, soft_wrap=True)
    load = f"load {report.load_before} before, {report.load_after} after"
    console.print(f"{load}; {report.duration_s:g} s", markup=False, style="dim")


@contextlib.contextmanager
def _progress(
    console: Console, name: str, num_rounds: int
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Functions that show a step and count a round: in a bar with the time that is left, in a log as lines."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=True)
    with Progress(*columns, *times, console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: starting", total=num_rounds)

        def advance() -> None:
            progress.advance(task)
            shown = progress.tasks[0]
            if not console.is_terminal and shown.elapsed:
                left_s = shown.elapsed * max(0.0, num_rounds - shown.completed) / shown.completed
                done = f"{shown.completed:g} of {num_rounds} rounds in {shown.elapsed:.0f} s"
                console.print(f"{name}: {done}, about {left_s:.0f} s left", style="dim")

        yield lambda what: progress.update(task, description=f"{name}: {what}"), advance


def plot(report: Report, charts: Sequence[Chart]) -> bytes | None:
    """A PNG; None if matplotlib is not installed or nothing was measured."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return None
    shown = [chart for chart in charts if any(report.values(name) for name in chart.names)]
    if not shown:
        return None
    heights = [0.8 + 0.25 * len(chart.names) if chart.kind == "bars" else 3.4 for chart in shown]
    canvas = Canvas(figsize=(7.5, sum(heights) + 0.4), layout="constrained")
    rows = canvas.subplots(len(shown), squeeze=False, height_ratios=heights)[:, 0]
    for axes, chart in zip(rows, shown, strict=True):
        _draw(axes, chart, report)
    quick = " (quick)" if report.is_quick else ""
    canvas.suptitle(f"{report.scenario}{quick}, {report.started_at[:10]}, {report.commit[:9] or 'no commit'}")
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw(axes: Any, chart: Chart, report: Report) -> None:
    names = [name for name in chart.names if report.values(name)]
    contestants = list(dict.fromkeys(name.partition("/")[0] for name in chart.names))
    for name in names:
        values, colour = report.values(name), _COLOURS[contestants.index(name.partition("/")[0]) % len(_COLOURS)]
        if chart.kind == "distribution":
            axes.plot(sorted(values), [(i + 1) / len(values) for i in range(len(values))], label=name, color=colour)
        elif chart.kind == "course":
            size = 0 if chart.marks else 3
            axes.plot(range(1, len(values) + 1), values, label=name, color=colour, marker="o", markersize=size)
        elif (figure := report.figures.get(name)) and (found := figure.summary):
            spread = [[found.median - found.low], [found.high - found.median]]
            axes.barh(name, found.median, xerr=spread, color=colour, capsize=3)
    for name, colour in zip(chart.marks, itertools.cycle(_COLOURS[1:])):
        for number, place in enumerate(report.values(name)):
            axes.axvline(place, color=colour, alpha=0.4, linewidth=0.8, label="" if number else name)
    if chart.kind == "bars":
        axes.invert_yaxis()
    elif chart.marks:
        axes.legend(frameon=False, fontsize="small", ncols=4, loc="upper left", bbox_to_anchor=(0, -0.12))
    else:
        axes.legend(frameon=False)
    if chart.kind == "course":
        axes.xaxis.get_major_locator().set_params(integer=True)
    (axes.set_ylabel if chart.kind == "course" else axes.set_xlabel)(chart.label)
    if chart.is_log:
        (axes.set_yscale if chart.kind == "course" else axes.set_xscale)("log")
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def page(report: Report, image: bytes | None) -> str:
    state = [name for name, holds in (("quick", report.is_quick), ("partial", report.is_partial)) if holds]
    picture = "<p>" + html.escape(HOW_TO_PLOT) + "</p>"
    if image:
        picture = f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
    gates = [(("pass" if g.passed else "FAIL"), g.name, g.reason) for g in report.gates]
    figures = [
        (name, f"{s.median:.4g}", f"{s.low:.4g} to {s.high:.4g}", f.unit, f.better, s.count)
        for name, f in report.figures.items()
        if (s := f.summary)
    ]
    facts = {
        "command": report.command,
        "date": report.started_at,
        "duration": f"{report.duration_s:g} s",
        "commit": report.commit or "unknown",
        "load": f"{report.load_before} before, {report.load_after} after",
        **report.hardware,
        **report.versions,
        **{f"setting {name}": value for name, value in report.settings.items()},
    }
    return _PAGE.format(
        title=html.escape(f"{report.scenario} {' '.join(state)}".strip()),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in report.notes),
        gates=_table(("", "gate", "reason"), gates),
        picture=picture,
        figures=_table(("figure", "median", "spread", "unit", "better", "rounds"), figures),
        facts=_table(("", ""), facts.items()),
    )


def _table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def row(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>holdfast bench: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }}
img {{ max-width: 100% }}
</style>
<h1>{title}</h1>{notes}
<h2>Gates</h2>{gates}
{picture}
<h2>Figures</h2>{figures}
<h2>How it was measured</h2>{facts}
</html>
"""
