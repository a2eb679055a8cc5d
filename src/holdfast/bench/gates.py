"""Gates: what must hold of the measured series, and why it does or does not. Pure functions.

Series that cannot be judged (nothing measured, not finite, all zero) fail. A gate that cannot fail proves nothing:
`control` turns one around for a contestant that must fail it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.bench.summary import median, percentile

KV_SPREAD = 0.01
BUCKET_TOLERANCE = 0.1


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


def under_load(name: str, in_flight: Sequence[float], wanted: int) -> Gate:
    """So many kills as were wanted, each with a turn in flight; those without one do not count."""
    num_loaded = sum(number > 0 for number in in_flight)
    idle = len(in_flight) - num_loaded
    passed = num_loaded >= max(1, wanted)
    return Gate(name, passed, f"{num_loaded} kills with turns in flight, {wanted} wanted; {idle} without")


def none_missing(name: str, num_found: int, num_wanted: int) -> Gate:
    """Exactly as many as wanted, and more than none."""
    return Gate(name, num_found == num_wanted > 0, f"{num_found} of {num_wanted}")


def within_budget(name: str, values: Sequence[float], base: float, budget: float, unit: str) -> Gate:
    """Never more than `budget` above `base`, but for what an allocator does."""
    if problem := _unfit([*values, base]):
        return Gate(name, False, problem)
    growth = max(values) - base
    passed = base > 0 and growth <= budget * (1 + BUCKET_TOLERANCE)
    return Gate(name, passed, f"{growth:.0f} {unit} above {base:.0f} at most, the budget is {budget:.0f}")


def faster(name: str, these: Sequence[float], those: Sequence[float]) -> Gate:
    """By the medians; both must have been measured."""
    for values in (these, those):
        if problem := _unfit(values):
            return Gate(name, False, problem)
    ratio = median(these) / median(those) if median(those) else math.inf
    return Gate(name, ratio < 1, f"{ratio:.3g} times the other's, {len(these)} beside {len(those)}")


def stays_flat(name: str, values: Sequence[float], tolerance: float) -> Gate:
    """The last third is no more than `tolerance` above the first; the very first value is left out, as all is new."""
    third = len(values) // 3
    if third < 2:
        return Gate(name, False, f"{len(values)} values have no thirds that can be compared")
    if problem := _unfit(values):
        return Gate(name, False, problem)
    early, late = median(values[1 : 1 + third]), median(values[-third:])
    ratio = late / early if early else math.inf
    return Gate(name, ratio <= 1 + tolerance, f"{early:.4g} early, {late:.4g} late: {ratio:.3g} times")


def share_at_least(name: str, values: Sequence[float], least: float) -> Gate:
    """Of yes and no, as 1 and 0. All no is a result, not a failure to measure."""
    if not values:
        return Gate(name, False, "nothing was measured")
    return Gate(name, sum(values) >= least * len(values), f"{sum(values):g} of {len(values)}, {least:.0%} are wanted")


def control(name: str, gate: Gate, num_values: int) -> Gate:
    """Holds where `gate` was failed, by a contestant with enough values to be judged."""
    if not num_values:
        return Gate(name, False, "the control was not measured")
    return Gate(
        name, not gate.passed, f"the control {'passed' if gate.passed else 'failed, as it must'}: {gate.reason}"
    )


def kv_bounded(
    name: str,
    live_bytes: Sequence[float],
    formula_bytes: Sequence[float],
    memory_bytes: Sequence[Sequence[float]],
) -> Gate:
    """A cache that has stopped growing: never zero, exactly the formula, within 1%, in flat process memory.

    The first two have a value for every turn since the window is full, `memory_bytes` those turns by bucket.
    """
    problems = [problem] if (problem := _unfit(live_bytes)) else []
    if len(live_bytes) != len(formula_bytes):
        problems.append(f"{len(live_bytes)} values for {len(formula_bytes)} turns with a full window")
    if num_zero := sum(not value for value in live_bytes):
        problems.append(f"{num_zero} of {len(live_bytes)} values are zero")
    wrong = [pair for pair in zip(live_bytes, formula_bytes, strict=False) if pair[0] != pair[1]]
    if wrong:
        live, formula = wrong[-1]
        problems.append(f"{len(wrong)} of {len(live_bytes)} are not the formula's, at last {live:g}, not {formula:g}")
    if not _unfit(live_bytes):
        spread = (max(live_bytes) - min(live_bytes)) / median(live_bytes) if median(live_bytes) else math.inf
        if spread >= KV_SPREAD:
            problems.append(f"the spread is {spread:.1%}, less than {KV_SPREAD:.0%} is wanted")
    if problem := _buckets_unfit(memory_bytes):
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
    name: str,
    forwarded: Sequence[float],
    wanted: Sequence[float],
    first_token: Sequence[Sequence[float]],
) -> Gate:
    """Each turn forwards its new tokens and the pending one, no more and no less, and is as fast at the end as before.

    The first two have a value for every turn. `first_token` has the times to the first token since the window is full,
    by bucket, in any unit; as multiples of a fixed piece of work, they leave out how busy the machine was.
    """
    problems = [problem] if (problem := _unfit(forwarded)) else []
    if len(forwarded) != len(wanted):
        problems.append(f"{len(forwarded)} values for {len(wanted)} turns")
    wrong = [pair for pair in zip(forwarded, wanted, strict=False) if pair[0] != pair[1]]
    if wrong:
        found, new = wrong[-1]
        problems.append(
            f"{len(wrong)} of {len(forwarded)} turns forwarded other tokens, at last {found:g}, not {new:g}"
        )
    ratio = math.nan
    if problem := _buckets_unfit(first_token):
        problems.append(f"time to first token: {problem}")
    else:
        early = median(first_token[0])
        ratio = median(first_token[-1]) / early if early else math.inf
        if ratio > 1 + BUCKET_TOLERANCE:
            problems.append(f"time to first token: p50 of the last bucket is {ratio:.3g} times that of the first")
    if problems:
        return Gate(name, False, "; ".join(problems))
    exactly = f"appended and pending tokens exactly, on all {len(forwarded)} turns"
    course = f"p50 of the last of {len(first_token)} buckets is {ratio:.3g} times that of the first"
    return Gate(name, True, f"{exactly}; time to first token: {course}")


def _unfit(values: Sequence[float]) -> str:
    """Why a series cannot be judged, if so."""
    if not values:
        return "nothing was measured"
    if not all(math.isfinite(value) for value in values):
        return "some values are not finite"
    if not any(values):
        return "all values are zero: nothing was measured"
    return ""


def _buckets_unfit(buckets: Sequence[Sequence[float]]) -> str:
    """Why buckets cannot be compared, if so."""
    if len(buckets) < 2:
        return f"two buckets with a full window are needed, there are {len(buckets)}"
    for number, values in enumerate(buckets, 1):
        if problem := _unfit(values):
            return f"bucket {number} of {len(buckets)}: {problem}"
    return ""
