"""Drafts save time and change nothing: the same tokens and logprobs with and without, whatever is drafted."""

import random
from collections.abc import Sequence as List

import httpx
import numpy as np
import pytest
from holdfast_sdk import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.bench.processes import serving
from holdfast.engine.interface import Engine
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.speculation import Draft, DraftModel, DraftRequest, NGram, Pace, Proposer, Speculator
from holdfast.engine.worker import Worker
from holdfast.errors import ConfigError
from holdfast.generation import Done, Sampled, SamplingParams
from holdfast.testing.fake_engine import FakeEngine
from tests import tiny
from tests.engine_cases import native_engine, needs_native

SHAPE = SlabShape(recent=24, max_pin=4, prefill_chunk=16, draft_length=7, rewind_tokens=8)


class Guesses:
    """Drafts of any quality: right as often as it is told to be, by knowing the answer."""

    num_strengths = 1
    max_ahead = 1

    def __init__(self, answer: List[int], start: int, quality: float) -> None:
        self._answer, self._start, self._quality = answer, start, quality
        self._random = random.Random(5)

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        return [Draft(self._draft(request)) for request in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        at = len(request.sequence.tokens) - self._start
        known = [*self._answer[at : at + request.limit], *[0] * request.limit][: request.limit]
        return [token if self._random.random() < self._quality else (token + 1) % 60 for token in known]

    def forget(self, sequence_id: int) -> None:
        pass


async def _generate(
    engine: Engine, prompt: list[int], params: SamplingParams, proposer: Proposer | None = None, row_cost: float = 0.0
) -> tuple[list[Sampled], Done, list[int]]:
    speculator = Speculator(proposer, draft_length=7, row_cost=row_cost) if proposer else None
    worker = Worker(engine, speculator=speculator)
    worker.start()
    try:
        sequence = await worker.open()
        events = []
        async with worker.generate(sequence, params, prompt) as stream:
            async for batch in stream:
                events += batch
        info = worker.info(sequence)
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        tokens = await worker.tokens(sequence)
        done = events[-1]
        assert isinstance(done, Done)
        return [event for event in events if isinstance(event, Sampled)], done, tokens
    finally:
        worker.stop()


_PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "max_tokens": st.integers(1, 60),
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "top_p": st.sampled_from([0.9, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset({7, 21})]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({3})]),
    }
)


@given(given_params=_PARAMS, quality=st.sampled_from([0.0, 0.5, 0.95, 1.0]), size=st.integers(1, 50))
@settings(deadline=None, max_examples=30)
async def test_any_draft_leaves_the_tokens_as_they_are(
    given_params: dict[str, object], quality: float, size: int
) -> None:
    """The fake engine's logits tell of every cell that is read, also across evictions and at the end."""
    params = SamplingParams(**given_params)  # type: ignore[arg-type]
    prompt = [int(token) for token in np.random.default_rng(size).integers(0, 60, size)]
    plain, done, history = await _generate(FakeEngine(num_slabs=1, shape=SHAPE), prompt, params)
    guesses = Guesses([one.token for one in plain], size, quality)
    ours, told, ours_history = await _generate(FakeEngine(num_slabs=1, shape=SHAPE), prompt, params, guesses)
    assert ours == plain
    assert ours_history == history
    assert (told.stop_reason, told.num_generated, told.num_dropped) == (
        done.stop_reason,
        done.num_generated,
        done.num_dropped,
    )
    assert 0 <= told.num_accepted <= told.num_proposed


async def test_right_drafts_save_forwards() -> None:
    engine = FakeEngine(num_slabs=1, shape=SHAPE)
    params = SamplingParams(seed=1, max_tokens=48, temperature=0)
    plain, _, _ = await _generate(engine, [1, 2, 3], params)
    calls = []
    forward = engine.forward
    engine.forward = lambda rows: calls.append(len(rows)) or forward(rows)  # type: ignore[method-assign,func-returns-value]
    _, done, _ = await _generate(engine, [1, 2, 3], params, Guesses([one.token for one in plain], 3, 1.0))
    assert done.num_accepted == done.num_proposed > 30
    assert len(calls) < 15


@needs_native
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_deterministic_kernels_give_the_same_bits(dtype: str, temperature: float) -> None:
    """Random weights repeat themselves soon, so n-grams find much; the window of 24 slides many times."""
    params = SamplingParams(seed=9, max_tokens=150, temperature=temperature, top_logprobs=3)

    def engine() -> Engine:
        return native_engine("qwen3", num_slabs=1, shape=SHAPE, dtype=dtype, deterministic=True)

    prompt = [5, 6, 7, 8, 9] * 6
    plain, _, _ = await _generate(engine(), prompt, params)
    ours, done, _ = await _generate(engine(), prompt, params, NGram())
    assert ours == plain
    guessed, told, _ = await _generate(engine(), prompt, params, Guesses([one.token for one in plain], 30, 0.9))
    assert guessed == plain
    assert told.num_accepted > 50
    if temperature == 0:
        assert done.num_accepted > 20


