"""One step of the engine: forward the planned rows, sample, commit. A row that fails does not fail the others."""

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from holdfast.engine.interface import BurstingEngine, Engine, Logits, Row
from holdfast.engine.run import Run
from holdfast.engine.sampling import Pick
from holdfast.engine.scheduler import Plan, Work
from holdfast.errors import ConstraintFailed, HoldfastError, NonFiniteLogits, SessionFailed
from holdfast.generation import Sampled

Result = Sampled | HoldfastError | None


class Outcome(NamedTuple):
    """The result of a step for one run: a token, an error, or None for progress without a token."""

    run: Run
    result: Result


def step(engine: Engine, plan: Plan) -> Iterator[Outcome]:
    """Both forwards of a step, decoding rows first. Mutates slabs and sequences.

    The caller must handle each outcome before it asks for the next: a run that has ended gets no more of them.
    """
    if plan.decode:
        num_ahead = _num_ahead(engine, plan)
        yield from _burst(engine, plan.decode, num_ahead) if num_ahead > 1 else forward(engine, plan.decode)
    if plan.prefill:
        yield from forward(engine, plan.prefill)


def forward(engine: Engine, works: list[Work]) -> Iterator[Outcome]:
    """One forward over `works`; if it raises, each row alone (writing a row again changes nothing)."""
    started = time.perf_counter()
    rows = [_row(work) for work in works]
    for row in rows:
        row.slab.begin_write(len(row.tokens))
    try:
        logits = engine.forward(rows)
        results = _sample(engine, logits, _firsts(works, rows))
    except Exception as exc:
        if engine.is_fatal(exc):
            raise
        if len(works) > 1:
            for work in works:
                yield from forward(engine, [work])
        else:
            yield Outcome(works[0].run, as_holdfast_error(exc))
        return
    yield from _commit(works, results, time.perf_counter() - started)
    yield from _verify(engine, logits, works, rows)


def _row(work: Work) -> Row:
    run, num_tokens, draft = work
    samples = run.params is not None and num_tokens == run.num_to_compute
    return Row(run.sequence.slab, [*run.sequence.next_tokens(num_tokens), *draft], 1 + len(draft) if samples else 0)


def _firsts(works: list[Work], rows: list[Row]) -> list[tuple[Run, int] | None]:
    """For each work the run to sample for and its first row of logits; None: nothing is sampled."""
    firsts: list[tuple[Run, int] | None] = []
    num_logits = 0
    for work, row in zip(works, rows, strict=True):
        firsts.append((work.run, num_logits) if row.num_logits else None)
        num_logits += row.num_logits
    return firsts


def _sample(engine: Engine, logits: Logits, asked: Sequence[tuple[Run, int] | None]) -> list[Result]:
    """One result per entry. A run whose constraint allows no token fails without sampling."""
    results: list[Result] = [None] * len(asked)
    picks: dict[int, Pick] = {}
    for index, ask in enumerate(asked):
        if ask is None:
            continue
        try:
            picks[index] = _pick(*ask)
        except ConstraintFailed as exc:
            results[index] = exc
    for index, outcome in zip(picks, engine.sample(logits, list(picks.values())), strict=True):
        results[index] = outcome
    return results


def _pick(run: Run, row: int) -> Pick:
    assert run.params is not None
    return Pick(
        row=row,
        position=len(run.sequence.tokens),
        params=run.params,
        sampled=run.sampled,
        visible=run.sequence.visible_tokens() if run.params.repetition_penalty != 1 else (),
        allowed=run.allowed(),
    )


def _commit(works: Iterable[Work], results: Iterable[Result], duration_s: float) -> Iterator[Outcome]:
    """Advance slabs and sequences. Where the constraint failed, the last token stays pending."""
    for (run, num_tokens, _), sampled in zip(works, results, strict=True):
        result = sampled
        if isinstance(result, ConstraintFailed):
            yield Outcome(run, result)
            continue
        if not run.sampled:
            run.prefill_tokens += num_tokens
            run.prefill_duration_s += duration_s
        run.sequence.slab.end_write(num_tokens)
        try:
            run.sequence.computed(num_tokens)
        except SessionFailed as exc:
            result = exc
        if isinstance(result, NonFiniteLogits):
            run.sequence.failure = result
        yield Outcome(run, result)


def _verify(engine: Engine, logits: Logits, works: list[Work], rows: list[Row]) -> Iterator[Outcome]:
    """Follow the drafts for as long as the sampled token is the drafted one.

    Each drafted token is an ordinary step whose forward is already done: it is sampled and committed like any other.
    """
    firsts = _firsts(works, rows)
    going = [(work, first[1]) for work, first in zip(works, firsts, strict=True) if first and work.draft]
    for work, _ in going:
        work.run.num_proposed += len(work.draft)
    index = 0
    while going := [
        (work, row)
        for work, row in going
        if index < len(work.draft) and not work.run.is_ended and work.run.sampled[-1] == work.draft[index]
    ]:
        index += 1
        for work, _ in going:
            work.run.num_accepted += 1
        results = _sample(engine, logits, [(work.run, row + index) for work, row in going])
        yield from _commit([Work(work.run, 1) for work, _ in going], results, 0.0)


def _num_ahead(engine: Engine, plan: Plan) -> int:
    """How many tokens the engine may decode in one call: 1 where a prompt waits, a run waits for its first token, or
    the engine cannot sample a row."""
    if plan.prefill or not _bursts(type(engine)):
        return 1
    alone = cast(BurstingEngine, engine)
    num = alone.max_burst()
    for run, _, draft in plan.decode:
        params = run.params
        if draft or not run.sampled or params is None or params.constraint or not alone.can_burst(_pick(run, 0)):
            return 1
        num = min(num, params.max_tokens - len(run.sampled), run.sequence.slab.max_write)
    return num if plan.max_ahead is None else min(num, plan.max_ahead)


@functools.cache
def _bursts(kind: type) -> bool:
    return issubclass(kind, BurstingEngine)


def _burst(engine: Engine, works: list[Work], num_steps: int) -> Iterator[Outcome]:
    """Many steps in one call. Tokens after a run's end are discarded; their cells are beyond the slab's length."""
    rows = [_row(work) for work in works]
    for row in rows:
        row.slab.begin_write(num_steps)
    try:
        picks = [_pick(work.run, index) for index, work in enumerate(works)]
        outcomes = cast(BurstingEngine, engine).burst(rows, picks, num_steps)
    except Exception as exc:
        if engine.is_fatal(exc):
            raise
        yield from forward(engine, works)
        return
    for index in range(len(outcomes[0])):
        going = [(work, found[index]) for work, found in zip(works, outcomes, strict=True) if not work.run.is_ended]
        yield from _commit([work for work, _ in going], [found for _, found in going], 0.0)


def as_holdfast_error(exc: Exception) -> HoldfastError:
    """The exception as a HoldfastError; others become SessionFailed with the original as its cause."""
    if isinstance(exc, HoldfastError):
        return exc
    failure = SessionFailed(f"the model failed on this sequence: {type(exc).__name__}: {exc}")
    failure.__cause__ = exc
    return failure
