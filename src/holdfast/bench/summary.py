"""What a series of measurements says: percentiles, median and spread. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Summary:
    """`low` and `high` are the least and the greatest value: the whole spread, nothing left out."""

    count: int
    median: float
    low: float
    high: float


def percentile(values: Sequence[float], rank: float) -> float:
    """The value that `rank` percent of all lie below, between two neighbours where none is exactly there."""
    if not values or not 0 <= rank <= 100:
        raise InvalidArgument(f"no percentile {rank} of {len(values)} values")
    if not all(math.isfinite(value) for value in values):
        raise InvalidArgument("a percentile of values that are not finite means nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def summarize(values: Sequence[float]) -> Summary:
    return Summary(len(values), median(values), min(values), max(values))


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of the values, evenly spread over their course."""
    step = math.ceil(len(values) / most) or 1
    return list(values[::step])
