"""A bench while it runs: series grow, every round is saved, and whatever ends it finds a report ready."""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.bench import machine
from holdfast.bench.report import Better, Figure, Report, Series
from holdfast.bench.summary import median, thinned

MOST_AT_ONCE = 5000
OTHERS = "cpu_others"
NOTEWORTHY_CORES = 0.2


class Results:
    """Mutable. `step` says what is being done now; `on_round` is called by the scenario after every round."""

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
        """More raw values of a series; of very many, some."""
        series = self.report.series.setdefault(name, Series(unit))
        series.values.extend(round(value, 3) for value in thinned(values, MOST_AT_ONCE))

    def figure(self, name: str, unit: str, value: float, better: Better = "") -> None:
        """One round's value of a figure."""
        self.report.figures.setdefault(name, Figure(unit, better)).add(round(value, 6))

    def ratio(self, name: str, these: str, those: str, better: Better) -> None:
        """This round's value of one figure to another's. What slowed the whole round down cancels out."""
        one, other = self.report.values(these), self.report.values(those)
        if one and other and other[-1]:
            self.figure(name, "times", one[-1] / other[-1], better)

    @contextlib.contextmanager
    def watching_others(self, own_cpu_s: Callable[[], float]) -> Iterator[None]:
        """A figure for how many cores others kept busy meanwhile: a busy machine explains bad figures."""
        busy, own, started = machine.busy_cpu_s(), own_cpu_s(), time.perf_counter()
        yield
        after = machine.busy_cpu_s()
        if busy is not None and after is not None:
            used = after - busy - (own_cpu_s() - own)
            self.figure(OTHERS, "cores", max(0.0, used / (time.perf_counter() - started)))

    def close(self) -> None:
        self.report.duration_s = round(time.perf_counter() - self._started, 1)
        self.report.load_after = machine.load_averages()

    def caution(self) -> None:
        """Say so where others were at work: their share is in every time that was measured."""
        others = self.report.values(OTHERS)
        if others and median(others) > NOTEWORTHY_CORES:
            self.report.notes.append(f"other processes kept {median(others):.2g} cores busy while this was measured")
