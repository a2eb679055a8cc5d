"""Several tokens in one native call: the tokens and logprobs of single steps, bit by bit, and soon enough over."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast.engine.interface import Engine, Row
from holdfast.engine.native import engine as native
from holdfast.engine.run import Run
from holdfast.engine.sampling import Pick
from holdfast.engine.sequences import Sequences
from holdfast.engine.slab import Slab, SlabPool, SlabShape
from holdfast.engine.speculation import NGram, Speculator
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from tests import tiny
from tests.driving import run_chunks
from tests.engine_cases import native_engine, needs_native, random_tokens

pytestmark = needs_native
SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8, rewind_tokens=40)
PARAMS = (
    SamplingParams(seed=5, temperature=0),
    SamplingParams(seed=6, temperature=1),
    SamplingParams(seed=2**64 - 1, temperature=0.3, choice=3),
)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts end by their tokens, not by the clock of a busy machine."""
    monkeypatch.setattr(native, "_BURST_S", 60.0)


def _engine(dtype: str = "float32", **options: Any) -> Any:
    return native_engine("llama", num_slabs=3, shape=SHAPE, dtype=dtype, **options)


def _slabs(engine: Engine) -> list[Slab]:
    """Three slabs with histories of different lengths, the last two around the end of the window."""
    pool, slabs = SlabPool(engine.num_slabs, engine.shape), []
    for length in (3, 15, 30):
        slabs.append(pool.acquire(2))
        run_chunks(engine, slabs[-1], random_tokens(length, tiny.VOCABULARY), [8])
    return slabs


def _picks(slabs: Sequence[Slab], params: Sequence[SamplingParams]) -> list[Pick]:
    return [
        Pick(row=i, position=slab.length + 1, params=p) for i, (slab, p) in enumerate(zip(slabs, params, strict=True))
    ]


def _single_steps(engine: Engine, params: Sequence[SamplingParams], num_steps: int) -> list[list[Any]]:
    slabs, tokens = _slabs(engine), [5, 5, 5]
    found: list[list[Any]] = [[] for _ in slabs]
    for _ in range(num_steps):
        rows = [Row(slab, [token], 1) for slab, token in zip(slabs, tokens, strict=True)]
        drawn: list[Any] = engine.sample(engine.forward(rows), _picks(slabs, params))
        for slab, own, outcome in zip(slabs, found, drawn, strict=True):
            slab.begin_write(1)
            slab.end_write(1)
            own.append(outcome)
        tokens = [outcome.token for outcome in drawn]
    return found


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_burst_draws_what_single_steps_draw_bit_by_bit(dtype: str, deterministic: bool) -> None:
    plain = _single_steps(_engine(dtype, deterministic=deterministic), PARAMS, 40)
    engine = _engine(dtype, deterministic=deterministic)
    slabs = _slabs(engine)
    found = engine.burst([Row(slab, [5], 1) for slab in slabs], _picks(slabs, PARAMS), 40)
    assert found == plain
    assert len({outcome.token for outcome in found[1]}) > 5


def test_a_burst_ends_with_the_step_in_which_a_row_draws_a_token_that_ends_it() -> None:
    plain = _single_steps(_engine(), PARAMS, 12)
    last = plain[1][6].token
    num = 1 + next(i for i, outcome in enumerate(plain[1]) if outcome.token == last)
    for end in ({"eos_token_ids": frozenset({last})}, {"stop_token_ids": frozenset({last, 96})}):
        ending = SamplingParams(seed=6, temperature=1, **end)
        engine = _engine()
        slabs = _slabs(engine)
        params = (PARAMS[0], ending, PARAMS[2])
        found = engine.burst([Row(slab, [5], 1) for slab in slabs], _picks(slabs, params), 12)
        assert found == [row[:num] for row in plain]


def test_a_burst_takes_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_BURST_S", 0.0)
    engine = _engine()
    slabs = _slabs(engine)
    found = engine.burst([Row(slab, [5], 1) for slab in slabs], _picks(slabs, PARAMS), 12)
    assert [len(row) for row in found] == [1, 1, 1]


