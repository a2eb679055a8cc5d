"""Slabs in the memory of the process, as the native code reads them: keys side by side, values cell by cell."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.batch import places
from holdfast.engine.interface import KeysValues
from holdfast.engine.slab import BLOCK, Slab


class NativeSlabs:
    """Keys lie as attention reads them: of a block, every unit of 32 bits of its 16 cells side by side. A unit is one
    dimension in float32, two in bfloat16."""

    def __init__(self, *, layers: int, slots: int, heads: int, capacity: int, dim: int, kind: type[np.generic]) -> None:
        units = dim * np.dtype(kind).itemsize // 4
        # Filled and not only reserved, so that the memory is committed from the start.
        self.keys = np.full((layers, slots, heads, capacity // BLOCK, units, BLOCK), 0, np.uint32)
        self.values = np.full((layers, slots, heads, capacity, dim), 0, kind)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: int, target: int) -> None:
        for cells in (self.keys, self.values):
            cells[:, target] = cells[:, source]

    def clear(self, slot: int) -> None:
        for cells in (self.keys, self.values):
            cells[:, slot] = 0

    def read(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        """Copies of [layers, heads, positions, dim], in order."""
        cells = [where for _, where in places(slab, positions)] or [slice(0, 0)]
        keys = [self._keys_of(slab.slot, where) for where in cells]
        values = [self.values[:, slab.slot, :, where] for where in cells]
        return KeysValues(np.concatenate(keys, axis=2), np.concatenate(values, axis=2))

    def write(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        units = np.ascontiguousarray(kv.keys).view(np.uint32)
        for packed, where in places(slab, positions):
            self.values[:, slab.slot, :, where] = kv.values[:, :, packed]
            first = packed.start - where.start  # what cell 0 would have
            for blocks, lanes in _block_parts(where):
                # [layers, heads, blocks, cells, units]
                target = self.keys[:, slab.slot, :, blocks, :, lanes].swapaxes(-1, -2)
                start = first + blocks.start * BLOCK + lanes.start
                source = units[:, :, start : start + target.shape[2] * target.shape[3]]
                target[...] = source.reshape(target.shape)

    def _keys_of(self, slot: int, cells: slice) -> NDArray[np.generic]:
        first, end = cells.start // BLOCK, -(-cells.stop // BLOCK)
        held = self.keys[:, slot, :, first:end].swapaxes(-1, -2)  # [layers, heads, blocks, 16, units]
        rows = np.ascontiguousarray(held).view(self.values.dtype)
        rows = rows.reshape(*held.shape[:2], -1, rows.shape[-1])  # [layers, heads, cells, dim]
        return rows[:, :, cells.start - first * BLOCK : cells.stop - first * BLOCK]


def _block_parts(cells: slice) -> Iterator[tuple[slice, slice]]:
    """Consecutive cells as parts of consecutive blocks and, within each of these, consecutive lanes."""
    at = cells.start
    while at < cells.stop:
        block, lane = divmod(at, BLOCK)
        whole = 0 if lane else (cells.stop - at) // BLOCK
        num = whole * BLOCK or min(BLOCK - lane, cells.stop - at)
        yield slice(block, block + max(whole, 1)), slice(lane, BLOCK if whole else lane + num)
        at += num
