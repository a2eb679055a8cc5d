"""One forward in plain numbers: how its tokens are packed, which cells each row writes and reads, what is masked.

Knows slabs and windows, no tensors: the torch and MLX engines carry out the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Row
from holdfast.engine.slab import Slab


class CellSlice(NamedTuple):
    """Consecutive items of packed content, and the consecutive cells that hold them."""

    packed: slice
    cells: slice


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive cells with consecutive positions that queries of one rotation attend to."""

    cells: slice
    first_position: int
    is_sink: bool

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.cells.stop - self.cells.start)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one row does in every layer."""

    slot: int
    packed: slice  # its tokens in the batch
    writes: tuple[CellSlice, ...]
    reads: tuple[Stretch, ...]
    mask: NDArray[np.bool_] | None  # [queries, keys], True where a query must not attend; None: nothing is masked


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of all rows, one after the other, and the plan of each row."""

    tokens: list[int]
    positions: list[int]  # rotary positions of keys, and of queries for recent keys
    sink_positions: list[int]  # rotary positions of queries for sink keys
    wanted: list[int]  # indices of the tokens whose logits are wanted
    rows: list[RowPlan]


def pack(rows: Sequence[Row]) -> Packed:
    """The plan of one forward over `rows`. Their slabs have already declared the write."""
    packed = Packed([], [], [], [], [])
    for slab, tokens, num_logits in rows:
        written = range(slab.length, slab.length + len(tokens))
        packed.rows.append(_plan(slab, written, len(packed.tokens)))
        packed.tokens.extend(tokens)
        packed.positions.extend(written)
        packed.sink_positions.extend(map(slab.window.sink_query, written))
        packed.wanted.extend(range(len(packed.tokens) - num_logits, len(packed.tokens)))
    return packed


def places(slab: Slab, positions: Sequence[range], start: int = 0) -> Iterator[CellSlice]:
    """The cells of `positions`, for content that holds them in order from index `start` on."""
    for part in positions:
        for run in slab.runs(part):
            yield CellSlice(slice(start, start + len(run)), slice(run.start, run.stop))
            start += len(run)


def _plan(slab: Slab, written: range, start: int) -> RowPlan:
    reads = tuple(_stretches(slab, written))
    return RowPlan(
        slot=slab.slot,
        packed=slice(start, start + len(written)),
        writes=tuple(places(slab, [written], start)),
        reads=reads,
        mask=_mask(slab, written, reads) if len(written) > 1 else None,
    )


def _stretches(slab: Slab, written: range) -> Iterator[Stretch]:
    """The cells that at least one query of `written` attends to, each position once."""
    window = slab.window
    if written.stop <= window.size:  # nothing is dropped yet: cells are positions, and both rotations are the same
        yield Stretch(slice(0, written.stop), 0, is_sink=False)
        return
    if window.sink:
        yield Stretch(slice(0, window.sink), 0, is_sink=True)
    first = max(window.sink, written.start - window.recent + 1)
    for run in slab.runs(range(first, written.stop)):
        yield Stretch(slice(run.start, run.stop), first, is_sink=False)
        first += len(run)


def _mask(slab: Slab, written: range, reads: Sequence[Stretch]) -> NDArray[np.bool_] | None:
    window = slab.window
    queries = np.arange(written.start, written.stop)[:, None]
    keys = np.concatenate([np.arange(read.positions.start, read.positions.stop) for read in reads])
    hidden: NDArray[np.bool_] = (keys > queries) | ((keys >= window.sink) & (keys <= queries - window.recent))
    return hidden if hidden.any() else None


class RotaryTables(NamedTuple):
    """cos and sin of the rotary angles: [tokens, 1, head_dim / 2] each."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def rotary_tables(inverse_frequencies: Sequence[float], positions: Sequence[int]) -> RotaryTables:
    """Computed on the host: devices may lack float64, and float32 angles are off by 0.016 at position 1,000,000."""
    angles = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inverse_frequencies, np.float64)
    return RotaryTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
