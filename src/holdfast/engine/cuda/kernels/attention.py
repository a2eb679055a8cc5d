"""Attention over slabs under the window's mask, grouped heads sharing every key that is read.

Work comes in blocks of consecutive queries of one session. Keys are visited by absolute position, in tiles and splits
whose borders are multiples of their size: whatever a query's neighbours are, its own keys are summed in one order.
Sinks are looked at with a query of their own, so they are a split apart. A tile that a query does not see adds exactly
nothing to it.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launching import power_of_two, take_turn


class AttentionTile(NamedTuple):
    """Keys in one step, keys in one split (a multiple), and how it is compiled."""

    keys: int
    split: int
    num_warps: int
    num_stages: int


class Blocks(NamedTuple):
    """Blocks of consecutive queries: the first token's index and the number of tokens, of at most `size`."""

    firsts: Tensor
    counts: Tensor
    size: int


class Splits(NamedTuple):
    """How many splits a block may need, and the places for their results: a split's place is fixed by its position."""

    num_sink: int
    num_recent: int
    num_places: int  # a power of two; the last `num_sink` are for sinks

    @classmethod
    def of(cls, max_pin: int, recent: int, most_queries: int, split: int) -> "Splits":
        num_sink = -(-max_pin // split)
        num_recent = -(-(recent + most_queries - 1) // split) + 1
        return cls(num_sink, num_recent, power_of_two(num_sink + num_recent))


@triton.jit
def absorb(query, k, v, is_seen, top, norm, mixed, scale):
    """Take a tile of keys and values into a running softmax; what is not seen adds exactly nothing."""
    scores = tl.where(is_seen, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - safe)
    weights = tl.exp2(scores - safe[:, None])
    norm = norm * fade + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return new_top, norm, mixed


@triton.jit
def attend(
    query, top, norm, mixed, keys_ptr, values_ptr, low, high, positions, sink, capacity, recent, scale,
    IS_SINK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take the keys of positions low..high into a running softmax."""
    start = low // KEYS * KEYS
    num = (high - start).to(tl.int32)
    dim = tl.arange(0, DIM_BLOCK)
    offset = tl.arange(0, KEYS)
    ring = (capacity - sink).to(tl.int32)
    begin = ((start - sink + ring.to(tl.int64) * KEYS) % ring).to(tl.int32)
    for done in range(0, num, KEYS):
        key = start + done + offset
        is_live = (key >= low) & (key < high)
        if IS_SINK:
            cell = done + offset + start
        else:
            cell = sink + (begin + done + offset) % ring
        at = cell[:, None] * DIM + dim[None, :]
        mask = is_live[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0)
        v = tl.load(values_ptr + at, mask=mask, other=0)
        is_seen = is_live[None, :] & (key[None, :] <= positions[:, None])
        if not IS_SINK:
            is_seen = is_seen & (key[None, :] > positions[:, None] - recent)
        top, norm, mixed = absorb(query, k, v, is_seen, top, norm, mixed, scale)
    return top, norm, mixed


@triton.jit
def _block_of(positions_ptr, slots_ptr, sinks_ptr, first, count, recent):
    """A block's slot, sink, first position, end, and the first recent position that it sees."""
    position = tl.load(positions_ptr + first)
    sink = tl.load(sinks_ptr + first)
    return tl.load(slots_ptr + first), sink, position, position + count, tl.maximum(sink, position - recent + 1)


@triton.jit
def _queries(query_ptr, first, count, head, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
             DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """One block's queries of one group of heads: [rows, dim], a token's heads side by side."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    at = ((first + row // GROUP) * HEADS + head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
    return tl.load(query_ptr + at, mask=(row < count * GROUP)[:, None] & (dim < DIM)[None, :], other=0)


@triton.jit
def _split_attention(
    query_ptr,
    sink_query_ptr,
    keys_ptr,
    values_ptr,
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
    if split < NUM_SINK:
        low = split.to(tl.int64) * SPLIT
        high = tl.minimum(tl.minimum(sink, end), low + SPLIT)
        place = NUM_PLACES - NUM_SINK + split.to(tl.int64)
    else:
        number = begin // SPLIT + split - NUM_SINK
        low = tl.maximum(begin, number * SPLIT)
        high = tl.minimum(end, (number + 1) * SPLIT)
        place = number % (NUM_PLACES - NUM_SINK)
    if (count > 0) & (low < high):
        row = tl.arange(0, ROWS)
        positions = position + row // GROUP
        at = (slot * KV_HEADS + head) * capacity * DIM
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
        if split < NUM_SINK:
            query = _queries(sink_query_ptr, first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
            top, norm, mixed = attend(
                query, top, norm, mixed, keys_ptr + at, values_ptr + at, low, high, positions, sink, capacity, recent,
                scale, True, DIM, DIM_BLOCK, KEYS,
            )  # fmt: skip
        else:
            query = _queries(query_ptr, first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
            top, norm, mixed = attend(
                query, top, norm, mixed, keys_ptr + at, values_ptr + at, low, high, positions, sink, capacity, recent,
                scale, False, DIM, DIM_BLOCK, KEYS,
            )  # fmt: skip
        out = ((block * KV_HEADS + head) * NUM_PLACES + place) * SIZE * GROUP + row
        is_row = row < count * GROUP
        dim = tl.arange(0, DIM_BLOCK)
        tl.store(top_ptr + out, top, mask=is_row)
        tl.store(norm_ptr + out, norm, mask=is_row)
        tl.store(mixed_ptr + out[:, None] * DIM + dim[None, :], mixed, mask=is_row[:, None] & (dim < DIM)[None, :])


@triton.jit
def _combine(
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
        NUM_RING: tl.constexpr = NUM_PLACES - NUM_SINK
        place = tl.arange(0, NUM_PLACES)
        lowest = begin // SPLIT
        number = lowest + (place - lowest % NUM_RING + NUM_RING) % NUM_RING
        is_recent = tl.maximum(begin, number * SPLIT) < tl.minimum(end, (number + 1) * SPLIT)
        is_sink = (place - NUM_RING) * SPLIT < tl.minimum(sink, end)
        is_filled = tl.where(place < NUM_RING, is_recent, is_sink)
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
def _whole_attention(
    query_ptr,
    sink_query_ptr,
    keys_ptr,
    values_ptr,
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
        row = tl.arange(0, ROWS)
        positions = position + row // GROUP
        at = (slot * (HEADS // GROUP) + head) * capacity * DIM
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
        query = _queries(sink_query_ptr, first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr + at, values_ptr + at, sink * 0, tl.minimum(sink, end), positions, sink,
            capacity, recent, scale, True, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
        query = _queries(query_ptr, first, count, head, HEADS, GROUP, DIM, DIM_BLOCK, ROWS)
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr + at, values_ptr + at, begin, end, positions, sink,
            capacity, recent, scale, False, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
        dim = tl.arange(0, DIM_BLOCK)
        out = ((first + row // GROUP) * HEADS + head * GROUP + row % GROUP)[:, None] * DIM + dim[None, :]
        answer = (mixed / norm[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out, answer, mask=(row < count * GROUP)[:, None] & (dim < DIM)[None, :])
