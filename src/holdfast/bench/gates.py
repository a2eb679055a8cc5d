"""Statistics of measured values, and gates: what the values must fulfil, and why they do or do not. Pure functions.

Values that cannot be judged (none, not finite, all zero) fail every gate. A gate that cannot fail proves nothing, so
`control` inverts one for a contestant that must fail it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidArgument

KV_SPREAD = 0.01
BUCKET_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Summary:
    """`low` and `high` are the smallest and the largest value; no outlier is left out."""

    count: int
    median: float
    low: float
    high: float


def percentile(values: Sequence[float], rank: float) -> float:
    """The value below which `rank` percent of the values lie, interpolated between neighbours."""
    if not values or not 0 <= rank <= 100:
        raise InvalidArgument(f"percentile {rank} of {len(values)} values is not defined")
    if not all(math.isfinite(value) for value in values):
        raise InvalidArgument("a percentile needs finite values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * rank / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def summarize(values: Sequence[float]) -> Summary:
    return Summary(len(values), median(values), min(values), max(values))


def thinned(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` of the values, evenly spaced."""
    step = math.ceil(len(values) / limit) or 1
    return list(values[::step])


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    passed: bool
    reason: str


def percentile_at_most(name: str, values: Sequence[float], rank: float, limit: float, unit: str) -> Gate:
    if problem := _problem(values):
        return Gate(name, False, problem)
    found = percentile(values, rank)
    return Gate(name, found <= limit, f"p{rank:g} of {len(values)} values is {found:.4g} {unit}, limit {limit:g}")


def median_at_most(name: str, values: Sequence[float], limit: float, unit: str) -> Gate:
    return percentile_at_most(name, values, 50, limit, unit)


def median_at_least(name: str, values: Sequence[float], least: float, unit: str) -> Gate:
    if problem := _problem(values):
        return Gate(name, False, problem)
    found = median(values)
    return Gate(name, found >= least, f"p50 of {len(values)} values is {found:.4g} {unit}, at least {least:g} required")


def all_right(name: str, num_done: int, num_wrong: int) -> Gate:
    """Fails if nothing was done."""
    reason = f"{num_wrong} of {num_done} were wrong" if num_done > 0 else "nothing was done"
    return Gate(name, num_done > 0 and num_wrong == 0, reason)


def under_load(name: str, in_flight: Sequence[float], num_required: int) -> Gate:
    """Passes if enough kills happened while a turn was in flight; the other kills do not count."""
    num_loaded = sum(number > 0 for number in in_flight)
    reason = f"{num_loaded} kills with turns in flight, {num_required} required; {len(in_flight) - num_loaded} without"
    return Gate(name, num_loaded >= max(1, num_required), reason)


def none_missing(name: str, num_found: int, num_expected: int) -> Gate:
    """Passes if the two are equal and above zero."""
    return Gate(name, num_found == num_expected > 0, f"{num_found} of {num_expected}")


def within_budget(name: str, values: Sequence[float], base: float, budget: float, unit: str) -> Gate:
    """Passes if no value exceeds `base` by more than `budget`, with a tolerance for the allocator."""
    if problem := _problem([*values, base]):
        return Gate(name, False, problem)
    growth = max(values) - base
    passed = base > 0 and growth <= budget * (1 + BUCKET_TOLERANCE)
    return Gate(name, passed, f"at most {growth:.0f} {unit} above the initial {base:.0f}, budget {budget:.0f}")


def faster(name: str, these: Sequence[float], those: Sequence[float]) -> Gate:
    """Passes if the median of `these` is lower than that of `those`."""
    if problem := _problem(these) or _problem(those):
        return Gate(name, False, problem)
    ratio = median(these) / median(those) if median(those) else math.inf
    return Gate(name, ratio < 1, f"{ratio:.3g} times as long ({len(these)} and {len(those)} values)")


def stays_flat(name: str, values: Sequence[float], tolerance: float) -> Gate:
    """Passes if the median of the last third is at most `tolerance` above that of the first third.

    The very first value is left out: it is measured on an empty history.
    """
    third = len(values) // 3
    if third < 2:
        return Gate(name, False, f"{len(values)} values are too few to compare thirds")
    if problem := _problem(values):
        return Gate(name, False, problem)
    early, late = median(values[1 : 1 + third]), median(values[-third:])
    ratio = late / early if early else math.inf
    return Gate(name, ratio <= 1 + tolerance, f"{early:.4g} early, {late:.4g} late: {ratio:.3g} times")


