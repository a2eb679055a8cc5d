"""From one product to queries, keys and values: bias, head norms, rotations, and the write into the slab."""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import overlapped, power_of_two, take_turn
from holdfast.engine.cuda.kernels.softmax import cell_of


@triton.jit
def _halves(ptr, at, is_live, HALF: tl.constexpr):
    """The two halves of a vector, which a rotation mixes."""
    first = tl.load(ptr + at, mask=is_live, other=0)
    return first, tl.load(ptr + at + HALF, mask=is_live, other=0)


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
    """The halves after a rotation whose cosines, then sines, lie at `rotation`."""
    cos = tl.load(rotation, mask=is_live, other=0)
    sin = tl.load(rotation + HALF, mask=is_live, other=0)
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
    first, second = _halves(qkv_ptr, (index * (HEADS + 2 * KV_HEADS) + head) * DIM + half, is_live, HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
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
            out = ((slot * KV_HEADS + head - HEADS - KV_HEADS) * capacity + cell) * DIM + half
            _store_halves(values_ptr, out, first, second, is_written, HALF)
        else:
            out = ((slot * KV_HEADS + head - HEADS) * capacity + cell) * DIM + half
            low, high = _turned(first, second, rotation, is_live, HALF)
            _store_halves(keys_ptr, out, low, high, is_written, HALF)


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
