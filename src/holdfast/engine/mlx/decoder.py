"""The decoder on MLX: slabs as arrays, attention over them, and one forward over packed rows of tokens.

Rows are ragged and packed. Each row first writes its keys and values, then attends under the window's mask, reading
only the cells that it sees. Activations and scores are float32, whatever the weights and slabs hold.
The modules are named as in Hugging Face files, so that a parameter's path is its name on disk.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from holdfast.engine.batch import Packed, RowPlan, places, rotary_tables
from holdfast.engine.slab import Slab
from holdfast.engine.weights import WeightSource, check_shape
from holdfast.errors import ModelError
from holdfast.models import Architecture

Layers = list[mx.array]  # [kv_heads, capacity, head_dim] each
Rotation = tuple[mx.array, mx.array]  # cos and sin, [tokens, 1, dim / 2]
QueryKeyValue = tuple[mx.array, mx.array, mx.array]


class SlabArrays:
    """Keys and values of all slabs, for each slab a list of layers.

    Every array has a buffer of its own: MLX writes in place only where nothing else refers to the buffer, and one
    row's reads must not make the next row's write copy all slabs.
    """

    def __init__(self, num_slabs: int, num_layers: int, shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
        def layers() -> Layers:
            return [mx.zeros(shape, dtype) for _ in range(num_layers)]

        self.keys = [layers() for _ in range(num_slabs)]
        self.values = [layers() for _ in range(num_slabs)]
        mx.eval(self.keys, self.values)  # commits the memory from the start

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for slabs in (self.keys, self.values) for layers in slabs for array in layers)

    def of(self, slots: Iterable[int]) -> list[Layers]:
        """All arrays of these slabs, for `mx.eval`."""
        return [slabs[slot] for slot in slots for slabs in (self.keys, self.values)]


class MLXSlabAttention:
    """The attention of one forward, for all its rows and layers."""

    def __init__(self, arrays: SlabArrays, plans: Sequence[RowPlan]) -> None:
        self._arrays = arrays
        self._plans = plans
        self._masks = [None if plan.mask is None else mx.array(plan.mask) for plan in plans]

    def __call__(self, layer: int, query: mx.array, sink_query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        """Write a layer's keys and values, then attend: [tokens, heads * dim].

        query, sink_query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim].
        """
        mixed = []
        for plan, mask in zip(self._plans, self._masks, strict=True):
            keys, values = self._arrays.keys[plan.slot][layer], self._arrays.values[plan.slot][layer]
            for packed, cells in plan.writes:
                keys[:, cells] = key[packed].swapaxes(0, 1).astype(keys.dtype)
                values[:, cells] = value[packed].swapaxes(0, 1).astype(values.dtype)
            queries = query[plan.packed], sink_query[plan.packed]
            mixed.append(_attend(plan, mask, queries, keys, values))
        return mx.concatenate(mixed).flatten(1)


def _attend(
    plan: RowPlan, mask: mx.array | None, queries: tuple[mx.array, mx.array], keys: mx.array, values: mx.array
) -> mx.array:
    """queries for recent keys and for sinks: [n, heads, dim]; keys, values: [kv_heads, capacity, dim]."""
    n, heads, dim = queries[0].shape
    kv_heads = keys.shape[0]
    scale: float = dim**-0.5

    def grouped(query: mx.array) -> mx.array:  # [kv_heads, group * n, dim], group-major
        return (query * scale).swapaxes(0, 1).reshape(kv_heads, -1, dim)

    recent_side, sink_side = map(grouped, queries)
    scores = mx.concatenate(
        [
            (sink_side if read.is_sink else recent_side) @ keys[:, read.cells].astype(mx.float32).swapaxes(1, 2)
            for read in plan.reads
        ],
        axis=-1,
    )  # [kv_heads, group * n, keys]
    if mask is not None:
        by_query = scores.reshape(kv_heads, heads // kv_heads, n, -1)
        scores = mx.where(mask, -mx.inf, by_query).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1)
    seen = mx.concatenate([values[:, read.cells] for read in plan.reads], axis=1).astype(mx.float32)
    return (weights @ seen).reshape(heads, n, dim).swapaxes(0, 1)


def gather(layers: Layers, slab: Slab, positions: Sequence[range]) -> mx.array:
    """The cells of `positions`, in order: [layers, kv_heads, positions, dim]."""
    cells = [place.cells for place in places(slab, positions)] or [slice(0, 0)]
    return mx.stack([mx.concatenate([array[:, part] for part in cells], axis=1) for array in layers])


def scatter(layers: Layers, slab: Slab, positions: Sequence[range], content: mx.array) -> None:
    """The reverse of `gather`."""
    for packed, cells in places(slab, positions):
        for array, part in zip(layers, content, strict=True):
            array[:, cells] = part[:, packed]


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
    """A Llama-style decoder with the options of `Architecture`.

    `dtype` is the dtype of the products inside the layers; norms and logits are always float32.
    """

    def __init__(self, arch: Architecture, dtype: mx.Dtype) -> None:
        super().__init__()
        self._arch = arch
        self._dtype = dtype
        self.model = Trunk(arch)
        if not arch.has_tied_embeddings:
            self.lm_head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)

    def forward(self, packed: Packed, attend: MLXSlabAttention) -> mx.array:
        """Logits [len(packed.wanted), vocabulary] in float32. Not computed yet, because MLX is lazy."""
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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Its parameters by name."""
        parameters: Any = tree_flatten(self.parameters())
        return {name: tuple(array.shape) for name, array in parameters}

    def write(self, name: str, tensor: NDArray[np.generic]) -> None:
        """Replace a parameter. Norms are float32, and so is the head: a bfloat16 logit is off by up to 1/16."""
        head = "model.embed_tokens." if self._arch.has_tied_embeddings else "lm_head."
        array = _from_numpy(tensor)
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32 if "norm." in name or name.startswith(head) else self._dtype)
        mx.eval(array)
        self.load_weights([(name, array)], strict=False)

    def _rotation(self, positions: list[int]) -> Rotation:
        cos, sin = map(mx.array, rotary_tables(self._arch.inverse_frequencies, positions))
        return cos, sin


