"""Runs a scenario: shows progress on stderr, saves after every round, and writes a report however the run ends."""

import contextlib
import dataclasses
import importlib.util
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.bench.gates import Gate
from holdfast.bench.page import HOW_TO_PLOT, Chart, page, plot
from holdfast.bench.report import Report, Results, encode, write
from holdfast.errors import ConfigError, HoldfastError

RESULTS = Path("bench/results")
_SIGNALLED = 128  # exit codes are this and the number of the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How something is measured, judged and drawn. `settings` is a dataclass of `config.option`s."""

    name: str
    about: str
    settings: type[Any]
    quick: Mapping[str, Any]  # settings that --quick changes
    num_rounds: Callable[[Any], int]
    measure: Callable[[Any, Results], None]
    judge: Callable[[Report], list[Gate]]
    charts: Callable[[Any], Sequence[Chart]]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a report goes. `json`: a further file, or `-` for stdout, which then holds nothing else."""

    folder: Path = RESULTS
    json: str = ""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run as Ctrl-C does, so that servers and other child processes are stopped."""


def require(*modules: str) -> None:
    """Raises ConfigError if one of these optional packages is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this scenario needs {', '.join(missing)}: pip install 'holdfast[bench]'")


def run(scenario: Scenario, settings: Any, output: Output, *, is_quick: bool = False) -> int:
    """0 if every gate passed, 1 if one failed, 130 after Ctrl-C. Raises what went wrong once the report is saved."""
    console = Console(stderr=True, highlight=False)
    if is_quick:
        console.print(f"[yellow]{scenario.name}, quick: shorter and noisier than the full run[/]")
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
    report.gates = scenario.judge(report)
    _save(report, scenario.charts(settings), path, output, console)
    if isinstance(end, HoldfastError):
        raise end
    if end is not None:
        return _SIGNALLED + (signal.SIGTERM if isinstance(end, Terminated) else signal.SIGINT)
    return 0 if report.passed else 1


def _measure(scenario: Scenario, settings: Any, results: Results) -> BaseException | None:
    """What ended the run early, if anything. What was measured until then stays in the report."""
    end = None
    try:
        with _sigterm_raised():
            scenario.measure(settings, results)
    except (KeyboardInterrupt, HoldfastError) as exc:
        results.report.is_partial = True
        results.note(f"ended early by {type(exc).__name__}")
        end = exc
    results.close()
    results.note_busy_machine()
    return end


@contextlib.contextmanager
def _sigterm_raised() -> Iterator[None]:
    """SIGTERM raises Terminated. Only the main thread may set signal handlers; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


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
        console.print(f"[yellow]{HOW_TO_PLOT}[/]", markup=True, soft_wrap=True)
    console.print(f"[dim]report: {path} and {path.with_suffix('.html').name}[/]", soft_wrap=True)
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
        console.print(f"[yellow]{note}[/]")
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
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: starting", total=num_rounds)
        yield (
            lambda what: progress.update(task, description=f"{name}: {what}"),
            lambda: progress.advance(task),
        )
