"""A decoder's tensors, fused as the forward wants them, from any source of named tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.weights import check_shape
from holdfast.errors import ModelError
from holdfast.models import Architecture

M = TypeVar("M")  # how a matrix is held: as a tensor, or as what the CUDA kernels read
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[M]):
    attention_norm: Tensor  # [hidden]
    qkv: M  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: M  # [hidden, heads * head_dim]
    mlp_norm: Tensor
    gate_up: M  # [2 * mlp, hidden]
    down: M  # [hidden, mlp]

    @property
    def matrices(self) -> tuple[M, M, M, M]:
        return self.qkv, self.output, self.gate_up, self.down

    def converted(self, convert: Callable[[M], N]) -> "LayerWeights[N]":
        """The same layer with every matrix converted."""
        return LayerWeights(
            attention_norm=self.attention_norm,
            qkv=convert(self.qkv),
            qkv_bias=self.qkv_bias,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            output=convert(self.output),
            mlp_norm=self.mlp_norm,
            gate_up=convert(self.gate_up),
            down=convert(self.down),
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[M]):
    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights[M], ...]
    norm: Tensor
    head: M  # [vocabulary, hidden]


class TensorReader(Protocol):
    """Weights by their Hugging Face names: `WeightSource` gives numpy arrays, `StateDictReader` tensors."""

    def tensor(self, name: str) -> Tensor | NDArray[np.generic]: ...


class StateDictReader:
    """Weights that are already in memory, such as the small random models of the tests."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def tensor(self, name: str) -> Tensor:
        if name not in self._state:
            raise ModelError(f"the state dict lacks the tensor {name}")
        return self._state[name]


class WeightLoader:
    """Reads parts of a decoder in `dtype` onto `device`; norms stay float32. Raises ModelError for a wrong shape."""

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

    def layer(self, index: int) -> LayerWeights[Tensor]:
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
        found = self._reader.tensor(name)
        tensor = found if isinstance(found, Tensor) else from_numpy(found)
        check_shape(name, tuple(tensor.shape), shape)
        converted = tensor.to(device=self._device, dtype=dtype or self._dtype)
        return converted.clone() if converted is found else converted  # new weights must not change the reader's


def tensor_places(weights: DecoderWeights[M], arch: Architecture) -> dict[str, list[tuple[Tensor | M, int]]]:
    """For every tensor by its Hugging Face name what holds it, and its first row there. A tied head is held twice where
    its dtype is another one."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    projections = {"q": 0, "k": queries, "v": queries + keys}
    embedding = "model.embed_tokens.weight"
    places: dict[str, list[tuple[Tensor | M, int]]] = {
        "model.norm.weight": [(weights.norm, 0)],
        embedding: [(weights.embedding, 0)],
    }
    if weights.head is not weights.embedding:
        places.setdefault(embedding if arch.has_tied_embeddings else "lm_head.weight", []).append((weights.head, 0))
    for index, layer in enumerate(weights.layers):
        held: dict[str, tuple[Tensor | M | None, int]] = {
            "input_layernorm.weight": (layer.attention_norm, 0),
            "post_attention_layernorm.weight": (layer.mlp_norm, 0),
            "self_attn.q_norm.weight": (layer.query_norm, 0),
            "self_attn.k_norm.weight": (layer.key_norm, 0),
            "self_attn.o_proj.weight": (layer.output, 0),
            "mlp.gate_proj.weight": (layer.gate_up, 0),
            "mlp.up_proj.weight": (layer.gate_up, arch.mlp_size),
            "mlp.down_proj.weight": (layer.down, 0),
            **{f"self_attn.{name}_proj.weight": (layer.qkv, first) for name, first in projections.items()},
            **{f"self_attn.{name}_proj.bias": (layer.qkv_bias, first) for name, first in projections.items()},
        }
        for name, (holder, first) in held.items():
            if holder is not None:
                places[f"model.layers.{index}.{name}"] = [(holder, first)]
    return places


def from_numpy(array: NDArray[np.generic]) -> Tensor:
    """The same memory as a tensor; bfloat16 comes as 16-bit integers."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def load_weights(
    reader: TensorReader, arch: Architecture, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights[Tensor]:
    """All weights of a decoder."""
    loader = WeightLoader(reader, arch, dtype=dtype, device=device)
    embedding = loader.embedding()
    # A bfloat16 logit is off by up to 1/16, and only CUDA multiplies bfloat16 into float32.
    head_dtype = dtype if device.type == "cuda" else torch.float32
    is_shared = arch.has_tied_embeddings and embedding.dtype == head_dtype
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(loader.layer(index) for index in range(arch.num_layers)),
        norm=loader.norm(),
        head=embedding if is_shared else loader.head(head_dtype),
    )