class _Steps:
    """Counts what an engine is asked for."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards, self.bursts = 0, 0
        forward, burst = engine.forward, engine.burst

        def counted_forward(rows: Any) -> Any:
            self.forwards += 1
            return forward(rows)

        def counted_burst(*asked: Any) -> Any:
            self.bursts += 1
            return burst(*asked)

        monkeypatch.setattr(engine, "forward", counted_forward)
        monkeypatch.setattr(engine, "burst", counted_burst)


def _generated(engine: Any, all_params: Sequence[SamplingParams]) -> Iterator[list[Event]]:
    """The events of runs that go on side by side."""
    sequences = Sequences(engine, max_batch=8, max_recompute_tokens=0)
    events: list[list[Any]] = []
    for index, params in enumerate(all_params):
        sequences.open(index, 2)
        sequences.get(index).append(random_tokens(6 + index, tiny.VOCABULARY))
        events.append([])
        sequences.start(Run(sequences.get(index), events[-1].append, params))
    while len(sequences.scheduler):
        sequences.step()
    for index, own in enumerate(events):
        done = own[-1]
        assert isinstance(done, Done)
        assert done.history_length == 6 + index + done.num_generated == len(sequences.get(index).tokens)
        yield own[:-1]


def test_runs_get_the_same_events_with_and_without_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    all_params = [
        SamplingParams(seed=1, temperature=1, max_tokens=30),
        SamplingParams(seed=2, temperature=0.7, max_tokens=17, stop_token_ids=frozenset(range(20))),
    ]
    engine = _engine()
    steps = _Steps(engine, monkeypatch)
    fast = list(_generated(engine, all_params))
    assert steps.bursts > 1
    slow = _engine()
    monkeypatch.setattr(slow, "can_burst", lambda pick: False)
    assert fast == list(_generated(slow, all_params))


def test_the_first_token_of_a_run_does_not_wait_for_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    sequences = Sequences(engine, max_batch=8, max_recompute_tokens=0)
    events: list[Any] = []
    sequences.open(1, 2)
    sequences.get(1).append([5])
    sequences.start(Run(sequences.get(1), events.append, SamplingParams(seed=1, max_tokens=9)))
    sequences.step()
    assert [type(event) for event in events] == [Sampled]
    sequences.step()
    assert len(events) == 10  # the other eight in one burst, and the end
    assert events[-1].stop_reason is StopReason.MAX_TOKENS


def test_a_prompt_that_waits_ends_the_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    sequences = Sequences(engine, max_batch=8, max_recompute_tokens=0)
    events: list[Any] = []
    for index in (1, 2):
        sequences.open(index, 2)
        sequences.get(index).append(random_tokens(20, tiny.VOCABULARY))
    sequences.start(Run(sequences.get(1), events.append, SamplingParams(seed=1, max_tokens=30)))
    while len(events) < 2:
        sequences.step()
    sequences.start(Run(sequences.get(2), lambda event: None, SamplingParams(seed=1, max_tokens=1)))
    num = len(events)
    sequences.step()  # a token of the first run, a chunk of the second
    assert len(events) == num + 1


@pytest.mark.parametrize(("speculation", "longest"), [(True, 3), (False, 8)])
def test_a_run_that_drafts_looks_for_a_draft_after_a_few_tokens(speculation: bool, longest: int) -> None:
    speculator = Speculator(NGram(), draft_length=7, row_cost=0.25)
    sequences = Sequences(_engine(), max_batch=8, max_recompute_tokens=0, speculator=speculator)
    events: list[Any] = []
    sequences.open(1, 2)
    sequences.get(1).append([5])
    params = SamplingParams(seed=1, max_tokens=9, temperature=1, speculation=speculation)
    sequences.start(Run(sequences.get(1), events.append, params))
    sequences.step()
    sequences.step()
    assert sum(isinstance(event, Sampled) for event in events) == 1 + longest
