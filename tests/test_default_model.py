"""The real default model against the dense oracle, across the window's edge."""

import functools
import pydoc_data.topics

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine, load_engine
from holdfast.engine.window import Window
from holdfast.models import GGUFSource
from tests.conftest import SMALL
from tests.driving import difference, forward, run_chunks
from tests.oracle import dense_logits, weight_names

TOLERANCE = 5e-4
SINK = 4


@pytest.fixture(scope="module")
def text_tokens(default_source: GGUFSource) -> list[int]:
    from holdfast.chat.tokenizer import load_tokenizer

    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return load_tokenizer(default_source).encode(text[:60_000])


@functools.cache
def _state(source: GGUFSource) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(source.file.tensor(name)) for name in weight_names(source.architecture)}


def _truth(source: GGUFSource, tokens: list[int], window: Window) -> NDArray[np.float64]:
    return dense_logits(_state(source), source.architecture, tokens, window, torch.float32).numpy()


@pytest.mark.parametrize("windows", [1, 2, 10])
def test_logits_equal_the_dense_oracle(
    default_engine: TorchEngine, default_source: GGUFSource, text_tokens: list[int], windows: int
) -> None:
    slab = SlabPool(4, SMALL).acquire(SINK)
    tokens = text_tokens[: windows * slab.window.size]
    ours = run_chunks(default_engine, slab, tokens, [48, 1, 17, 1, 1])
    assert difference(ours, _truth(default_source, tokens, slab.window)) <= TOLERANCE


def test_logits_equal_the_oracle_with_neighbours_after_fork_rewind_and_pins(
    default_engine: TorchEngine, default_source: GGUFSource, text_tokens: list[int]
) -> None:
    pool = SlabPool(4, SMALL)
    slab, neighbour, fork = pool.acquire(16), pool.acquire(0), pool.acquire(16)
    tokens, others = text_tokens[:200], text_tokens[500:700]
    for start in range(0, 160, 40):
        part = slice(start, start + 40)
        forward(default_engine, [(slab, tokens[part]), (neighbour, others[part])], num_logits=0)
    default_engine.copy_slab(slab, fork)
    fork.length, fork.high = slab.length, slab.high
    fork.rewind(140)
    branch = tokens[:140] + text_tokens[900:920]
    ours = forward(default_engine, [(slab, tokens[160:200]), (fork, branch[140:]), (neighbour, others[160:200])])
    histories = [(slab, tokens), (fork, branch), (neighbour, others)]
    for (owner, history), logits in zip(histories, ours, strict=True):
        truth = _truth(default_source, history, owner.window)[-len(logits) :]
        assert difference(logits, truth) <= TOLERANCE


@pytest.mark.parametrize("num_tokens", [1800, pytest.param(9600, marks=pytest.mark.slow)])
def test_perplexity_is_flat_with_sinks_and_worse_without(
    default_source: GGUFSource, text_tokens: list[int], num_tokens: int
) -> None:
    shape = SlabShape(recent=160, max_pin=4, prefill_chunk=200, rewind_tokens=0)
    engine = load_engine(default_source, num_slabs=2, shape=shape, device="cpu", dtype="float32")
    pool = SlabPool(2, shape)
    with_sinks, without = pool.acquire(4), pool.acquire(0)
    losses: dict[int, list[float]] = {4: [], 0: []}
    for start in range(0, num_tokens, 200):
        part, targets = text_tokens[start : start + 200], text_tokens[start + 1 : start + 201]
        both = forward(engine, [(with_sinks, part), (without, part)])
        for sink, logits in zip((4, 0), both, strict=True):
            logprobs = torch.from_numpy(logits).log_softmax(-1)
            losses[sink].append(-float(logprobs[torch.arange(200), torch.tensor(targets)].mean()))
    third = len(losses[4]) // 3
    early, late = np.exp(np.mean(losses[4][1 : 1 + third])), np.exp(np.mean(losses[4][-third:]))
    control = np.exp(np.mean(losses[0][-third:]))
    print(f"\nperplexity over {num_tokens}, sink=4: {early:.2f} early, {late:.2f} late; sink=0: {control:.2f} late")
    assert late < 1.35 * early
    assert control > 1.5 * late
