"""The decoder: one forward over packed rows of tokens. Knows rotary positions, not where keys live.

Its modules are named as in Hugging Face files, so that a parameter's path is its name on disk.
"""

from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from holdfast.engine.batch import Packed
from holdfast.engine.rotary import rotary_tables
from holdfast.models import Architecture

Rotation = tuple[mx.array, mx.array]  # cos and sin, [tokens, 1, dim / 2]
QueryKeyValue = tuple[mx.array, mx.array, mx.array]


class Attend(Protocol):
    """Takes one layer's keys and values into the cache and answers its queries from there."""

    def __call__(self, layer: int, query: mx.array, sink_query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        """query, sink_query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim].

        Returns [tokens, heads * dim].
        """


class Attention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self._dim = arch.head_dim
        queries, keys, bias = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.has_qkv_bias
        self.q_proj = nn.Linear(arch.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(arch.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(arch.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, arch.hidden_size, bias=False)
        if arch.has_qk_norm:
            self.q_norm = nn.RMSNorm(arch.head_dim, arch.norm_epsilon)
            self.k_norm = nn.RMSNorm(arch.head_dim, arch.norm_epsilon)

    def project(self, h: mx.array, dtype: mx.Dtype) -> QueryKeyValue:
        """h: [tokens, hidden] -> query, key and value, [tokens, heads, dim] each."""
        query, key, value = (
            _product(layer, h, dtype).reshape(h.shape[0], -1, self._dim)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return (self.q_norm(query), self.k_norm(key), value) if "q_norm" in self else (query, key, value)


class MLP(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.mlp_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.mlp_size, bias=False)
        self.down_proj = nn.Linear(arch.mlp_size, arch.hidden_size, bias=False)


class Layer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = nn.RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.mlp = MLP(arch)


class Trunk(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = [Layer(arch) for _ in range(arch.num_layers)]
        self.norm = nn.RMSNorm(arch.hidden_size, arch.norm_epsilon)


class MLXDecoder(nn.Module):
    """Llama-shaped decoder with the switches of `Architecture`. Activations are float32 between products.

    `dtype` is what the products inside the layers are computed in; norms and logits are always float32.
    """

    def __init__(self, arch: Architecture, dtype: mx.Dtype) -> None:
        super().__init__()
        self._arch = arch
        self._dtype = dtype
        self.model = Trunk(arch)
        if not arch.has_tied_embeddings:
            self.lm_head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)

    def forward(self, packed: Packed, attend: Attend) -> mx.array:
        """Logits [len(packed.wanted), vocabulary] in float32, not computed yet: MLX is lazy."""
        trunk, dtype = self.model, self._dtype
        rotation = self._rotation(packed.positions)
        is_same = packed.positions == packed.sink_positions
        sink_rotation = rotation if is_same else self._rotation(packed.sink_positions)
        x = trunk.embed_tokens(mx.array(packed.tokens)).astype(mx.float32)  # [tokens, hidden]
        for index, layer in enumerate(trunk.layers):
            query, key, value = layer.self_attn.project(layer.input_layernorm(x), dtype)
            mixed = attend(
                index,
                _rotate(query, rotation),
                _rotate(query, sink_rotation),
                _rotate(key, rotation),
                value,
            )
            x = x + _product(layer.self_attn.o_proj, mixed, dtype)
            h = layer.post_attention_layernorm(x)
            gate, up = _product(layer.mlp.gate_proj, h, dtype), _product(layer.mlp.up_proj, h, dtype)
            x = x + _product(layer.mlp.down_proj, nn.silu(gate) * up, dtype)
        x = trunk.norm(x[mx.array(packed.wanted, dtype=mx.int32)])
        logits: mx.array = trunk.embed_tokens.as_linear(x) if self._arch.has_tied_embeddings else self.lm_head(x)
        return logits

    def _rotation(self, positions: list[int]) -> Rotation:
        cos, sin = map(mx.array, rotary_tables(self._arch.inverse_frequencies, positions))
        return cos, sin


def _product(layer: Any, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """x @ layer in `dtype`, widened again. Mixed types would make MLX widen the weights, every time."""
    product: mx.array = layer(x.astype(dtype))
    return product.astype(mx.float32)


def _rotate(x: mx.array, rotation: Rotation) -> mx.array:
    cos, sin = rotation
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
