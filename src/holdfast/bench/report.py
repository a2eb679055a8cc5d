"""The report of a bench run: how it is filled while the bench runs, kept as JSON and compared with another one."""

import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.bench import machine
from holdfast.bench.gates import Gate, Summary, median, summarize, thinned
from holdfast.errors import ConfigError, InvalidArgument

FORMAT = "holdfast-bench/1"
MIN_ROUNDS = 4
_OTHERS = "cpu_others"
_BUSY_CORES = 0.2  # of other processes, from which on the report says so
_LOAD_DIFFERENCE = 0.5  # per core, from which on times cannot be compared
_MAX_VALUES = 5000  # of a series, added at once

Better = Literal["lower", "higher", ""]  # "": neither
Verdict = Literal["better", "worse", "changed", "noise", "too few rounds"]
T = TypeVar("T")


@dataclass(slots=True)
class Series:
    """Raw values in the order in which they were measured."""

    unit: str
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Figure:
    """One value per round, and their summary."""

    unit: str
    better: Better = ""
    values: list[float] = field(default_factory=list)
    summary: Summary | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self.summary = summarize(self.values)


@dataclass(slots=True, kw_only=True)
class Report:
    """`is_partial`: the run was interrupted or failed; the report holds what was measured until then."""

    format: str = FORMAT
    scenario: str
    command: str
    started_at: str
    duration_s: float = 0.0
    is_quick: bool = False
    is_partial: bool = False
    commit: str = ""
    hardware: dict[str, str | int] = field(default_factory=dict)
    load_before: list[float] = field(default_factory=list)
    load_after: list[float] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def values(self, name: str) -> list[float]:
        """The values of the figure or series `name`; empty if it was not measured."""
        found = self.figures.get(name) or self.series.get(name)
        return found.values if found else []

    def total(self, name: str) -> int:
        return int(sum(self.values(name)))


def encode(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read(path: Path) -> Report:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path} is not a bench report: {exc}") from exc
    if report.format != FORMAT:
        raise ConfigError(f"{path} has format {report.format!r}, expected {FORMAT!r}")
    return report


def write(path: Path, content: bytes) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Results:
    """The report of a bench that is running. A scenario adds values, and calls `on_round` after every round.

    `step` shows the user what is being done.
    """

    def __init__(
        self,
        scenario: str,
        command: str,
        settings: Mapping[str, Any],
        *,
        is_quick: bool = False,
        on_step: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.report = Report(
            scenario=scenario,
            command=command,
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            is_quick=is_quick,
            commit=machine.commit(),
            hardware=machine.hardware(),
            load_before=machine.load_averages(),
            versions=machine.versions(),
            settings=dict(settings),
        )
        self.step = on_step
        self.on_round: Callable[[], None] = lambda: None
        self._started = time.perf_counter()

    def extend(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Add raw values to a series, thinned out if there are very many."""
        series = self.report.series.setdefault(name, Series(unit))
        series.values.extend(round(value, 3) for value in thinned(values, _MAX_VALUES))

    def count(self, name: str, value: float) -> None:
        """Add one value to a series without a unit."""
        self.extend(name, "", [float(value)])

    def figure(self, name: str, unit: str, value: float, better: Better = "") -> None:
        """Add this round's value of a figure."""
        self.report.figures.setdefault(name, Figure(unit, better)).add(round(value, 6))

    def ratio(self, name: str, these: str, those: str, better: Better) -> None:
        """Add the ratio of two figures in this round: whatever slowed down the whole round cancels out."""
        one, other = self.report.values(these), self.report.values(those)
        if one and other and other[-1]:
            self.figure(name, "times", one[-1] / other[-1], better)

    def note(self, text: str) -> None:
        self.report.notes.append(text)

    def rounds(
        self, contestants: Sequence[T], num: int, pids: Sequence[int], measure: Callable[[T], None]
    ) -> Iterator[int]:
        """Measure every contestant once a round, each of them first in turn; yields at the end of every round.

        Records how many cores processes other than `pids` used meanwhile: a busy machine explains bad figures.
        """
        for index in range(num):
            first = index % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                self.step(f"round {index + 1}, {contestant}")
                busy_s, own_s, started = machine.busy_cpu_s(), machine.cpu_s_of(pids), time.perf_counter()
                measure(contestant)
                after_s = machine.busy_cpu_s()
                if busy_s is not None and after_s is not None:
                    used_s = after_s - busy_s - (machine.cpu_s_of(pids) - own_s)
                    self.figure(_OTHERS, "cores", max(0.0, used_s / (time.perf_counter() - started)))
            yield index
            self.on_round()

    def close(self) -> None:
        self.report.duration_s = round(time.perf_counter() - self._started, 1)
        self.report.load_after = machine.load_averages()

    def note_busy_machine(self) -> None:
        """Note how busy other processes were: it affects every time that was measured."""
        others = self.report.values(_OTHERS)
        if others and median(others) > _BUSY_CORES:
            self.note(f"other processes kept {median(others):.2g} cores busy during the measurement")


@dataclass(frozen=True, slots=True)
class FigureComparison:
    name: str
    before: Figure
    after: Figure
    ratio: float  # of the medians, after to before
    verdict: Verdict


def compare(before: Report, after: Report) -> list[FigureComparison]:
    """All figures that both reports have."""
    if before.scenario != after.scenario:
        raise InvalidArgument(f"cannot compare a report of {before.scenario} with one of {after.scenario}")
    shared = [name for name in before.figures if name in after.figures]
    return [_compared(name, before.figures[name], after.figures[name]) for name in shared]


def verdict(before: Figure, after: Figure) -> Verdict:
    """A difference is real if every round of one report lies beyond every round of the other.

    By chance alone that happens once in 35 times with four rounds each, and once in 126 with five.
    """
    if min(len(before.values), len(after.values)) < MIN_ROUNDS:
        return "too few rounds"
    is_higher = min(after.values) > max(before.values)
    if not is_higher and not max(after.values) < min(before.values):
        return "noise"
    if not before.better:
        return "changed"
    return "better" if is_higher == (before.better == "higher") else "worse"


def cautions(before: Report, after: Report) -> list[str]:
    """Why the two reports may not be comparable."""
    found = []
    if before.hardware != after.hardware:
        found.append("the reports are from different machines: compare only ratios within one report")
    for name in before.settings.keys() | after.settings.keys():
        one, other = before.settings.get(name), after.settings.get(name)
        if one != other:
            found.append(f"setting {name} differs: {one} and {other}")
    for name, report in (("first", before), ("second", after)):
        if report.is_partial:
            found.append(f"the {name} run was interrupted")
        if report.is_quick:
            found.append(f"the {name} run was a quick one")
    cores = int(before.hardware.get("cores") or 1)
    if before.load_before and after.load_before:
        one, other = before.load_before[0], after.load_before[0]
        if abs(one - other) / cores > _LOAD_DIFFERENCE:
            found.append(f"the machine was not equally busy: load {one:g} and {other:g} at the start")
    return sorted(found)


def _compared(name: str, before: Figure, after: Figure) -> FigureComparison:
    one, other = (figure.summary.median if figure.summary else math.nan for figure in (before, after))
    return FigureComparison(name, before, after, other / one if one else math.nan, verdict(before, after))
