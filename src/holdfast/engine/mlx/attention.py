"""Slabs as MLX arrays, and attention over them: write first, then attend under the window's mask.

Rows are ragged and packed; each reads only the cells it may see. Scores are float32 whatever the
slabs hold.
"""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from holdfast.engine.batch import RowPlan, places
from holdfast.engine.slab import Slab

Layers = list[mx.array]  # [kv_heads, capacity, head_dim] each


class SlabArrays:
    """Keys and values of all slabs, for each slab a list of layers.

    Every array is on its own: MLX writes in place only where nobody else looks at the same buffer, and
    one row's reads must not make the next row's write copy all slabs.
    """

    def __init__(self, num_slabs: int, num_layers: int, shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
        def layers() -> Layers:
            return [mx.zeros(shape, dtype) for _ in range(num_layers)]

        self.keys = [layers() for _ in range(num_slabs)]
        self.values = [layers() for _ in range(num_slabs)]
        mx.eval(self.keys, self.values)  # holds the memory from the start

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for slabs in (self.keys, self.values) for layers in slabs for array in layers)

    def of(self, slots: Iterable[int]) -> list[Layers]:
        """All arrays of these slabs, for MLX to bring up to date."""
        return [slabs[slot] for slot in slots for slabs in (self.keys, self.values)]


class MLXSlabAttention:
    """One forward's attention, for all its rows and layers."""

    def __init__(self, arrays: SlabArrays, plans: Sequence[RowPlan]) -> None:
        self._arrays = arrays
        self._plans = plans
        self._masks = [None if plan.mask is None else mx.array(plan.mask) for plan in plans]

    def __call__(self, layer: int, query: mx.array, sink_query: mx.array, key: mx.array, value: mx.array) -> mx.array:
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
    """queries, for recent keys and for sinks: [n, heads, dim]; keys, values: [kv_heads, capacity, dim]."""
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
