"""The decoder on torch: slabs as tensors, attention over them, and one forward over packed rows of tokens.

Rows are ragged and packed. Each row first writes its keys and values, then attends under the window's mask, reading
only the cells that it sees. Activations and scores are float32, whatever the weights and slabs hold.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.batch import Packed, RowPlan, places, rotary_tables
from holdfast.engine.interface import KeysValues
from holdfast.engine.slab import Slab
from holdfast.engine.torch.weights import DecoderWeights, LayerWeights
from holdfast.models import Architecture


class SlabTensors:
    """Keys and values of all slabs: [layers, slabs, kv_heads, capacity, head_dim] each."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        # Zeroed by writing, so that the memory is committed from the start (and a masked NaN cannot spread).
        self.keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.values = torch.empty(shape, dtype=dtype, device=device).zero_()

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self.keys, self.values

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy(self, source: Slab, target: Slab) -> None:
        for tensor in self._tensors:
            tensor[:, target.slot] = tensor[:, source.slot]

    def read(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return KeysValues(*(to_bits(gather(tensor, slab, positions)) for tensor in (self.keys, self.values)))

    def write(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        for tensor, bits in zip((self.keys, self.values), kv, strict=True):
            scatter(tensor, slab, positions, torch.from_numpy(bits).view(tensor.dtype).to(tensor.device))

    def clear(self, slab: Slab) -> None:
        for tensor in self._tensors:
            tensor[:, slab.slot] = 0


class TorchSlabAttention:
    """The attention of one forward, for all its rows and layers."""

    def __init__(self, tensors: SlabTensors, plans: Sequence[RowPlan]) -> None:
        self._tensors = tensors
        self._plans = plans
        device = tensors.keys.device
        self._masks = [None if plan.mask is None else torch.from_numpy(plan.mask).to(device) for plan in plans]

    def __call__(self, layer: int, query: Tensor, sink_query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write a layer's keys and values, then attend: [tokens, heads * dim].

        query, sink_query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim].
        """
        keys, values = self._tensors.keys[layer], self._tensors.values[layer]
        out = torch.empty_like(query)
        for plan, mask in zip(self._plans, self._masks, strict=True):
            slab_keys, slab_values = keys[plan.slot], values[plan.slot]  # [kv_heads, capacity, dim]
            for packed, cells in plan.writes:
                slab_keys[:, cells] = key[packed].transpose(0, 1).to(slab_keys.dtype)
                slab_values[:, cells] = value[packed].transpose(0, 1).to(slab_values.dtype)
            queries = query[plan.packed], sink_query[plan.packed]
            out[plan.packed] = _attend(plan, mask, queries, slab_keys, slab_values)
        return out.flatten(1)


def _attend(plan: RowPlan, mask: Tensor | None, queries: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """queries for recent keys and for sinks: [n, heads, dim]; keys, values: [kv_heads, capacity, dim]."""
    query, sink_query = queries
    n, heads, dim = query.shape
    kv_heads = keys.shape[0]

    def grouped(q: Tensor) -> Tensor:  # [kv_heads, group * n, dim], group-major
        return q.transpose(0, 1).reshape(kv_heads, -1, dim)

    recent_side, sink_side = grouped(query * dim**-0.5), grouped(sink_query * dim**-0.5)
    scores = torch.cat(
        [
            (sink_side if read.is_sink else recent_side) @ keys[:, read.cells].float().transpose(1, 2)
            for read in plan.reads
        ],
        dim=-1,
    )  # [kv_heads, group * n, keys]
    if mask is not None:
        scores.view(kv_heads, heads // kv_heads, n, -1).masked_fill_(mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    mixed = torch.zeros_like(recent_side)
    end = 0
    for read in plan.reads:
        begin, end = end, end + len(read.positions)
        mixed += weights[..., begin:end] @ values[:, read.cells].float()
    return mixed.view(heads, n, dim).transpose(0, 1)


def gather(tensor: Tensor, slab: Slab, positions: Sequence[range]) -> Tensor:
    """The cells of `positions`, in order: [layers, kv_heads, positions, width]."""
    parts = [tensor[:, slab.slot, :, place.cells] for place in places(slab, positions)]
    return torch.cat(parts, dim=2) if parts else tensor[:, slab.slot, :, :0]


def scatter(tensor: Tensor, slab: Slab, positions: Sequence[range], content: Tensor) -> None:
    """The reverse of `gather`."""
    for packed, cells in places(slab, positions):
        tensor[:, slab.slot, :, cells] = content[:, :, packed]


def to_bits(tensor: Tensor) -> NDArray[np.generic]:
    """A copy on the host, bfloat16 as 16-bit integers."""
    host = tensor.cpu()
    bits: NDArray[np.generic] = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy().copy()
    return bits


class TorchDecoder:
    """A Llama-style decoder with the options of `Architecture`."""

    def __init__(self, arch: Architecture, weights: DecoderWeights[Tensor]) -> None:
        self.arch = arch
        self.weights = weights
        self._device = weights.embedding.device

    def forward(self, packed: Packed, attend: TorchSlabAttention) -> Tensor:
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

    def _project(self, layer: LayerWeights[Tensor], h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    """In float32: rounded logits could change the chosen token."""
    if head.dtype == torch.float32:
        return F.linear(x, head)
    return torch.mm(x.to(head.dtype), head.T, out_dtype=torch.float32)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
