"""Weights that change while an engine runs: written in place, checked first, and known for every token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast.engine.interface import Engine
from holdfast.engine.native import NativeEngine
from holdfast.engine.native.weights import WeightPacker
from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.torch.weights import StateDictReader
from holdfast.engine.update import checked, open_update, write
from holdfast.models.architecture import from_hf_config
from tests import tiny
from tests.driving import Array, run_chunks
from tests.engine_cases import HAS_MLX, HAS_NATIVE, StateWeights, random_tokens

SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8)
State = dict[str, torch.Tensor]
WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of 32 weights, as int8 needs them


def _config(family: str) -> dict[str, Any]:
    return tiny.hf_model(family).config.to_dict() | (WHOLE_GROUPS if family == "qwen3" else {})


def _state(family: str, seed: int) -> State:
    """Random weights under the names and in the shapes of `transformers`."""
    import transformers

    kind = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**_config(family)))
    state: State = {name: weight + torch.randn_like(weight) * 0.1 for name, weight in model.state_dict().items()}
    if "lm_head.weight" in state and _config(family)["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _engine(kind: str, family: str, dtype: str, state: State) -> Engine:
    arch = from_hf_config(_config(family))
    facts: dict[str, Any] = {"digest": "d", "num_slabs": 2, "shape": SHAPE, "dtype": dtype}
    if kind == "native":
        return NativeEngine("tiny", arch, WeightPacker(StateWeights(state), arch, dtype).arrays(), **facts)
    if kind == "torch":
        return TorchEngine("tiny", arch, StateDictReader(state), **facts)
    from holdfast.engine.mlx import MLXEngine

    return MLXEngine("tiny", arch, StateWeights(state), **facts)


def _logits(engine: Engine) -> Array:
    return run_chunks(engine, SlabPool(2, SHAPE).acquire(4), random_tokens(40, tiny.VOCABULARY), [8, 1, 5])


def _saved(path: Path, state: State) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return path


def _swap(engine: Engine, path: Path, version: str = "2", *, keeps_caches: bool = False) -> None:
    write(engine, checked(*open_update(path, engine), engine), version=version, keeps_caches=keeps_caches)


_NATIVE = [("native", "mistral", "float32"), ("native", "qwen2", "bfloat16"), ("native", "qwen3", "int8")]
_MLX = [("mlx", "qwen2", "float32"), ("mlx", "qwen3", "bfloat16")]
KINDS = [
    *(_NATIVE if HAS_NATIVE else ()),
    ("torch", "qwen2", "float32"),
    ("torch", "qwen2", "bfloat16"),
    *(_MLX if HAS_MLX else ()),
]


@pytest.mark.parametrize(("kind", "family", "dtype"), KINDS)
def test_swapped_weights_are_bit_for_bit_those_of_a_fresh_engine(
    kind: str, family: str, dtype: str, tmp_path: Path
) -> None:
    old, new = _state(family, 1), _state(family, 2)
    engine = _engine(kind, family, dtype, {name: tensor.clone() for name, tensor in old.items()})
    before = _logits(engine)
    some = [name for name in new if name.endswith(("q_proj.weight", "1.mlp.up_proj.weight", "k_proj.bias"))]
    part = {name: new[name].to(torch.bfloat16) for name in some}
    _swap(engine, _saved(tmp_path / "part.safetensors", part))
    fresh = _engine(kind, family, dtype, old | {name: tensor.float() for name, tensor in part.items()})
    assert np.array_equal(_logits(engine), _logits(fresh))
    assert not np.array_equal(_logits(engine), before)
    _swap(engine, _saved(tmp_path / "model.safetensors", new))
    assert np.array_equal(_logits(engine), _logits(_engine(kind, family, dtype, new)))
    _swap(engine, _saved(tmp_path / "old.safetensors", old))
    assert np.array_equal(_logits(engine), before)
