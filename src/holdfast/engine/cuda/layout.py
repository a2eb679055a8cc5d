"""Where the rows of one forward lie in the kernels' inputs: plain numbers, then one copy to the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.cuda.kernels.attention import Blocks
from holdfast.engine.interface import Row
from holdfast.errors import InvalidArgument

_PADDING = -1  # the slot of a token that belongs to no session


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A shape that one graph serves: up to `num_rows` rows of up to `num_tokens` tokens each."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """tokens: [token id, position, slot, sink][tokens]; blocks: [first, count][blocks]; the wanted tokens' indices."""

    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]
    wanted: list[int]


class Inputs:
    """What a forward reads, in one tensor so that it travels at once. A graph keeps its own for ever."""

    def __init__(self, num_tokens: int, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._all = torch.zeros(4 * num_tokens + 2 * num_blocks, dtype=torch.int64, device=device)
        rows = self._all[: 4 * num_tokens].view(4, num_tokens)
        self.tokens, self.positions, self.slots, self.sinks = rows
        firsts, counts = self._all[4 * num_tokens :].view(2, num_blocks)
        self.blocks = Blocks(firsts, counts, block_size)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.positions, self.slots, self.sinks

    def fill(self, layout: Layout) -> None:
        """Pageable memory: the bytes are taken before this returns, the copy itself waits for nobody."""
        tokens = np.zeros((4, self.tokens.shape[0]), np.int64)
        tokens[2] = _PADDING
        tokens[:, : layout.tokens.shape[1]] = layout.tokens
        blocks = np.zeros((2, self.blocks.firsts.shape[0]), np.int64)
        blocks[:, : layout.blocks.shape[1]] = layout.blocks
        flat = np.concatenate([tokens.ravel(), blocks.ravel()])
        self._all.copy_(torch.from_numpy(flat), non_blocking=True)

    def fits(self, layout: Layout) -> bool:
        return int(layout.blocks.shape[1]) <= self.blocks.firsts.shape[0]


def lay_out(rows: Sequence[Row], vocab_size: int, block_size: int, bucket: Bucket | None = None) -> Layout:
    """Rows one after the other, or, in a bucket, each padded to the bucket's tokens."""
    lengths = [len(row.tokens) for row in rows]
    total = len(rows) * bucket.num_tokens if bucket else sum(lengths)
    tokens = np.zeros((4, total), np.int64)
    tokens[2] = _PADDING
    blocks: list[tuple[int, int]] = []
    wanted: list[int] = []
    start = 0
    for (slab, ids, num_logits), length in zip(rows, lengths, strict=True):
        end = start + length
        tokens[0, start:end] = ids
        tokens[1, start:end] = np.arange(slab.length, slab.length + length)
        tokens[2, start:end] = slab.slot
        tokens[3, start:end] = slab.window.sink
        wanted.extend(range(end - num_logits, end))
        reserved = bucket.num_tokens if bucket else length
        offsets = range(0, reserved, block_size)
        blocks.extend((start + offset, max(0, min(block_size, length - offset))) for offset in offsets)
        start += reserved
    if tokens[0].min() < 0 or tokens[0].max() >= vocab_size:
        raise InvalidArgument(f"token ids must be between 0 and {vocab_size - 1}")
    return Layout(tokens, np.array(blocks, np.int64).T, wanted)


def num_blocks(bucket: Bucket, block_size: int) -> int:
    return bucket.num_rows * -(-bucket.num_tokens // block_size)
