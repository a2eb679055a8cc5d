"""One step of the engine: forward the planned rows, commit, sample. A bad row fails alone."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.engine.interface import Engine, Logits, Row
from holdfast.engine.run import Run
from holdfast.engine.sampling import Pick
from holdfast.engine.scheduler import Plan, Work
from holdfast.errors import ConstraintFailed, HoldfastError, NonFiniteLogits, SessionFailed
from holdfast.generation import Sampled, SamplingParams

Result = Sampled | HoldfastError | None


class Outcome(NamedTuple):
    """What a step did for one run: a token, a failure, or only progress (None)."""

    run: Run
    result: Result


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
        results = _sample(engine, logits, works, rows)
    except Exception as exc:
        if engine.is_fatal(exc):
            raise
        if len(works) > 1:
            return [outcome for work in works for outcome in forward(engine, [work])]
        return [Outcome(works[0].run, as_holdfast_error(exc))]
    return _commit(works, rows, results, time.perf_counter() - started)


def _row(work: Work) -> Row:
    run, num_tokens = work
    samples = run.params is not None and num_tokens == run.num_to_compute
    return Row(run.sequence.slab, run.sequence.next_tokens(num_tokens), 1 if samples else 0)


def _sample(engine: Engine, logits: Logits, works: list[Work], rows: list[Row]) -> list[Result]:
    """One result a row. A run whose constraint allows nothing fails without being sampled."""
    results: list[Result] = [None] * len(works)
    picks: dict[int, Pick] = {}
    num_logits = 0
    for index, ((run, _), row) in enumerate(zip(works, rows, strict=True)):
        if row.num_logits and run.params is not None:
            try:
                picks[index] = _pick(run, run.params, num_logits)
            except ConstraintFailed as exc:
                results[index] = exc
        num_logits += row.num_logits
    for index, outcome in zip(picks, engine.sample(logits, list(picks.values())), strict=True):
        results[index] = outcome
    return results


def _pick(run: Run, params: SamplingParams, row: int) -> Pick:
    return Pick(
        row=row,
        position=len(run.sequence.tokens),
        params=params,
        sampled=run.sampled,
        visible=run.sequence.visible_tokens() if params.repetition_penalty != 1 else (),
        allowed=run.allowed(),
    )


def _commit(works: list[Work], rows: list[Row], results: list[Result], duration_s: float) -> list[Outcome]:
    """Advance slabs and sequences. A run whose constraint failed leaves its last token pending, as it was."""
    outcomes = []
    for (run, num_tokens), row, sampled in zip(works, rows, results, strict=True):
        result = sampled
        if isinstance(result, ConstraintFailed):
            outcomes.append(Outcome(run, result))
            continue
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
