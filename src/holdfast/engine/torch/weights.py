"""A decoder's tensors, fused the way the forward wants them, from any source that has names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from holdfast.engine.checkpoint import Checkpoint
from holdfast.errors import ModelError
from holdfast.models import Architecture, GGUFSource, HFSource, ModelSource


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * mlp, hidden]
    down: Tensor  # [hidden, mlp]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocabulary, hidden]; float32 where products cannot widen their result


class TensorReader(Protocol):
    """Weights by their Hugging Face names."""

    def read(self, name: str) -> Tensor: ...


class GGUFReader:
    def __init__(self, source: GGUFSource) -> None:
        self._file = source.file

    def read(self, name: str) -> Tensor:
        return torch.from_numpy(self._file.tensor(name))


class SafetensorsReader:
    def __init__(self, source: HFSource) -> None:
        if (source.read_json("config.json") or {}).get("quantization"):
            raise ModelError(f"{source.path} is quantised for MLX; use --device mlx, or the model it was made from")
        self._checkpoint = Checkpoint(source, "pt")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._checkpoint.find(name)[1].get_tensor(name)
        return tensor


class StateDictReader:
    """Weights already in memory; how tests bring small random models."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def read(self, name: str) -> Tensor:
        if name not in self._state:
            raise ModelError(f"the state dict lacks the tensor {name}")
        return self._state[name]


def reader_for(source: ModelSource) -> TensorReader:
    return GGUFReader(source) if isinstance(source, GGUFSource) else SafetensorsReader(source)


class WeightLoader:
    """Reads parts of a decoder in `dtype` onto `device`; norms stay float32. A wrong shape is refused by name."""

    def __init__(self, reader: TensorReader, arch: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self._reader = reader
        self._arch = arch
        self._dtype = dtype
        self._device = device

    def embedding(self) -> Tensor:
        return self._read("model.embed_tokens.weight", self._arch.vocab_size, self._arch.hidden_size)

    def norm(self) -> Tensor:
        return self._norm("model.norm", self._arch.hidden_size)

    def head(self, dtype: torch.dtype | None = None) -> Tensor:
        name = "model.embed_tokens.weight" if self._arch.has_tied_embeddings else "lm_head.weight"
        return self._read(name, self._arch.vocab_size, self._arch.hidden_size, dtype=dtype)

    def layer(self, index: int) -> LayerWeights:
        arch, at = self._arch, f"model.layers.{index}"
        hidden, mlp, dim = arch.hidden_size, arch.mlp_size, arch.head_dim
        queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
        parts = (
            (f"{at}.self_attn.q_proj", queries),
            (f"{at}.self_attn.k_proj", keys),
            (f"{at}.self_attn.v_proj", keys),
        )
        read = self._read
        return LayerWeights(
            attention_norm=self._norm(f"{at}.input_layernorm", hidden),
            qkv=torch.cat([read(f"{name}.weight", size, hidden) for name, size in parts]),
            qkv_bias=torch.cat([read(f"{name}.bias", size) for name, size in parts]) if arch.has_qkv_bias else None,
            query_norm=self._norm(f"{at}.self_attn.q_norm", dim) if arch.has_qk_norm else None,
            key_norm=self._norm(f"{at}.self_attn.k_norm", dim) if arch.has_qk_norm else None,
            output=read(f"{at}.self_attn.o_proj.weight", hidden, queries),
            mlp_norm=self._norm(f"{at}.post_attention_layernorm", hidden),
            gate_up=torch.cat([read(f"{at}.mlp.{part}_proj.weight", mlp, hidden) for part in ("gate", "up")]),
            down=read(f"{at}.mlp.down_proj.weight", hidden, mlp),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self._read(f"{name}.weight", size, dtype=torch.float32)

    def _read(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._reader.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(device=self._device, dtype=dtype or self._dtype)


def load_weights(
    reader: TensorReader, arch: Architecture, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """All weights of a decoder."""
    loader = WeightLoader(reader, arch, dtype=dtype, device=device)
    embedding = loader.embedding()
    # A bfloat16 logit is off by up to a sixteenth; only CUDA's products give float32 from bfloat16.
    head_dtype = dtype if device.type == "cuda" else torch.float32
    is_shared = arch.has_tied_embeddings and embedding.dtype == head_dtype
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(loader.layer(index) for index in range(arch.num_layers)),
        norm=loader.norm(),
        head=embedding if is_shared else loader.head(head_dtype),
    )
