"""The turns of a long session as numbers: each turn, grouped into time buckets, and aggregated. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.bench.gates import median, percentile
from holdfast.bench.report import Report

_BUCKET_S = 600.0
_MIN_BUCKETS = 4
_ENOUGH_TURNS = 10  # in a bucket, for a meaningful median
_UNITS = {"s": "s", "ms": "ms", "tokens": "tokens", "bytes": "bytes"}  # by the last word of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMeasurement:
    """One turn; each field is a series of the report.

    `wanted_tokens`: appended and pending ones. `pace_ms`: the time of a short request, the same one in every turn.
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


def turns_of(report: Report, contestant: str) -> list[TurnMeasurement]:
    """Every turn of which all fields were recorded."""
    names = [column.name for column in dataclasses.fields(TurnMeasurement)]
    columns = [report.values(f"{contestant}/{name}") for name in names]
    return [TurnMeasurement(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=False)]


def unit_of(name: str) -> str:
    return _UNITS.get(name.rpartition("_")[2], "")


def bucketize(at_s: Sequence[float], width_s: float) -> list[list[int]]:
    """The indices of the turns in each bucket of `width_s` since the first turn; a bucket may be empty."""
    if not at_s:
        return []
    num = max(1, round((at_s[-1] - at_s[0]) / width_s)) if width_s > 0 else 1
    buckets: list[list[int]] = [[] for _ in range(num)]
    for index, at in enumerate(at_s):
        place = int((at - at_s[0]) / width_s) if width_s > 0 else 0
        buckets[min(place, num - 1)].append(index)
    return buckets


def bucket_width_s(span_s: float, num_turns: int) -> float:
    """About ten minutes, so that buckets are equal. A short run has four buckets, or two if turns are few."""
    least = _MIN_BUCKETS if num_turns >= _MIN_BUCKETS * _ENOUGH_TURNS else 2
    return span_s / max(least, round(span_s / _BUCKET_S))


def in_buckets(turns: Sequence[TurnMeasurement]) -> list[list[TurnMeasurement]]:
    """The turns since the window is full, by bucket."""
    full = [turn for turn in turns if turn.is_full]
    if len(full) < 2:
        return [full] if full else []
    at_s = [turn.at_s for turn in full]
    width_s = bucket_width_s(at_s[-1] - at_s[0], len(full))
    return [[full[index] for index in bucket] for bucket in bucketize(at_s, width_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """`by_bucket` has a value for each bucket that is not empty. The drift is NaN if there is only one."""

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
    medians = by_bucket["turn_ms_p50"]
    return Aggregate(
        num_turns=len(turns),
        num_full=sum(len(bucket) for bucket in buckets),
        latency_drift_p50_s=(medians[-1] - medians[0]) / 1000 if len(medians) > 1 else math.nan,
        by_bucket=by_bucket,
    )
