"""Attention over slabs under the window's mask; the heads of a group share every key that is read.

A block is several consecutive queries of one session. Keys are visited by absolute position, in tiles and splits whose
borders are multiples of their size: a query's keys are summed in the same order, whatever its neighbours are. Sinks
have a query of their own, so they are in splits of their own. A tile that a query does not see adds exactly nothing.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import overlapped, power_of_two, take_turn
from holdfast.engine.cuda.kernels.softmax import attend, filled_places, fresh, split_of, store_part
from holdfast.engine.cuda.slabs import Cache

Pair = tuple[Tensor, Tensor]
Places = tuple[Tensor, Tensor, Tensor]  # each token's position, slot and sink

_MOST_BLOCKS = 128  # in one launch, which bounds the memory of partial results


class AttentionTile(NamedTuple):
    """Keys in one step, keys in one split (a multiple of it), and compile options."""

    keys: int
    split: int
    num_warps: int
    num_stages: int


class Blocks(NamedTuple):
    """Blocks of consecutive queries: the index of the first token and the number of tokens, at most `size`."""

    firsts: Tensor
    counts: Tensor
    size: int


class Splits(NamedTuple):
    """How many splits a block may need, and the places for their results. A split's position decides its place."""

    num_sink: int
    num_recent: int
    num_places: int  # a power of two; the last `num_sink` places are for sinks

    @classmethod
    def of(cls, max_pin: int, recent: int, most_queries: int, split: int) -> "Splits":
        num_sink = -(-max_pin // split)
        num_recent = -(-(recent + most_queries - 1) // split) + 1
        return cls(num_sink, num_recent, power_of_two(num_sink + num_recent))


@triton.jit
def _block_of(positions_ptr, slots_ptr, sinks_ptr, first, count, recent):
    """A block's slot, sink, first position, end, and the first recent position that it sees."""
    position = tl.load(positions_ptr + first)
    sink = tl.load(sinks_ptr + first)
    return tl.load(slots_ptr + first), sink, position, position + count, tl.maximum(sink, position - recent + 1)


@triton.jit
def _rows_of(first, count, head, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
             DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The offsets of one block's rows of one group of heads, and which exist: [rows, dim], token by token."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    at = ((first + row // GROUP) * HEADS + head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
    return at, (row < count * GROUP)[:, None] & (dim < DIM)[None, :]


@triton.jit
def _attend_block(
    query_ptr, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, first, count, head, low,
    high, position, sink, capacity, recent, scale, IS_SINK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add a slab's keys of positions low..high, all sinks or none, to the running softmax of a block's queries."""
    at, is_live = _rows_of(first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
    query = tl.load(query_ptr + at, mask=is_live, other=0)
    positions = position + tl.arange(0, ROWS) // GROUP
    return attend(
        query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, positions,
        sink, capacity, recent, scale, IS_SINK, DIM, DIM_BLOCK, KEYS,
    )  # fmt: skip


@triton.jit
def split_attention(
    query_ptr,
    sink_query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    slots_ptr,
    sinks_ptr,
    firsts_ptr,
    counts_ptr,
    mixed_ptr,
    top_ptr,
    norm_ptr,
    capacity,
    recent,
    scale,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SINK: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    take_turn()
    split, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    first, count = tl.load(firsts_ptr + block), tl.load(counts_ptr + block)
    slot, sink, position, end, begin = _block_of(positions_ptr, slots_ptr, sinks_ptr, first, count, recent)
    low, high, place = split_of(split, begin, end, sink, SPLIT, NUM_SINK, NUM_PLACES)
    if (count > 0) & (low < high):
        slab = (slot * KV_HEADS + head) * capacity
        top, norm, mixed = fresh(ROWS, DIM_BLOCK)
        if split < NUM_SINK:
            top, norm, mixed = _attend_block(
                sink_query_ptr, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, first,
                count, head, low, high, position, sink, capacity, recent, scale, True, HEADS, GROUP, DIM, DIM_BLOCK,
                ROWS, KEYS,
            )  # fmt: skip
        else:
            top, norm, mixed = _attend_block(
                query_ptr, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, first,
                count, head, low, high, position, sink, capacity, recent, scale, False, HEADS, GROUP, DIM, DIM_BLOCK,
                ROWS, KEYS,
            )  # fmt: skip
        row = tl.arange(0, ROWS)
        out = ((block * KV_HEADS + head) * NUM_PLACES + place) * SIZE * GROUP + row
        store_part(top_ptr, norm_ptr, mixed_ptr, out, row < count * GROUP, top, norm, mixed, DIM, DIM_BLOCK)


@triton.jit
def combine(
    mixed_ptr,
    top_ptr,
    norm_ptr,
    out_ptr,
    positions_ptr,
    slots_ptr,
    sinks_ptr,
    firsts_ptr,
    counts_ptr,
    recent,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SINK: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    take_turn()
    head, query, block = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, count = tl.load(firsts_ptr + block), tl.load(counts_ptr + block)
    if query < count:
        _, sink, _, end, begin = _block_of(positions_ptr, slots_ptr, sinks_ptr, first, count, recent)
        place = tl.arange(0, NUM_PLACES)
        is_filled = filled_places(begin, end, sink, SPLIT, NUM_SINK, NUM_PLACES)
        row = query * GROUP + head % GROUP
        at = ((block * (HEADS // GROUP) + head // GROUP) * NUM_PLACES + place) * SIZE * GROUP + row
        top = tl.load(top_ptr + at, mask=is_filled, other=float("-inf"))
        share = tl.exp2(top - tl.max(top, axis=0))
        total = tl.sum(share * tl.load(norm_ptr + at, mask=is_filled, other=0), axis=0)
        dim = tl.arange(0, DIM_BLOCK)
        is_dim = dim < DIM
        mask = is_filled[:, None] & is_dim[None, :]
        mixed = tl.load(mixed_ptr + at[:, None] * DIM + dim[None, :], mask=mask, other=0)
        answer = tl.sum(mixed * share[:, None], axis=0) / total
        out = out_ptr + ((first + query) * HEADS + head) * DIM + dim
        tl.store(out, answer.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def whole_attention(
    query_ptr,
    sink_query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    slots_ptr,
    sinks_ptr,
    firsts_ptr,
    counts_ptr,
    out_ptr,
    capacity,
    recent,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    take_turn()
    head, block = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(firsts_ptr + block), tl.load(counts_ptr + block)
    if count > 0:
        slot, sink, position, end, begin = _block_of(positions_ptr, slots_ptr, sinks_ptr, first, count, recent)
        slab = (slot * (HEADS // GROUP) + head) * capacity
        top, norm, mixed = fresh(ROWS, DIM_BLOCK)
        top, norm, mixed = _attend_block(
            sink_query_ptr, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, first,
            count, head, sink * 0, tl.minimum(sink, end), position, sink, capacity, recent, scale, True, HEADS, GROUP,
            DIM, DIM_BLOCK, ROWS, KEYS,
        )  # fmt: skip
        top, norm, mixed = _attend_block(
            query_ptr, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, first, count,
            head, begin, end, position, sink, capacity, recent, scale, False, HEADS, GROUP, DIM, DIM_BLOCK, ROWS, KEYS,
        )  # fmt: skip
        answer = (mixed / norm[:, None]).to(out_ptr.dtype.element_ty)
        out, is_live = _rows_of(first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
        tl.store(out_ptr + out, answer, mask=is_live)


def attend_split(
    queries: Pair, cache: Cache, places: Places, blocks: Blocks, splits: Splits, recent: int, tile: AttentionTile
) -> Tensor:
    """Attention [tokens, heads * dim] of queries [tokens, heads, dim], with a program for each split of the keys."""
    query, keys = queries[0], cache.keys
    num_tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
    num_blocks = min(_MOST_BLOCKS, blocks.firsts.shape[0])
    parts = new_parts((num_blocks, kv_heads, splits.num_places, blocks.size * group), dim, query.device)
    sizes = {"SIZE": blocks.size} | head_sizes(heads, group, dim) | split_sizes(tile, splits)
    for start in range(0, blocks.firsts.shape[0], num_blocks):
        firsts, counts = blocks.firsts[start : start + num_blocks], blocks.counts[start : start + num_blocks]
        split_attention[(splits.num_sink + splits.num_recent, kv_heads, firsts.shape[0])](
            *queries,
            *cache.pointers,
            *places,
            firsts,
            counts,
            *parts,
            keys.shape[2],
            recent,
            score_scale(dim),
            ROWS=power_of_two(blocks.size * group, 16),
            KEYS=tile.keys,
            **sizes,
            **overlapped(tile.num_warps, tile.num_stages),
        )
        combine[(heads, blocks.size, firsts.shape[0])](
            *parts, out, *places, firsts, counts, recent, **sizes, **overlapped(4)
        )
    return out


def attend_whole(
    queries: Pair, cache: Cache, places: Places, blocks: Blocks, recent: int, tile: AttentionTile
) -> Tensor:
    """The same result with all keys of a block in one program: for prompts, which have enough blocks."""
    query, keys = queries[0], cache.keys
    num_tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
    whole_attention[(keys.shape[1], blocks.firsts.shape[0])](
        *queries,
        *cache.pointers,
        *places,
        blocks.firsts,
        blocks.counts,
        out,
        keys.shape[2],
        recent,
        score_scale(dim),
        ROWS=power_of_two(blocks.size * group, 16),
        KEYS=tile.keys,
        **head_sizes(heads, group, dim),
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out


def new_parts(rows: tuple[int, int, int, int], dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the mixed values, top scores and norms of splits: rows are [blocks, kv_heads, places, queries]."""
    mixed = torch.empty(*rows, dim, dtype=torch.float32, device=device)
    top, norm = torch.empty(2, *rows, dtype=torch.float32, device=device)
    return mixed, top, norm


def head_sizes(heads: int, group: int, dim: int) -> dict[str, int]:
    return {"HEADS": heads, "GROUP": group, "DIM": dim, "DIM_BLOCK": power_of_two(dim, 16)}


def split_sizes(tile: AttentionTile, splits: Splits) -> dict[str, int]:
    return {"SPLIT": tile.split, "NUM_SINK": splits.num_sink, "NUM_PLACES": splits.num_places}


def score_scale(dim: int) -> float:
    """1 / sqrt(dim), for scores that are exponents of two."""
    return math.log2(math.e) / math.sqrt(dim)
