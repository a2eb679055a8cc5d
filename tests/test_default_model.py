"""The real default model: against the dense oracle, across the window's edge, and as `holdfast chat` uses it."""

import asyncio
import functools
import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.bench.gates import stays_flat
from holdfast.bench.quality import CONTROL_TIMES, FLATNESS, long_text, perplexities
from holdfast.cli.conversation import TokenConversation, Waiting
from holdfast.cli.token_sessions import LocalSession
from holdfast.config import EngineConfig
from holdfast.engine.factory import build_worker
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine, load_engine
from holdfast.engine.window import Window
from holdfast.generation import SamplingParams
from holdfast.models import GGUFSource, chat_defaults
from holdfast.sessions.runtime import Runtime
from tests.conftest import SMALL
from tests.driving import difference, forward, run_chunks
from tests.oracle import dense_logits, weight_names
from tests.serving import default_chat

TOLERANCE = 5e-4
SINK = 4


@pytest.fixture(scope="module")
def text_tokens(default_source: GGUFSource) -> list[int]:
    from holdfast.chat.tokenizer import load_tokenizer

    return load_tokenizer(default_source).encode(long_text()[:60_000])


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
    found = list(perplexities(engine, text_tokens[: num_tokens + 1], (SINK, 0), 200))
    with_sinks, without = ([chunk[sink] for chunk in found] for sink in (SINK, 0))
    flat = stays_flat("flat", with_sinks, FLATNESS)
    print(f"\nperplexity over {num_tokens}, sink={SINK}: {flat.reason}")
    assert flat.passed
    third = len(found) // 3
    assert np.median(without[-third:]) > CONTROL_TIMES * np.median(with_sinks[-third:])


QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Canada?": "Ottawa",
    "What is the capital of Egypt?": "Cairo",
    "What is 2 + 2?": r"\b4\b|four",
    "How many days are in a week?": r"\b7\b|seven",
    "How many legs does a spider have?": r"\b8\b|eight",
    "What color is the sky on a clear day?": "blue",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Who painted the Mona Lisa?": "Leonardo",
    "What planet do we live on?": "Earth",
    "What is the chemical symbol for water?": "H2O",
    "What is the opposite of hot?": "cold",
    "Which animal says meow?": r"\bcat\b",
    "What is the boiling point of water in Celsius?": "100",
    "What do bees make?": "honey",
    "What is the currency of Japan?": "[Yy]en",
}


def test_chat_answers_simple_questions_with_the_defaults_of_the_model(default_source: GGUFSource) -> None:
    defaults = chat_defaults(default_source.name)
    assert defaults.temperature == 0
    config = EngineConfig(sessions=1, recent=256, max_pin=64)
    worker = build_worker(default_source, config)
    backend = EmbeddedBackend(worker, describe(default_source, config, worker))
    backend.start()
    params = SamplingParams(seed=0, max_tokens=40, temperature=defaults.temperature, top_p=defaults.top_p)
    system = [{"role": "system", "content": defaults.system}]

    async def wrong() -> dict[str, str]:
        session, found = LocalSession(Runtime(backend)), {}
        for question, answer in QUESTIONS.items():
            conversation = TokenConversation(session, default_chat().model, params, system)
            parts = [part async for part in conversation.ask(question) if not isinstance(part, Waiting)]
            if not re.search(answer, "".join(parts)):
                found[question] = "".join(parts)
            await conversation.reset()
        return found

    try:
        assert len(asyncio.run(wrong())) <= 2  # at temperature 0.7 and without the prompt, 1 to 6 are
    finally:
        backend.stop()
