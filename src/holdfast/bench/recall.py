"""What a bounded model still makes of a text: perplexity by position, and facts that it was told. An engine by hand."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.chat.tokenizer import Tokenizer
from holdfast.engine.interface import Engine
from holdfast.engine.slab import Slab, SlabPool
from holdfast.testing.engine_driver import forward

_PLACES = ("harbour", "library", "station", "museum", "castle", "bakery", "garden", "theatre", "market", "bridge")
_WORDS = ("silver", "thunder", "orange", "winter", "dragon", "violet", "rocket", "pepper", "copper", "marble")


def perplexities(engine: Engine, tokens: Sequence[int], sinks: Sequence[int], chunk: int) -> Iterator[dict[int, float]]:
    """The perplexity of each next `chunk` tokens by number of sinks, side by side, on slabs of their own."""
    pool = SlabPool(engine.num_slabs, engine.shape)
    slabs = [pool.acquire(sink) for sink in sinks]
    for start in range(0, len(tokens) - chunk, chunk):
        part, targets = tokens[start : start + chunk], tokens[start + 1 : start + chunk + 1]
        found = forward(engine, [(slab, part) for slab in slabs])
        yield {sink: math.exp(_loss(logits, targets)) for sink, logits in zip(sinks, found, strict=True)}


def _loss(logits: NDArray[np.float32], targets: Sequence[int]) -> float:
    """Mean of -log p over the targets, one for each row."""
    wide = logits.astype(np.float64)
    most = wide.max(-1)
    log_sum = np.log(np.exp(wide - most[:, None]).sum(-1)) + most
    return float((log_sum - wide[np.arange(len(targets)), list(targets)]).mean())


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, and its beginning as a question: the model is to go on with `answer`."""

    statement: list[int]
    question: list[int]
    answer: list[int]


def facts(tokenizer: Tokenizer, num: int, seed: int = 0) -> list[Fact]:
    """Different ones, in which nothing follows from anything."""
    chance = random.Random(seed)
    found = []
    for number in range(num):
        place, words = _PLACES[number % len(_PLACES)], chance.sample(_WORDS, 2)
        question = tokenizer.encode(f" The secret password of the {place} is")
        answer = tokenizer.encode(f" {words[0]} {words[1]}")
        end = tokenizer.encode(". Remember it well.")
        found.append(Fact(question + answer + end, question, answer))
    return found


def recalls(engine: Engine, slab: Slab, fact: Fact, filler: Sequence[int], *, chunk: int) -> bool:
    """Whether the likeliest words are the fact's own, told at the beginning and asked for after `filler`.

    `slab` is used from its start.
    """
    slab.reset()
    told = [*fact.statement, *filler]
    for start in range(0, len(told), chunk):
        forward(engine, [(slab, told[start : start + chunk])], num_logits=0)
    (logits,) = forward(engine, [(slab, [*fact.question, *fact.answer])], num_logits=len(fact.answer) + 1)
    return bool((logits[:-1].argmax(-1) == fact.answer).all())
