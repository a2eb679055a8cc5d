"""Two reports side by side: what got better, what got worse, and what is only noise. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from holdfast.bench.report import Figure, Report
from holdfast.errors import InvalidArgument

MIN_ROUNDS = 4
_BUSY = 0.5  # a difference in load, by core, that makes times incomparable

Verdict = Literal["better", "worse", "changed", "noise", "too few rounds"]


@dataclass(frozen=True, slots=True)
class FigureComparison:
    name: str
    before: Figure
    after: Figure
    ratio: float  # of the medians, after to before
    verdict: Verdict


def compare(before: Report, after: Report) -> list[FigureComparison]:
    if before.scenario != after.scenario:
        raise InvalidArgument(f"{before.scenario} and {after.scenario} cannot be compared")
    shared = [name for name in before.figures if name in after.figures]
    return [_compared(name, before.figures[name], after.figures[name]) for name in shared]


def verdict(before: Figure, after: Figure) -> Verdict:
    """A difference is real where every round of one lies beyond every round of the other.

    With four rounds each, chance alone does that once in 35 times; with five, once in 126.
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
    """Why the two may not be comparable at all."""
    found = []
    if before.hardware != after.hardware:
        found.append("they ran on different machines: only ratios within a report can be compared")
    for name in before.settings.keys() | after.settings.keys():
        one, other = before.settings.get(name), after.settings.get(name)
        if one != other:
            found.append(f"{name} was {one} and is {other}")
    for name, report in (("the first", before), ("the second", after)):
        if report.is_partial:
            found.append(f"{name} was interrupted")
        if report.is_quick:
            found.append(f"{name} is a quick run")
    cores = int(before.hardware.get("cores") or 1)
    if before.load_before and after.load_before:
        one, other = before.load_before[0], after.load_before[0]
        if abs(one - other) / cores > _BUSY:
            found.append(f"the machine was not equally busy: its load was {one:g} and {other:g} at the start")
    return sorted(found)


def _compared(name: str, before: Figure, after: Figure) -> FigureComparison:
    one, other = (figure.summary.median if figure.summary else math.nan for figure in (before, after))
    return FigureComparison(name, before, after, other / one if one else math.nan, verdict(before, after))