def share_at_least(name: str, values: Sequence[float], least: float) -> Gate:
    """Passes if a share of at least `least` of the values is 1; the others are 0. All 0 is a valid result."""
    if not values:
        return Gate(name, False, "nothing was measured")
    return Gate(name, sum(values) >= least * len(values), f"{sum(values):g} of {len(values)}, {least:.0%} required")


def control(name: str, gate: Gate, num_values: int) -> Gate:
    """Passes if `gate` failed and was judged on at least one value."""
    if not num_values:
        return Gate(name, False, "the control was not measured")
    outcome = "passed, but must fail" if gate.passed else "failed, as it must"
    return Gate(name, not gate.passed, f"the control {outcome}: {gate.reason}")


def kv_bounded(
    name: str, live_bytes: Sequence[float], formula_bytes: Sequence[float], memory_bytes: Sequence[Sequence[float]]
) -> Gate:
    """Passes if the cache has stopped growing: equal to the formula, never zero, and the process memory is flat.

    The first two hold a value for every turn since the window is full, `memory_bytes` the same turns by bucket.
    """
    problems = _differences(live_bytes, formula_bytes, "values differ from the formula")
    if num_zero := sum(not value for value in live_bytes):
        problems.append(f"{num_zero} of {len(live_bytes)} values are zero")
    if not _problem(live_bytes):
        spread = (max(live_bytes) - min(live_bytes)) / median(live_bytes) if median(live_bytes) else math.inf
        if spread >= KV_SPREAD:
            problems.append(f"the spread is {spread:.1%}, it must be below {KV_SPREAD:.0%}")
    growth = math.nan
    if problem := _bucket_problem(memory_bytes):
        problems.append(f"memory: {problem}")
    else:
        medians = [median(values) for values in memory_bytes]
        growth = max(medians) / min(medians) - 1 if min(medians) else math.inf
        if max(medians) > min(medians) * (1 + BUCKET_TOLERANCE):
            problems.append(f"memory differs by {growth:.1%} between buckets, {BUCKET_TOLERANCE:.0%} is allowed")
    if problems:
        return Gate(name, False, "; ".join(problems))
    memory = f"memory within {growth:.1%} over {len(memory_bytes)} buckets"
    return Gate(name, True, f"{live_bytes[-1]:.0f} bytes on all {len(live_bytes)} turns with a full window; {memory}")


def prefill_bounded(
    name: str, forwarded: Sequence[float], wanted: Sequence[float], first_token: Sequence[Sequence[float]]
) -> Gate:
    """Passes if each turn computes exactly its new tokens and the pending one, and stays as fast as at the beginning.

    The first two hold a value for every turn. `first_token` holds the times to the first token since the window is
    full, by bucket, in any unit: multiples of a fixed piece of work leave out how busy the machine was.
    """
    problems = _differences(forwarded, wanted, "turns computed a different number of tokens")
    ratio = math.nan
    if problem := _bucket_problem(first_token):
        problems.append(f"time to first token: {problem}")
    else:
        early = median(first_token[0])
        ratio = median(first_token[-1]) / early if early else math.inf
        if ratio > 1 + BUCKET_TOLERANCE:
            problems.append(f"time to first token: p50 of the last bucket is {ratio:.3g} times that of the first")
    if problems:
        return Gate(name, False, "; ".join(problems))
    course = f"p50 of the last of {len(first_token)} buckets is {ratio:.3g} times that of the first"
    exact = f"exactly the appended and pending tokens on all {len(forwarded)} turns"
    return Gate(name, True, f"{exact}; time to first token: {course}")


def _problem(values: Sequence[float]) -> str:
    """Why a series cannot be judged; empty if it can."""
    if not values:
        return "nothing was measured"
    if not all(math.isfinite(value) for value in values):
        return "some values are not finite"
    return "" if any(values) else "all values are zero: nothing was measured"


def _bucket_problem(buckets: Sequence[Sequence[float]]) -> str:
    """Why buckets cannot be compared; empty if they can."""
    if len(buckets) < 2:
        return f"at least two buckets with a full window are needed, there are {len(buckets)}"
    problems = ((number, _problem(values)) for number, values in enumerate(buckets, 1))
    return next((f"bucket {number} of {len(buckets)}: {problem}" for number, problem in problems if problem), "")


def _differences(found: Sequence[float], expected: Sequence[float], what: str) -> list[str]:
    """What is wrong with a series that must equal another one, value by value."""
    problems = [problem] if (problem := _problem(found)) else []
    if len(found) != len(expected):
        problems.append(f"{len(found)} values for {len(expected)} turns")
    wrong = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
    if wrong:
        last = f"the last one {wrong[-1][0]:g} instead of {wrong[-1][1]:g}"
        problems.append(f"{len(wrong)} of {len(found)} {what}, {last}")
    return problems
