"""Softmax over a slab's keys, one tile at a time, in any number of parts that are combined afterwards.

A running softmax has three values per row: the top score so far, the sum of the weights relative to it (norm), and the
values weighted by them (mixed). A part is the running softmax of one split, stored at a place that the split's position
decides: the places are a ring for recent keys, the last `NUM_SINK` of them are for sinks.
"""

import triton
import triton.language as tl

from holdfast.engine.cuda.kernels.scales import widened


@triton.jit
def fresh(ROWS: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """An empty running softmax: top, norm and mixed."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM_BLOCK), tl.float32)


@triton.jit
def absorb(query, k, v, key_scales, value_scales, is_seen, top, norm, mixed, scale):
    """Add a tile of keys and values to a running softmax. Keys that are not seen add exactly nothing."""
    scores = tl.dot(query, tl.trans(widened(k, query)), input_precision="ieee") * scale
    if k.dtype == tl.float8e4nv:
        scores *= key_scales[None, :]
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - safe)
    weights = tl.exp2(scores - safe[:, None])
    norm = norm * fade + tl.sum(weights, axis=1)
    if v.dtype == tl.float8e4nv:
        weights *= value_scales[None, :]
    v = widened(v, query)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return new_top, norm, mixed


@triton.jit
def absorb_one(query, k, v, top, norm, mixed, scale):
    """Add one key and its value, which every row sees, to a running softmax."""
    score = tl.sum(query.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
    new_top = tl.maximum(top, score)
    fade, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
    norm = norm * fade + weight
    mixed = mixed * fade[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
    return new_top, norm, mixed


@triton.jit
def cell_of(position, sink, capacity):
    """The cell of a position: sinks come first, the others share a ring behind them."""
    return tl.where(position < sink, position, sink + (position - sink) % (capacity - sink))


@triton.jit
def ring_at(start, sink, capacity, KEYS: tl.constexpr):
    """The ring's size, and the ring index of a tile's first position, which may be before the first in the ring."""
    ring = (capacity - sink).to(tl.int32)
    return ring, ((start - sink + ring.to(tl.int64) * KEYS) % ring).to(tl.int32)


@triton.jit
def load_cells(ptr, scales_ptr, cell, is_live, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Keys or values [cells, dim], and in fp8 their scales; zeros where they are not live."""
    dim = tl.arange(0, DIM_BLOCK)
    at, mask = cell[:, None] * DIM + dim[None, :], is_live[:, None] & (dim < DIM)[None, :]
    found = tl.load(ptr + at, mask=mask, other=0.0)
    scales = tl.zeros_like(cell).to(tl.float32)
    if ptr.dtype.element_ty == tl.float8e4nv:
        scales = tl.load(scales_ptr + cell, mask=is_live, other=0.0).to(tl.float32)
    return found, scales


@triton.jit
def attend(
    query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, positions, sink,
    capacity, recent, scale, IS_SINK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the keys of positions low..high to a running softmax; `slab` is the first cell."""
    start = low // KEYS * KEYS
    num = (high - start).to(tl.int32)
    offset = tl.arange(0, KEYS)
    ring, begin = ring_at(start, sink, capacity, KEYS)
    keys_ptr += slab * DIM
    values_ptr += slab * DIM
    if keys_ptr.dtype.element_ty == tl.float8e4nv:
        key_scales_ptr += slab
        value_scales_ptr += slab
    for done in range(0, num, KEYS):
        key = start + done + offset
        is_live = (key >= low) & (key < high)
        if IS_SINK:
            cell = done + offset + start
        else:
            cell = sink + (begin + done + offset) % ring
        k, key_scales = load_cells(keys_ptr, key_scales_ptr, cell, is_live, DIM, DIM_BLOCK)
        v, value_scales = load_cells(values_ptr, value_scales_ptr, cell, is_live, DIM, DIM_BLOCK)
        is_seen = is_live[None, :] & (key[None, :] <= positions[:, None])
        if not IS_SINK:
            is_seen = is_seen & (key[None, :] > positions[:, None] - recent)
        top, norm, mixed = absorb(query, k, v, key_scales, value_scales, is_seen, top, norm, mixed, scale)
    return top, norm, mixed


@triton.jit
def store_part(
    top_ptr, norm_ptr, mixed_ptr, at, is_row, top, norm, mixed, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):  # fmt: skip
    """Store a running softmax in rows `at`, to be combined with the other parts."""
    dim = tl.arange(0, DIM_BLOCK)
    tl.store(top_ptr + at, top, mask=is_row)
    tl.store(norm_ptr + at, norm, mask=is_row)
    tl.store(mixed_ptr + at[:, None] * DIM + dim[None, :], mixed, mask=is_row[:, None] & (dim < DIM)[None, :])


@triton.jit
def split_of(split, begin, end, sink, SPLIT: tl.constexpr, NUM_SINK: tl.constexpr, NUM_PLACES: tl.constexpr):
    """The positions low..high of a split's keys, and the place of its part. Splits of sinks come first."""
    NUM_RING: tl.constexpr = NUM_PLACES - NUM_SINK
    is_sink = split < NUM_SINK
    number = begin // SPLIT + split - NUM_SINK
    low = tl.where(is_sink, split.to(tl.int64) * SPLIT, tl.maximum(begin, number * SPLIT))
    border = tl.where(is_sink, tl.minimum(sink, (split.to(tl.int64) + 1) * SPLIT), (number + 1) * SPLIT)
    place = tl.where(is_sink, NUM_RING + split.to(tl.int64), number % NUM_RING)
    return low, tl.minimum(border, end), place


@triton.jit
def filled_places(begin, end, sink, SPLIT: tl.constexpr, NUM_SINK: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Which places hold a part, for queries that end before `end` and see recent keys from `begin` on."""
    NUM_RING: tl.constexpr = NUM_PLACES - NUM_SINK
    place = tl.arange(0, NUM_PLACES)
    lowest = begin // SPLIT
    number = lowest + (place - lowest % NUM_RING + NUM_RING) % NUM_RING
    is_recent = tl.maximum(begin, number * SPLIT) < end
    is_sink = (place - NUM_RING) * SPLIT < tl.minimum(sink, end)
    return tl.where(place < NUM_RING, is_recent, is_sink)
