"""The engines that the contract suite holds to the same promises, each with its own plain truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Engine
from holdfast.engine.slab import SlabShape
from holdfast.engine.window import Window
from holdfast.testing.engine import FakeEngine
from tests import tiny
from tests.oracle import dense_logits

NAMES = ("fake", *(f"torch-{family}" for family in tiny.FAMILIES))


@dataclass(frozen=True)
class Case:
    """An engine and `truth(tokens, window)`: the logits of every position from the whole history."""

    engine: Engine
    truth: Callable[[Sequence[int], Window], NDArray[Any]]
    tolerance: float


def make(name: str, *, num_slabs: int, shape: SlabShape) -> Case:
    if name == "fake":
        fake = FakeEngine(num_slabs=num_slabs, shape=shape)
        return Case(fake, fake.expected_logits, tolerance=0)
    family = name.removeprefix("torch-")
    state, arch = tiny.hf_model(family).state_dict(), tiny.architecture(family)

    def truth(tokens: Sequence[int], window: Window) -> NDArray[Any]:
        return dense_logits(state, arch, tokens, window).numpy()

    return Case(tiny.engine(family, num_slabs=num_slabs, shape=shape), truth, tolerance=5e-4)


def random_tokens(num: int, vocabulary: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, num).tolist()
    return ids
