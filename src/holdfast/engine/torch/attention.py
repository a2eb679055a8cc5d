"""Slabs as tensors, and attention over them: write first, then attend under the window's mask.

Rows are ragged and packed; each reads only the cells it may see. Scores are float32 whatever the
slabs hold.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.batch import RowPlan, places
from holdfast.engine.interface import KeysValues
from holdfast.engine.slab import Slab


class SlabTensors:
    """Keys and values of all slabs: [layers, slabs, kv_heads, capacity, head_dim] each."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        # Zeroed by writing, so that the memory is really held from the start (and 0 x NaN cannot poison).
        self.keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.values = torch.empty(shape, dtype=dtype, device=device).zero_()

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: Slab, target: Slab) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, target.slot] = tensor[:, source.slot]

    def read(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return KeysValues(*(_to_bits(gather(tensor, slab, positions)) for tensor in (self.keys, self.values)))

    def write(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        for tensor, bits in zip((self.keys, self.values), kv, strict=True):
            scatter(tensor, slab, positions, torch.from_numpy(bits).view(tensor.dtype).to(tensor.device))

    def clear(self, slab: Slab) -> None:
        self.keys[:, slab.slot] = 0
        self.values[:, slab.slot] = 0


class TorchSlabAttention:
    """One forward's attention, for all its rows and layers."""

    def __init__(self, tensors: SlabTensors, plans: Sequence[RowPlan]) -> None:
        self._tensors = tensors
        self._plans = plans
        device = tensors.keys.device
        self._masks = [None if plan.mask is None else torch.from_numpy(plan.mask).to(device) for plan in plans]

    def __call__(self, layer: int, query: Tensor, sink_query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
    """queries, for recent keys and for sinks: [n, heads, dim]; keys, values: [kv_heads, capacity, dim]."""
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
    """The cells of `positions`, in order: [layers, kv_heads, positions, dim]."""
    parts = [tensor[:, slab.slot, :, place.cells] for place in places(slab, positions)]
    return torch.cat(parts, dim=2) if parts else tensor[:, slab.slot, :, :0]


def scatter(tensor: Tensor, slab: Slab, positions: Sequence[range], content: Tensor) -> None:
    """The reverse of `gather`."""
    for packed, cells in places(slab, positions):
        tensor[:, slab.slot, :, cells] = content[:, :, packed]


def _to_bits(tensor: Tensor) -> NDArray[np.generic]:
    """A copy on the host; numpy has no bfloat16, so those travel as 16-bit integers."""
    host = tensor.cpu()
    bits: NDArray[np.generic] = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy().copy()
    return bits