@needs_native
async def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """The same weights and the same noise: every draft is accepted, also once the window slides."""
    params = SamplingParams(seed=4, max_tokens=60, temperature=0.8)

    def engine(num_slabs: int = 1) -> Engine:
        return native_engine("llama", num_slabs=num_slabs, shape=SHAPE, deterministic=True)

    prompt = [int(token) for token in np.random.default_rng(1).integers(0, tiny.VOCABULARY, 12)]
    plain, _, _ = await _generate(engine(), prompt, params)
    ours, done, _ = await _generate(engine(), prompt, params, DraftModel(engine(), vocab_size=tiny.VOCABULARY))
    assert ours == plain
    assert done.num_accepted == done.num_proposed > 40


@needs_native
async def test_another_model_drafts_and_is_corrected() -> None:
    params = SamplingParams(seed=4, max_tokens=40, temperature=0)
    engine = native_engine("llama", num_slabs=1, shape=SHAPE)
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, tiny.VOCABULARY, 70)]
    plain, _, _ = await _generate(engine, prompt, params)
    draft = DraftModel(native_engine("qwen2", num_slabs=1, shape=SHAPE), vocab_size=tiny.VOCABULARY)
    ours, done, _ = await _generate(engine, prompt, params, draft)
    assert ours == plain
    assert done.num_proposed > done.num_accepted


@needs_native
async def test_a_draft_model_reads_again_after_a_rewind() -> None:
    engine = native_engine("llama", num_slabs=1, shape=SHAPE, deterministic=True)
    draft = DraftModel(native_engine("llama", num_slabs=1, shape=SHAPE, deterministic=True), vocab_size=tiny.VOCABULARY)
    worker = Worker(engine, speculator=Speculator(draft, draft_length=4, row_cost=0.0))
    worker.start()
    params = SamplingParams(seed=4, max_tokens=10, temperature=0)
    try:
        sequence = await worker.open()
        async with worker.generate(sequence, params, [1, 2, 3, 4, 5]) as stream:
            await stream.done()
        await worker.rewind(sequence, 4)
        async with worker.generate(sequence, params, [50, 51, 52]) as stream:
            done = await stream.done()
        assert done.num_accepted == done.num_proposed > 4
        await worker.close(sequence)
        assert draft.num_free_slabs == 1
    finally:
        worker.stop()


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    small = FakeEngine(num_slabs=1, shape=SHAPE, vocab_size=32)
    with pytest.raises(ConfigError, match="vocabulary of 32"):
        DraftModel(small, vocab_size=64)


async def test_whoever_asks_for_no_speculation_gets_none() -> None:
    params = SamplingParams(seed=1, max_tokens=20, temperature=0, speculation=False)
    _, done, _ = await _generate(FakeEngine(num_slabs=1, shape=SHAPE), [1, 2, 3], params, Guesses([], 3, 0.0))
    assert (done.num_proposed, done.num_accepted) == (0, 0)


def test_a_long_history_is_indexed_some_at_a_time() -> None:
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, 50_000, 10_000)]
    sequence = Sequence(1, SlabPool(1, SHAPE).acquire(4), [*tokens, *tokens[9_000:9_010]])
    request = DraftRequest(sequence, SamplingParams(seed=1), 5)
    proposer = NGram()
    found = [proposer.propose([request])[0].tokens for _ in range(3)]
    assert found == [[], [], tokens[9_010:9_015]]


def test_a_run_that_was_last_seen_in_what_a_rewind_removed_gives_no_draft() -> None:
    sequence, proposer = Sequence(1, SlabPool(1, SHAPE).acquire(0)), NGram()
    request = DraftRequest(sequence, SamplingParams(seed=1), 5)
    sequence.append([1, 2, 3, 9, 9, 9, 1, 2, 3, 4])
    proposer.propose([request])
    sequence.rewind(3, max_recompute=10)
    assert proposer.propose([request]) == [Draft([])]


def test_the_pace_follows_what_was_accepted() -> None:
    pace = Pace(row_cost=0.25)
    for _ in range(40):
        pace.learn(4, 4)
    assert pace.length(7) == 7
    for _ in range(60):
        pace.learn(1, 0)
    assert [pace.length(7) for _ in range(30)].count(1) == 1  # one try in 24
    assert Pace(row_cost=2.0).length(7) == 0  # never, where rows are dear
    assert Pace(row_cost=0.0).length(0) == 0


@needs_native
def test_a_server_drafts_reports_and_counts() -> None:
    """The real model over gRPC: what was drafted is told with the end of the generation and in the metrics."""
    text = [int(token) for token in np.random.default_rng(0).integers(100, 40_000, 30)]
    ends = {}
    with serving("--sessions", "2", "--recent", "256") as served, Client(served.grpc) as client:
        for speculation in (True, False):
            with client.create_session() as session:
                session.append(text * 3)
                generation = session.generate(max_tokens=40, temperature=0, seed=1, speculation=speculation)
                list(generation)
                ends[speculation] = generation.done
        metrics = httpx.get(f"{served.http}/metrics").text
    assert ends[True].accepted_draft_tokens > 5
    assert ends[False].proposed_draft_tokens == 0
    assert f'holdfast_draft_tokens_total{{result="accepted"}} {float(ends[True].accepted_draft_tokens)}' in metrics