def _product(layer: Any, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """x @ layer in `dtype`, as float32. With mixed dtypes MLX would convert the weights every time."""
    product: mx.array = layer(x.astype(dtype))
    return product.astype(mx.float32)


def _rotate(x: mx.array, rotation: Rotation) -> mx.array:
    cos, sin = rotation
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def load_decoder(weights: WeightSource, arch: Architecture, *, dtype: mx.Dtype) -> MLXDecoder:
    """A decoder with all its weights in memory; any thread may use it. Raises ModelError for a wrong shape."""
    decoder = MLXDecoder(arch, dtype)
    nn.quantize(decoder, class_predicate=lambda path, module: _quantisation(weights, path, module))
    for name, shape in decoder.shapes().items():
        tensor = weights.tensor(name)
        check_shape(name, tensor.shape, shape)
        decoder.write(name, tensor)  # one at a time, so that only one is in memory twice
    return decoder


def _quantisation(weights: WeightSource, path: str, module: Any) -> dict[str, int] | bool:
    """How a module's weights are packed, judged by their shapes, since layers may differ. False: not packed."""
    if f"{path}.scales" not in weights:
        return False
    if f"{path}.biases" not in weights:
        raise ModelError(f"{path} is quantised in a way that is not supported; supported: mlx-lm's affine quantisation")
    width = module.weight.shape[-1]
    num_groups, num_words = (weights.tensor(f"{path}.{part}").shape[-1] for part in ("scales", "weight"))
    return {"group_size": width // num_groups, "bits": num_words * 32 // width}


def _from_numpy(array: NDArray[np.generic]) -> mx.array:
    """A copy as an MLX array; bfloat16 comes as 16-bit integers."""
    copied = mx.array(array)
    return copied.view(mx.bfloat16) if array.dtype == np.uint16 else copied
