"""Gates: what must hold of the measured series, and why it does or does not. Pure functions.

Series that cannot be judged (nothing measured, not finite, all zero) fail. A gate that cannot fail proves nothing:
`control` turns one around for a contestant that must fail it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.bench.measure import median, percentile


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    passed: bool
    reason: str


def percentile_at_most(name: str, values: Sequence[float], rank: float, limit: float, unit: str) -> Gate:
    if problem := _unfit(values):
        return Gate(name, False, problem)
    found = percentile(values, rank)
    return Gate(name, found <= limit, f"p{rank:g} of {len(values)} is {found:.3g} {unit}, at most {limit:g} is wanted")


def median_at_least(name: str, values: Sequence[float], least: float, unit: str) -> Gate:
    if problem := _unfit(values):
        return Gate(name, False, problem)
    found = median(values)
    return Gate(name, found >= least, f"the median of {len(values)} is {found:.4g} {unit}, {least:g} or more is wanted")


def median_at_most(name: str, values: Sequence[float], most: float, unit: str) -> Gate:
    if problem := _unfit(values):
        return Gate(name, False, problem)
    found = median(values)
    return Gate(name, found <= most, f"the median of {len(values)} is {found:.4g} {unit}, at most {most:g} is wanted")


def all_right(name: str, num_done: int, num_wrong: int, example: str = "") -> Gate:
    """Nothing done is not all right."""
    if num_done <= 0:
        return Gate(name, False, "nothing was done")
    seen = f": {example}" if example else ""
    return Gate(name, num_wrong == 0, f"{num_wrong} of {num_done} were wrong{seen}")


def control(name: str, gate: Gate, num_values: int) -> Gate:
    """Holds where `gate` was failed, by a contestant with enough values to be judged."""
    if not num_values:
        return Gate(name, False, "the control was not measured")
    return Gate(
        name, not gate.passed, f"the control {'passed' if gate.passed else 'failed, as it must'}: {gate.reason}"
    )


def _unfit(values: Sequence[float]) -> str:
    """Why a series cannot be judged, if so."""
    if not values:
        return "nothing was measured"
    if not all(math.isfinite(value) for value in values):
        return "some values are not finite"
    if not any(values):
        return "all values are zero: nothing was measured"
    return ""
