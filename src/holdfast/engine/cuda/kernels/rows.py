"""Operations on one token's vector at a time: embedding, rotary tables, norms, gates, and the heads of one product."""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, power_of_two, take_turn
from holdfast.engine.cuda.kernels.scales import (
    Product,
    Rows,
    Scaled,
    cell_scale,
    product_of,
    row_pointers,
    store_row,
)
from holdfast.engine.cuda.kernels.softmax import cell_of
from holdfast.engine.cuda.slabs import Cache

_MOST_WARPS = 32  # of a program


@triton.jit
def _begin(
    tokens_ptr,
    positions_ptr,
    sinks_ptr,
    embedding_ptr,
    frequencies_ptr,
    x_ptr,
    rotations_ptr,
    recent,
    HIDDEN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + index)
    row = tl.load(embedding_ptr + token * HIDDEN + at, mask=at < HIDDEN, other=0)
    tl.store(x_ptr + index * HIDDEN + at, row.to(tl.float32), mask=at < HIDDEN)
    half = tl.arange(0, HALF_BLOCK)
    is_live = half < HALF
    position = tl.load(positions_ptr + index)
    sink_position = tl.minimum(position, tl.load(sinks_ptr + index) + recent - 1)
    frequency = tl.load(frequencies_ptr + half, mask=is_live, other=0)
    angle = position.to(tl.float64) * frequency
    sink_angle = sink_position.to(tl.float64) * frequency
    out = rotations_ptr + index * 4 * HALF + half
    tl.store(out, tl.cos(angle).to(tl.float32), mask=is_live)
    tl.store(out + HALF, tl.sin(angle).to(tl.float32), mask=is_live)
    tl.store(out + 2 * HALF, tl.cos(sink_angle).to(tl.float32), mask=is_live)
    tl.store(out + 3 * HALF, tl.sin(sink_angle).to(tl.float32), mask=is_live)


def begin(
    tokens: Tensor,
    positions: Tensor,
    sinks: Tensor,
    embedding: Tensor,
    frequencies: Tensor,
    x: Tensor,
    rotations: Tensor,
    recent: int,
) -> None:
    """Fills x [tokens, hidden] and rotations [tokens, (cos, sin, sink cos, sink sin), dim / 2]; angles are float64."""
    hidden, half = embedding.shape[1], frequencies.shape[0]
    _begin[(tokens.shape[0],)](
        tokens,
        positions,
        sinks,
        embedding,
        frequencies,
        x,
        rotations,
        recent,
        HIDDEN=hidden,
        HALF=half,
        BLOCK=power_of_two(hidden),
        HALF_BLOCK=power_of_two(half),
        **overlapped(4),
    )


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, delta_row_scales_ptr, delta_scales_ptr, weight_ptr, out_ptr, out_scales_ptr, epsilon,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_live = at < HIDDEN
    x = tl.load(x_ptr + index * HIDDEN + at, mask=is_live, other=0)
    if HAS_DELTA:
        delta_at = index * HIDDEN + at
        x += product_of(delta_ptr, delta_row_scales_ptr, delta_scales_ptr, index, delta_at, at, is_live, IS_SCALED)
        tl.store(x_ptr + index * HIDDEN + at, x, mask=is_live)
    weight = tl.load(weight_ptr + at, mask=is_live, other=0)
    normed = x * (1 / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + epsilon)) * weight
    store_row(out_ptr, out_scales_ptr, index, normed, at, is_live, HIDDEN)


def add_norm(x: Tensor, delta: Product | None, weight: Tensor, out: Rows, epsilon: float) -> Rows:
    """The RMS norm of x + delta. Mutates x, which becomes the sum."""
    hidden = x.shape[1]
    _add_norm[(x.shape[0],)](
        x,
        *((x, x, x) if delta is None else delta.pointers),
        weight,
        *row_pointers(out),
        epsilon,
        HIDDEN=hidden,
        BLOCK=power_of_two(hidden),
        HAS_DELTA=delta is not None,
        IS_SCALED=delta is not None and delta.is_scaled,
        **overlapped(8),
    )
    return out


@triton.jit
def _gate(
    x_ptr, row_scales_ptr, scales_ptr, out_ptr, out_scales_ptr, MLP: tl.constexpr, BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
):  # fmt: skip
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, is_live = index * 2 * MLP, at < MLP
    gate = product_of(x_ptr, row_scales_ptr, scales_ptr, index, row + at, at, is_live, IS_SCALED)
    up = product_of(x_ptr, row_scales_ptr, scales_ptr, index, row + MLP + at, MLP + at, is_live, IS_SCALED)
    store_row(out_ptr, out_scales_ptr, index, gate / (1 + tl.exp(-gate)) * up, at, is_live, MLP)


