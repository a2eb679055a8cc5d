"""The turns of a long session as numbers: each on its own, in buckets of time, and summed up. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.bench.report import Report
from holdfast.bench.summary import median, percentile

_BUCKET_S = 600.0
_LEAST_BUCKETS = 4
_ENOUGH_TURNS = 10  # in a bucket, for a median that means something
_THINGS = ("roof", "door", "wall", "floor", "gate", "stair", "lamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMeasurement:
    """One turn as it was measured; each field is a series of the report.

    `wanted_tokens`: appended and pending. `pace_ms`: what one short question took beside it, the same in every turn.
    """

    at_s: float
    turn_ms: float
    first_token_ms: float
    pace_ms: float
    forwarded_tokens: float
    wanted_tokens: float
    kv_live_bytes: float
    kv_formula_bytes: float
    kv_reserved_bytes: float
    is_full: float
    memory_bytes: float


_UNITS = {"s": "s", "ms": "ms", "tokens": "tokens", "bytes": "bytes"}  # by the end of a name


def bucketize(at_s: Sequence[float], width_s: float) -> list[list[int]]:
    """The indices of the turns in each bucket of `width_s` from the first turn on, also where a bucket has none."""
    if not at_s:
        return []
    num = max(1, round((at_s[-1] - at_s[0]) / width_s)) if width_s > 0 else 1
    buckets: list[list[int]] = [[] for _ in range(num)]
    for index, at in enumerate(at_s):
        place = int((at - at_s[0]) / width_s) if width_s > 0 else 0
        buckets[min(place, num - 1)].append(index)
    return buckets


def bucket_width_s(span_s: float, num_turns: int) -> float:
    """Ten minutes, or as near to it as equal buckets come. A short run has four of them, or two where turns are few."""
    least = _LEAST_BUCKETS if num_turns >= _LEAST_BUCKETS * _ENOUGH_TURNS else 2
    return span_s / max(least, round(span_s / _BUCKET_S))


def in_buckets(turns: Sequence[TurnMeasurement]) -> list[list[TurnMeasurement]]:
    """The turns since the window is full, bucket by bucket."""
    full = [turn for turn in turns if turn.is_full]
    if len(full) < 2:
        return [full] if full else []
    at_s = [turn.at_s for turn in full]
    width_s = bucket_width_s(at_s[-1] - at_s[0], len(full))
    return [[full[index] for index in bucket] for bucket in bucketize(at_s, width_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """`by_bucket` has a value for each bucket that is not empty. The drift is NaN where there is but one."""

    num_turns: int
    num_full: int
    latency_drift_p50_s: float
    by_bucket: Mapping[str, list[float]]


def aggregate_run(turns: Sequence[TurnMeasurement]) -> Aggregate:
    buckets = [bucket for bucket in in_buckets(turns) if bucket]
    names = ("turn_ms", "first_token_ms", "pace_ms", "forwarded_tokens", "kv_live_bytes", "memory_bytes")
    by_bucket = {
        f"{name}_p50": [median([getattr(turn, name) for turn in bucket]) for bucket in buckets] for name in names
    }
    by_bucket["turn_ms_p95"] = [percentile([turn.turn_ms for turn in bucket], 95) for bucket in buckets]
    courses = by_bucket["turn_ms_p50"]
    return Aggregate(
        num_turns=len(turns),
        num_full=sum(len(bucket) for bucket in buckets),
        latency_drift_p50_s=(courses[-1] - courses[0]) / 1000 if len(courses) > 1 else math.nan,
        by_bucket=by_bucket,
    )


def unit_of(name: str) -> str:
    return _UNITS.get(name.rpartition("_")[2], "")


def question_of(number: int) -> str:
    """What is asked in a turn: as long in every one, and never the same."""
    thing = _THINGS[number % len(_THINGS)]
    return f"Entry {number:05d}: the {thing} is done. What is next?"


def turns_of(report: Report, contestant: str) -> list[TurnMeasurement]:
    """Every turn that was recorded whole."""
    names = [column.name for column in dataclasses.fields(TurnMeasurement)]
    columns = [report.values(f"{contestant}/{name}") for name in names]
    return [TurnMeasurement(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=False)]
