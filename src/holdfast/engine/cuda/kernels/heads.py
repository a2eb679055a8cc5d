"""From one product to queries, keys and values: bias, head norms, rotations, and the write into the slab."""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launching import overlapped, power_of_two, take_turn


@triton.jit
def _turn(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _heads(
    qkv_ptr,
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
    capacity,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    half = tl.arange(0, BLOCK)
    is_live = half < HALF
    at = (index * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    first = tl.load(qkv_ptr + at, mask=is_live, other=0).to(tl.float32)
    second = tl.load(qkv_ptr + at + HALF, mask=is_live, other=0).to(tl.float32)
    if HAS_BIAS:
        first += tl.load(bias_ptr + head * DIM + half, mask=is_live, other=0)
        second += tl.load(bias_ptr + head * DIM + HALF + half, mask=is_live, other=0)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    if HAS_NORM:
        if not is_value:
            weight_ptr = query_norm_ptr if is_query else key_norm_ptr
            scale = 1 / tl.sqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + epsilon)
            first *= scale * tl.load(weight_ptr + half, mask=is_live, other=0)
            second *= scale * tl.load(weight_ptr + HALF + half, mask=is_live, other=0)
    rotation = rotations_ptr + index * 4 * HALF + half
    cos = tl.load(rotation, mask=is_live, other=0)
    sin = tl.load(rotation + HALF, mask=is_live, other=0)
    if is_query:
        out = (index * HEADS + head) * DIM + half
        low, high = _turn(first, second, cos, sin)
        tl.store(query_ptr + out, low.to(query_ptr.dtype.element_ty), mask=is_live)
        tl.store(query_ptr + out + HALF, high.to(query_ptr.dtype.element_ty), mask=is_live)
        cos = tl.load(rotation + 2 * HALF, mask=is_live, other=0)
        sin = tl.load(rotation + 3 * HALF, mask=is_live, other=0)
        low, high = _turn(first, second, cos, sin)
        tl.store(sink_query_ptr + out, low.to(query_ptr.dtype.element_ty), mask=is_live)
        tl.store(sink_query_ptr + out + HALF, high.to(query_ptr.dtype.element_ty), mask=is_live)
    else:
        slot = tl.load(slots_ptr + index)
        is_written = is_live & (slot >= 0)  # padding belongs to no session
        position, sink = tl.load(positions_ptr + index), tl.load(sinks_ptr + index)
        cell = tl.where(position < sink, position, sink + (position - sink) % (capacity - sink))
        if is_value:
            out = ((slot * KV_HEADS + head - HEADS - KV_HEADS) * capacity + cell) * DIM + half
            tl.store(values_ptr + out, first.to(values_ptr.dtype.element_ty), mask=is_written)
            tl.store(values_ptr + out + HALF, second.to(values_ptr.dtype.element_ty), mask=is_written)
        else:
            out = ((slot * KV_HEADS + head - HEADS) * capacity + cell) * DIM + half
            low, high = _turn(first, second, cos, sin)
            tl.store(keys_ptr + out, low.to(keys_ptr.dtype.element_ty), mask=is_written)
            tl.store(keys_ptr + out + HALF, high.to(keys_ptr.dtype.element_ty), mask=is_written)


def write_heads(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    rotations: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    epsilon: float,
) -> None:
    """qkv [tokens, (heads + 2 kv_heads) * dim] to both rotated queries [tokens, heads, dim], and into the slabs.

    places: each token's position, slot (negative: padding) and sink. cache: one layer's keys and values,
    [slabs, kv_heads, capacity, dim]; mutates its cells.
    """
    (positions, slots, sinks), (query, sink_query), (keys, values) = places, queries, cache
    num_tokens, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    query_norm, key_norm = norms or (qkv, qkv)
    _heads[(num_tokens, heads + 2 * kv_heads)](
        qkv,
        qkv if bias is None else bias,
        query_norm,
        key_norm,
        rotations,
        positions,
        slots,
        sinks,
        query,
        sink_query,
        keys,
        values,
        capacity,
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=power_of_two(dim // 2),
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        **overlapped(1),
    )