def gate(x: Product, out: Rows) -> Rows:
    """silu(first half) * second half, of every row."""
    values, scales = row_pointers(out)
    num_tokens, mlp = values.shape
    block = power_of_two(mlp) if isinstance(out, Scaled) else 1024  # the scale of a row needs all of it
    num_warps = min(_MOST_WARPS, max(4, block // 1024))
    _gate[(num_tokens, blocks(mlp, block))](
        *x.pointers, values, scales, MLP=mlp, BLOCK=block, IS_SCALED=x.is_scaled, **overlapped(num_warps)
    )
    return out


@triton.jit
def _halves(ptr, at, is_live, HALF: tl.constexpr):
    """The two halves of a vector, which a rotation mixes with each other."""
    first = tl.load(ptr + at, mask=is_live, other=0)
    return first, tl.load(ptr + at + HALF, mask=is_live, other=0)


@triton.jit
def _store_in_cell(ptr, scales_ptr, cell, half, first, second, is_written, HALF: tl.constexpr):
    """Write the halves of a key or value, which are zero beyond their end, into a cell."""
    if ptr.dtype.element_ty == tl.float8e4nv:
        scale = cell_scale(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=0))
        first, second = first / scale, second / scale
        tl.store(scales_ptr + cell + half * 0, scale.to(scales_ptr.dtype.element_ty), mask=is_written & (half == 0))
    _store_halves(ptr, cell * (2 * HALF) + half, first, second, is_written, HALF)


@triton.jit
def _store_halves(ptr, at, first, second, is_live, HALF: tl.constexpr):
    tl.store(ptr + at, first.to(ptr.dtype.element_ty), mask=is_live)
    tl.store(ptr + at + HALF, second.to(ptr.dtype.element_ty), mask=is_live)


@triton.jit
def _normed(first, second, weight_ptr, half, is_live, epsilon, HALF: tl.constexpr):
    scale = 1 / tl.sqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF) + epsilon)
    first_weight, second_weight = _halves(weight_ptr, half, is_live, HALF)
    return first * (scale * first_weight), second * (scale * second_weight)


@triton.jit
def _turned(first, second, rotation, is_live, HALF: tl.constexpr):
    """The halves after a rotation with the cosines, then the sines, at `rotation`."""
    cos = tl.load(rotation, mask=is_live, other=0)
    sin = tl.load(rotation + HALF, mask=is_live, other=0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _heads(
    qkv_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    query_norm_ptr,
    key_norm_ptr,
    rotations_ptr,
    positions_ptr,
    slots_ptr,
    sinks_ptr,
    query_ptr,
    sink_query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    capacity,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    half = tl.arange(0, BLOCK)
    is_live = half < HALF
    column, row = head * DIM + half, index * (HEADS + 2 * KV_HEADS) * DIM
    first = product_of(qkv_ptr, row_scales_ptr, scales_ptr, index, row + column, column, is_live, IS_SCALED)
    column += HALF
    second = product_of(qkv_ptr, row_scales_ptr, scales_ptr, index, row + column, column, is_live, IS_SCALED)
    if HAS_BIAS:
        first_bias, second_bias = _halves(bias_ptr, head * DIM + half, is_live, HALF)
        first += first_bias
        second += second_bias
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    if HAS_NORM:
        if not is_value:
            weight_ptr = query_norm_ptr if is_query else key_norm_ptr
            first, second = _normed(first, second, weight_ptr, half, is_live, epsilon, HALF)
    rotation = rotations_ptr + index * 4 * HALF + half
    if is_query:
        out = (index * HEADS + head) * DIM + half
        low, high = _turned(first, second, rotation, is_live, HALF)
        _store_halves(query_ptr, out, low, high, is_live, HALF)
        low, high = _turned(first, second, rotation + DIM, is_live, HALF)
        _store_halves(sink_query_ptr, out, low, high, is_live, HALF)
    else:
        slot = tl.load(slots_ptr + index)
        is_written = is_live & (slot >= 0)  # padding belongs to no session
        cell = cell_of(tl.load(positions_ptr + index), tl.load(sinks_ptr + index), capacity)
        if is_value:
            cell += (slot * KV_HEADS + head - HEADS - KV_HEADS) * capacity
            _store_in_cell(values_ptr, value_scales_ptr, cell, half, first, second, is_written, HALF)
        else:
            cell += (slot * KV_HEADS + head - HEADS) * capacity
            low, high = _turned(first, second, rotation, is_live, HALF)
            _store_in_cell(keys_ptr, key_scales_ptr, cell, half, low, high, is_written, HALF)


def write_heads(
    qkv: Product,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    rotations: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    cache: Cache,
    epsilon: float,
) -> None:
    """Add the bias, normalise and rotate: both queries into `queries`, keys and values into the slabs' cells.

    qkv: [tokens, (heads + 2 kv_heads) * dim]. places: each token's position, slot (negative: padding) and sink.
    queries: for recent keys and for sinks, [tokens, heads, dim] each.
    """
    (positions, slots, sinks), (query, sink_query) = places, queries
    num_tokens, heads, dim = query.shape
    kv_heads, capacity = cache.keys.shape[1:3]
    query_norm, key_norm = norms or (query, query)
    _heads[(num_tokens, heads + 2 * kv_heads)](
        *qkv.pointers,
        query if bias is None else bias,
        query_norm,
        key_norm,
        rotations,
        positions,
        slots,
        sinks,
        query,
        sink_query,
        *cache.pointers,
        capacity,
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=power_of_two(dim // 2),
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        IS_SCALED=qkv.is_scaled,
        **overlapped(1),
    )
