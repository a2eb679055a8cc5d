"""One step of the engine: forward the planned rows, commit, sample. A bad row fails alone."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.engine.interface import Engine, Row
from holdfast.engine.run import Run
from holdfast.engine.sampling import Pick
from holdfast.engine.scheduler import Plan, Work
from holdfast.errors import HoldfastError, NonFiniteLogits, SessionFailed
from holdfast.generation import Sampled


class Outcome(NamedTuple):
    """What a step did for one run: a token, a failure, or only progress (None)."""

    run: Run
    result: Sampled | HoldfastError | None


def step(engine: Engine, plan: Plan) -> Iterable[Outcome]:
    """Both forwards of a step, decoding rows first. Mutates slabs and sequences."""
    if plan.decode:
        yield from forward(engine, plan.decode)
    if plan.prefill:
        yield from forward(engine, plan.prefill)


def forward(engine: Engine, works: list[Work]) -> list[Outcome]:
    """One forward over `works`; where it raises, each row alone (a repeated write changes nothing)."""
    started = time.perf_counter()
    rows = [_row(work) for work in works]
    for row in rows:
        row.slab.begin_write(len(row.tokens))
    try:
        logits = engine.forward(rows)
        picked = engine.sample(logits, list(_picks(works, rows)))
    except Exception as exc:
        if engine.is_fatal(exc):
            raise
        if len(works) > 1:
            return [outcome for work in works for outcome in forward(engine, [work])]
        return [Outcome(works[0].run, as_holdfast_error(exc))]
    return _commit(works, rows, picked, time.perf_counter() - started)


def _row(work: Work) -> Row:
    run, num_tokens = work
    samples = run.params is not None and num_tokens == run.num_to_compute
    return Row(run.sequence.slab, run.sequence.next_tokens(num_tokens), 1 if samples else 0)


def _picks(works: list[Work], rows: list[Row]) -> Iterable[Pick]:
    index = 0
    for (run, _), row in zip(works, rows, strict=True):
        if row.num_logits and run.params is not None:
            repeats = run.params.repetition_penalty != 1
            yield Pick(
                row=index,
                position=len(run.sequence.tokens),
                params=run.params,
                sampled=run.sampled,
                visible=run.sequence.visible_tokens() if repeats else (),
            )
        index += row.num_logits


def _commit(
    works: list[Work], rows: list[Row], picked: list[Sampled | NonFiniteLogits], duration_s: float
) -> list[Outcome]:
    outcomes, results = [], iter(picked)
    for (run, num_tokens), row in zip(works, rows, strict=True):
        result: Sampled | HoldfastError | None = next(results) if row.num_logits else None
        if not run.sampled:
            run.prefill_tokens += num_tokens
            run.prefill_duration_s += duration_s
        row.slab.end_write(num_tokens)
        try:
            run.sequence.computed(num_tokens)
        except SessionFailed as exc:
            result = exc
        if isinstance(result, NonFiniteLogits):
            run.sequence.failure = result
        outcomes.append(Outcome(run, result))
    return outcomes


def as_holdfast_error(exc: Exception) -> HoldfastError:
    """What the engine raised, in words that a caller can act on."""
    if isinstance(exc, HoldfastError):
        return exc
    failure = SessionFailed(f"the model failed on this sequence: {type(exc).__name__}: {exc}")
    failure.__cause__ = exc
    return failure
