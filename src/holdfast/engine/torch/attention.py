"""Slabs as tensors, and attention over them: write first, then attend under the window's mask.

Rows are ragged and packed; each reads only the cells it may see. Scores are float32 whatever the
slabs hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from holdfast.engine.interface import Row
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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive cells that hold consecutive positions, all looked at with one query rotation."""

    cells: slice
    first_position: int
    is_sink: bool

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.cells.stop - self.cells.start)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one row does in every layer, worked out once a forward."""

    slot: int
    packed: slice  # its tokens among the packed ones
    writes: tuple[tuple[slice, slice], ...]  # packed tokens -> cells
    reads: tuple[Stretch, ...]
    mask: Tensor | None  # [queries, keys] True where a query may not look; None where all may


class SlabAttention:
    """One forward's attention, for all its rows and layers."""

    def __init__(self, tensors: SlabTensors, rows: Sequence[Row]) -> None:
        self._tensors = tensors
        self._plans: list[RowPlan] = []
        start = 0
        for row in rows:
            self._plans.append(_plan(row, start, tensors.keys.device))
            start += len(row.tokens)

    def __call__(self, layer: int, query: Tensor, sink_query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._tensors.keys[layer], self._tensors.values[layer]
        out = torch.empty_like(query)
        for plan in self._plans:
            slab_keys, slab_values = keys[plan.slot], values[plan.slot]  # [kv_heads, capacity, dim]
            for packed, cells in plan.writes:
                slab_keys[:, cells] = key[packed].transpose(0, 1).to(slab_keys.dtype)
                slab_values[:, cells] = value[packed].transpose(0, 1).to(slab_values.dtype)
            out[plan.packed] = _attend(plan, query[plan.packed], sink_query[plan.packed], slab_keys, slab_values)
        return out.flatten(1)


def _attend(plan: RowPlan, query: Tensor, sink_query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query: [n, heads, dim]; keys, values: [kv_heads, capacity, dim] -> [n, heads, dim]"""
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
    if plan.mask is not None:
        scores.view(kv_heads, heads // kv_heads, n, -1).masked_fill_(plan.mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    mixed = torch.zeros_like(recent_side)
    end = 0
    for read in plan.reads:
        begin, end = end, end + len(read.positions)
        mixed += weights[..., begin:end] @ values[:, read.cells].float()
    return mixed.view(heads, n, dim).transpose(0, 1)


def _plan(row: Row, start: int, device: torch.device) -> RowPlan:
    slab, n = row.slab, len(row.tokens)
    written = range(slab.length, slab.length + n)
    writes: list[tuple[slice, slice]] = []
    offset = start
    for run in slab.runs(written):
        writes.append((slice(offset, offset + len(run)), slice(run.start, run.stop)))
        offset += len(run)
    reads = tuple(_stretches(slab, written))
    return RowPlan(
        slot=slab.slot,
        packed=slice(start, start + n),
        writes=tuple(writes),
        reads=reads,
        mask=_mask(slab, written, reads, device) if n > 1 else None,
    )


def _stretches(slab: Slab, written: range) -> Iterator[Stretch]:
    """The cells that at least one query of `written` sees, each position once."""
    window = slab.window
    if written.stop <= window.size:  # nothing has slid yet: cells are positions, and both rotations agree
        yield Stretch(slice(0, written.stop), 0, is_sink=False)
        return
    if window.sink:
        yield Stretch(slice(0, window.sink), 0, is_sink=True)
    first = max(window.sink, written.start - window.recent + 1)
    for run in slab.runs(range(first, written.stop)):
        yield Stretch(slice(run.start, run.stop), first, is_sink=False)
        first += len(run)


def _mask(slab: Slab, written: range, reads: Sequence[Stretch], device: torch.device) -> Tensor | None:
    window = slab.window
    queries = torch.arange(written.start, written.stop, device=device)[:, None]
    keys = torch.cat([torch.arange(r.positions.start, r.positions.stop, device=device) for r in reads])
    visible = (keys <= queries) & ((keys < window.sink) | (keys > queries - window.recent))
    return None if bool(visible.all()) else ~visible


def gather(tensor: Tensor, slab: Slab, positions: Sequence[range]) -> Tensor:
    """The cells of `positions`, in order: [layers, kv_heads, positions, dim]."""
    runs = [run for part in positions for run in slab.runs(part)]
    parts = [tensor[:, slab.slot, :, run.start : run.stop] for run in runs]
    return torch.cat(parts, dim=2) if parts else tensor[:, slab.slot, :, :0]


def scatter(tensor: Tensor, slab: Slab, positions: Sequence[range], content: Tensor) -> None:
    """The reverse of `gather`."""
    runs = [run for part in positions for run in slab.runs(part)]
    ends = [0]
    for run in runs:
        ends.append(ends[-1] + len(run))
    for run, (begin, end) in zip(runs, pairwise(ends), strict=True):
        tensor[:, slab.slot, :, run.start : run.stop] = content[:, :, begin:end]
