"""Same history, seed and parameters: the same tokens, whatever the chunks and the neighbours. Real model, fp32."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from holdfast.engine.sampling import gumbel
from holdfast.engine.slab import SlabPool
from holdfast.engine.torch import TorchEngine, load_engine
from holdfast.engine.worker import Worker
from holdfast.generation import Sampled, SamplingParams
from holdfast.models import GGUFSource
from tests.conftest import SMALL
from tests.driving import run_chunks

NEAR_TIE = 1e-3
NUM_TOKENS = 30


@pytest.fixture
async def worker(default_engine: TorchEngine) -> AsyncIterator[Worker]:
    worker = Worker(default_engine)
    worker.start()
    yield worker
    worker.stop()


@dataclass
class Drawn:
    tokens: list[int]
    near_ties: set[int]  # indices at which rounding may decide


async def _generate(worker: Worker, prompt: list[int], sizes: list[int], params: SamplingParams) -> Drawn:
    sequence = await worker.open()
    start, turn = 0, 0
    while start < len(prompt):
        size = sizes[turn % len(sizes)]
        await worker.append(sequence, prompt[start : start + size])
        start, turn = start + size, turn + 1
    drawn = Drawn([], set())
    async with worker.generate(sequence, params) as stream:
        async for batch in stream:
            for event in batch:
                if isinstance(event, Sampled):
                    position = len(prompt) + len(drawn.tokens)
                    if _gap(event, position, params) < NEAR_TIE:
                        drawn.near_ties.add(len(drawn.tokens))
                    drawn.tokens.append(event.token)
    await worker.close(sequence)
    return drawn


def _gap(event: Sampled, position: int, params: SamplingParams) -> float:
    """By how much the drawn token won, in the scores it was drawn by."""
    ids = np.array([token for token, _ in event.top])
    scores = np.array([logprob for _, logprob in event.top])
    if params.temperature:
        scores = scores / params.temperature + gumbel(params.seed, position, ids)
    first, second = np.sort(scores)[::-1][:2]
    return float(first - second)


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_tokens_do_not_depend_on_chunks_or_neighbours(worker: Worker, temperature: float) -> None:
    prompt = [int(token) for token in np.random.default_rng(2).integers(100, 40_000, 70)]
    params = SamplingParams(seed=77, max_tokens=NUM_TOKENS, temperature=temperature, top_logprobs=20)
    plain = await _generate(worker, prompt, [len(prompt)], params)
    other = [int(token) for token in np.random.default_rng(3).integers(100, 40_000, 40)]
    results = await asyncio.gather(
        _generate(worker, prompt, [1, 11, 2], params),
        _generate(worker, prompt, [29, 1, 7], params),
        _generate(worker, other, [13], SamplingParams(seed=5, max_tokens=20, temperature=1.0, top_logprobs=2)),
    )
    excluded = 0
    for drawn in results[:2]:
        pairs = zip(plain.tokens, drawn.tokens, strict=True)
        split = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if split is not None:
            assert split in plain.near_ties
            excluded += 1
    print(f"\ntemperature {temperature}: {excluded} of 2 runs parted at a near-tie; {len(plain.near_ties)} near-ties")
    assert excluded < 2


async def test_another_seed_gives_other_tokens(worker: Worker) -> None:
    prompt = [1, 9690, 198, 2683]
    runs = [
        await _generate(worker, prompt, [4], SamplingParams(seed=seed, max_tokens=12, temperature=1.0, top_logprobs=2))
        for seed in (1, 2, 1)
    ]
    assert runs[0].tokens == runs[2].tokens != runs[1].tokens


async def test_restored_and_forked_sessions_continue_as_if_nothing_had_happened(worker: Worker) -> None:
    prompt = [int(token) for token in np.random.default_rng(4).integers(100, 40_000, 70)]
    params = SamplingParams(seed=3, max_tokens=12, temperature=0.8)

    async def generate(sequence: int) -> list[int]:
        async with worker.generate(sequence, params) as stream:
            return [e.token async for batch in stream for e in batch if isinstance(e, Sampled)]

    sequence = await worker.open()
    await worker.append(sequence, prompt)
    fork = await worker.fork(sequence)
    snapshot = await worker.snapshot(sequence)
    expected = await generate(sequence)
    assert await generate(fork) == expected
    restored = await worker.restore(snapshot, prompt)
    assert await generate(restored) == expected
    await worker.rewind(sequence, len(prompt))
    assert await generate(sequence) == expected


def test_bf16_differs_by_rounding_only(default_source: GGUFSource) -> None:
    engine = load_engine(default_source, num_slabs=2, shape=SMALL, dtype="bfloat16", device="cpu")
    pool = SlabPool(2, SMALL)
    tokens = [int(token) for token in np.random.default_rng(6).integers(100, 40_000, 90)]
    single = run_chunks(engine, pool.acquire(4), tokens, [1])
    chunked = run_chunks(engine, pool.acquire(4), tokens, [48])
    worst = float(np.abs(single - chunked).max())
    flips = 1000 * float((single.argmax(-1) != chunked.argmax(-1)).mean())
    print(f"\nbf16, teacher-forced, n=1 against n=48: max |logit difference| {worst:.3f}, {flips:.0f} flips per 1,000")
    assert worst < 4
    assert flips < 150
