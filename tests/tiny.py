"""Small random models of every supported family, made by `transformers` itself."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.torch.weights import StateDictReader
from holdfast.models import Architecture
from holdfast.models.architecture import from_hf_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 97
WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of 32 weights, as int8 and int4 need

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@cache
def hf_model(family: str) -> Any:
    """A `transformers` model with random weights, always the same ones."""
    import transformers

    options: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": _LLAMA3},
        "mistral": {"head_dim": 10, "sliding_window": None},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 16},
        "whole": WHOLE_GROUPS,
    }
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "whole": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(**_SIZES | options[family])
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:  # fresh norms are all ones and biases zeros: too kind
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


@cache
def architecture(family: str) -> Architecture:
    return from_hf_config(hf_model(family).config.to_dict())


def engine(
    family: str, *, num_slabs: int, shape: SlabShape, dtype: str = "float32", device: str = "cpu"
) -> TorchEngine:
    model = hf_model(family)
    return TorchEngine(
        f"tiny-{family}",
        architecture(family),
        StateDictReader(model.state_dict()),
        digest=family,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        device=device,
    )


class StateWeights(dict[str, torch.Tensor]):
    """A state dict as a `WeightSource`."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self[name].float().numpy()
