"""The engines that the contract suite holds to the same promises, each with its own plain truth."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.engine.interface import Engine
from holdfast.engine.native import NativeEngine, is_available
from holdfast.engine.native.weights import WeightPacker
from holdfast.engine.slab import SlabShape
from holdfast.engine.weights import quantise, quantise_to_four_bits
from holdfast.engine.window import Window
from holdfast.testing.fake_engine import FakeEngine
from tests import tiny
from tests.oracle import dense_logits

HAS_MLX = importlib.util.find_spec("mlx") is not None
HAS_NATIVE = is_available()
_KINDS = ("torch", *(("native",) if HAS_NATIVE else ()), *(("mlx",) if HAS_MLX else ()))

# What rounding activations to bfloat16 or integers may change in a logit of the tiny models.
ROUNDED_ACTIVATIONS = {"int8": 0.3, "int4": 0.35}
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no C++ compiler when holdfast was installed")
_NARROW = ("int8", "int4") if HAS_NATIVE else ()
NAMES = (
    "fake",
    *(f"{kind}-{family}" for kind in _KINDS for family in tiny.FAMILIES),
    *(f"{dtype}-whole" for dtype in _NARROW),
)


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
    kind, family = name.split("-")
    arch = tiny.architecture(family)
    state = rounded_state(family, kind) if kind in _NARROW else tiny.hf_model(family).state_dict()

    def truth(tokens: Sequence[int], window: Window) -> NDArray[Any]:
        return dense_logits(state, arch, tokens, window).numpy()

    if kind in _NARROW:
        engine = native_engine(family, num_slabs=num_slabs, shape=shape, dtype=kind)
        return Case(engine, truth, tolerance=ROUNDED_ACTIVATIONS[kind])
    builders: dict[str, Callable[..., Engine]] = {"torch": tiny.engine, "native": native_engine, "mlx": mlx_engine}
    return Case(builders[kind](family, num_slabs=num_slabs, shape=shape), truth, tolerance=5e-4)


def rounded_state(family: str, dtype: str) -> dict[str, torch.Tensor]:
    """The weights that an engine with int8 or int4 stands for."""
    state = dict(tiny.hf_model(family).state_dict())
    for name, weight in state.items():
        if weight.ndim == 2:
            has_eight = dtype == "int8" or name in ("model.embed_tokens.weight", "lm_head.weight")
            plain = weight.float().numpy()
            bits = quantise(plain) if has_eight else quantise_to_four_bits(plain, has_offsets=True)
            state[name] = torch.from_numpy(bits.restored())
    return state


def native_engine(family: str, *, num_slabs: int, shape: SlabShape, dtype: str = "float32", **options: Any) -> Engine:
    """`tiny.engine` in native code: the same weights under the same digest."""

    arch = tiny.architecture(family)
    arrays = WeightPacker(tiny.StateWeights(tiny.hf_model(family).state_dict()), arch, dtype).arrays()
    facts = {"digest": family, "num_slabs": num_slabs, "shape": shape, "dtype": dtype}
    return NativeEngine(f"tiny-{family}", arch, arrays, **facts, **options)


def mlx_engine(family: str, *, num_slabs: int, shape: SlabShape, dtype: str = "float32") -> Engine:
    """`tiny.engine` on MLX: the same weights under the same digest."""
    from holdfast.engine.mlx import MLXEngine

    weights = tiny.StateWeights(tiny.hf_model(family).state_dict())
    arch = tiny.architecture(family)
    return MLXEngine(f"tiny-{family}", arch, weights, digest=family, num_slabs=num_slabs, shape=shape, dtype=dtype)


def random_tokens(num: int, vocabulary: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, num).tolist()
    return ids
