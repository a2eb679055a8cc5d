"""The decoder: one forward over packed rows of tokens. Knows rotary positions, not where keys live."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.engine.batch import Packed
from holdfast.engine.rotary import rotary_tables
from holdfast.engine.torch.weights import DecoderWeights, LayerWeights
from holdfast.models import Architecture


class Attention(Protocol):
    """Takes one layer's keys and values into the cache and answers its queries from there."""

    def __call__(self, layer: int, query: Tensor, sink_query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, sink_query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim].

        Returns [tokens, heads * dim].
        """


class TorchDecoder:
    """Llama-shaped decoder with the switches of `Architecture`. Activations are float32 between products."""

    def __init__(self, arch: Architecture, weights: DecoderWeights) -> None:
        self.arch = arch
        self.weights = weights
        self._device = weights.embedding.device

    def forward(self, packed: Packed, attend: Attention) -> Tensor:
        """Logits [len(packed.wanted), vocabulary] in float32."""
        arch, weights = self.arch, self.weights
        rotation = self._rotation(packed.positions)
        is_same = packed.positions == packed.sink_positions
        sink_rotation = rotation if is_same else self._rotation(packed.sink_positions)
        x = F.embedding(self._indices(packed.tokens), weights.embedding).float()  # [tokens, hidden]
        for index, layer in enumerate(weights.layers):
            h = _norm(x, layer.attention_norm, arch.norm_epsilon)
            query, key, value = self._project(layer, h)
            mixed = attend(
                index,
                _rotate(query, rotation),
                _rotate(query, sink_rotation),
                _rotate(key, rotation),
                value,
            )
            x = x + _linear(mixed, layer.output)
            h = _norm(x, layer.mlp_norm, arch.norm_epsilon)
            gate, up = _linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + _linear(F.silu(gate) * up, layer.down)
        return _logits(_norm(x[self._indices(packed.wanted)], weights.norm, arch.norm_epsilon), weights.head)

    def _project(self, layer: LayerWeights, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch = self.arch
        qkv = _linear(h, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.float()
        heads = qkv.view(h.shape[0], -1, arch.head_dim)
        query, key, value = torch.tensor_split(heads, [arch.num_heads, arch.num_heads + arch.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = _norm(query, layer.query_norm, arch.norm_epsilon)
            key = _norm(key, layer.key_norm, arch.norm_epsilon)
        return query, key, value

    def _rotation(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """cos and sin, [tokens, 1, dim / 2]."""
        cos, sin = map(torch.from_numpy, rotary_tables(self.arch.inverse_frequencies, positions))
        return cos.to(self._device), sin.to(self._device)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).float()


def _logits(x: Tensor, head: Tensor) -> Tensor:
    """Never rounded below float32: near-ties decide tokens."""
    if head.dtype == torch.float32:
        return F.linear(x, head)
    return torch.mm(x.to(head.dtype), head.T, out_dtype=torch.float32)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
