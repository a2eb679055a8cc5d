"""Attention of one token per row in one kernel: head norms, rotations, the write into the slab, and the combination.

Each program owns one split of a session's keys. It may load the keys of earlier steps before its turn. The program
whose split contains the new key also computes and writes it. The last program of a group of heads to finish adds up
the splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.attention import (
    AttentionTile,
    Pair,
    Places,
    Splits,
    head_sizes,
    new_parts,
    score_scale,
    split_sizes,
)
from holdfast.engine.cuda.kernels.launch import overlapped, power_of_two, take_turn
from holdfast.engine.cuda.kernels.scales import Product, cell_scale, product_of
from holdfast.engine.cuda.kernels.softmax import (
    absorb,
    absorb_one,
    attend,
    cell_of,
    filled_places,
    fresh,
    load_cells,
    ring_at,
    split_of,
    store_part,
)
from holdfast.engine.cuda.slabs import Cache


class DecodeSettings(NamedTuple):
    """The parameters of single-token attention, beside its tensors."""

    recent: int
    epsilon: float
    tile: AttentionTile
    splits: Splits
    dtype: torch.dtype  # of the queries and the result


@triton.jit
def _num_splits(position, begin, sink, SPLIT: tl.constexpr):
    """The number of splits with keys that a token at `position` sees."""
    num_recent = position // SPLIT - begin // SPLIT + 1
    return tl.where(position < sink, 0, num_recent) + (tl.minimum(sink, position + 1) + SPLIT - 1) // SPLIT


@triton.jit
def _fetched(keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, is_live, is_sink, sink, capacity,
             DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """A split's keys and values with their scales, and which of them are in low..high; `slab` is the first cell."""
    offset = tl.arange(0, KEYS)
    start = low // KEYS * KEYS
    key = start + offset
    ring, begin = ring_at(start, sink, capacity, KEYS)
    cell = tl.where(is_sink, key, sink + (begin + offset) % ring)
    is_there = (key >= low) & (key < high) & is_live
    k, key_scales = load_cells(keys_ptr, key_scales_ptr, slab + cell, is_there, DIM, DIM_BLOCK)
    v, value_scales = load_cells(values_ptr, value_scales_ptr, slab + cell, is_there, DIM, DIM_BLOCK)
    return k, v, key_scales, value_scales, is_there


@triton.jit
def _streamed(
    query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, positions,
    is_sink, sink, capacity, recent, scale, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add a split's keys to a running softmax, tile by tile."""
    if is_sink:
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, positions,
            sink, capacity, recent, scale, True, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    else:
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, high, positions,
            sink, capacity, recent, scale, False, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    return top, norm, mixed


@triton.jit
def _rotation(rotations_ptr, row, side, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """The factors of a vector and of its partner, [dim] each; `side` selects one of a token's two tables."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, DIM_BLOCK)
    at = rotations_ptr + row * 4 * HALF + dim % HALF + side
    sign = tl.where(dim < HALF, -1.0, 1.0)
    cos = tl.load(at, mask=dim < DIM, other=0)
    return cos, tl.load(at + HALF, mask=dim < DIM, other=0) * sign


@triton.jit
def _partner(dim, DIM: tl.constexpr):
    """The dimension that a rotation mixes with `dim`."""
    return (dim + DIM // 2) % DIM


@triton.jit
def _raw(qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, head, dim, is_live, HAS_BIAS: tl.constexpr,
         IS_SCALED: tl.constexpr):  # fmt: skip
    """Dimensions `dim` of the heads that begin at `head`: the product plus its bias."""
    column = head + dim
    raw = product_of(qkv_ptr, row_scales_ptr, scales_ptr, row, token + column, column, is_live, IS_SCALED)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + (head + dim), mask=is_live, other=0)
    return raw


@triton.jit
def _write(ptr, scales_ptr, cell, x, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Write a new key or value, which is zero beyond its end, into a cell; returns it as rounded there."""
    dim = tl.arange(0, DIM_BLOCK)
    scale = 1.0
    if ptr.dtype.element_ty == tl.float8e4nv:
        scale = cell_scale(tl.max(tl.abs(x), axis=0))
        tl.store(scales_ptr + cell, scale.to(scales_ptr.dtype.element_ty))
    kept = (x / scale).to(ptr.dtype.element_ty)
    tl.store(ptr + cell * DIM + dim, kept, mask=dim < DIM)
    return kept.to(tl.float32) * scale


@triton.jit
def _turned_queries(q, partner, weight_ptr, cos, sin, epsilon, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                    HAS_NORM: tl.constexpr):  # fmt: skip
    """Queries [rows, dim], normalised and rotated."""
    if HAS_NORM:
        dim = tl.arange(0, DIM_BLOCK)
        scale = 1 / tl.sqrt(tl.sum(q * q, axis=1) / DIM + epsilon)
        q *= scale[:, None] * tl.load(weight_ptr + dim, mask=dim < DIM, other=0)[None, :]
        partner *= scale[:, None] * tl.load(weight_ptr + _partner(dim, DIM), mask=dim < DIM, other=0)[None, :]
    return q * cos[None, :] + partner * sin[None, :]


@triton.jit
def _turned_key(k, partner, weight_ptr, rotations_ptr, row, epsilon, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                HAS_NORM: tl.constexpr):  # fmt: skip
    """A row's new key [dim], normalised and rotated."""
    if HAS_NORM:
        dim = tl.arange(0, DIM_BLOCK)
        scale = 1 / tl.sqrt(tl.sum(k * k, axis=0) / DIM + epsilon)
        k *= scale * tl.load(weight_ptr + dim, mask=dim < DIM, other=0)
        partner *= scale * tl.load(weight_ptr + _partner(dim, DIM), mask=dim < DIM, other=0)
    cos, sin = _rotation(rotations_ptr, row, 0, DIM, DIM_BLOCK)
    return k * cos + partner * sin


@triton.jit
def _add_up(
    top_ptr, norm_ptr, mixed_ptr, out_ptr, group, is_filled, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one group of heads. Other programs wrote them, so the loads bypass the L1 cache."""
    place, member, dim = tl.arange(0, NUM_PLACES), tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    is_member, is_dim = member < GROUP, dim < DIM
    is_part = is_filled[:, None] & is_member[None, :]
    at = ((group * NUM_PLACES + place) * GROUP)[:, None] + member[None, :]
    tops = tl.load(top_ptr + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    norms = tl.load(norm_ptr + at, mask=is_part, other=0, cache_modifier=".cg")
    mixed = tl.load(
        mixed_ptr + at[:, :, None] * DIM + dim[None, None, :],
        mask=is_part[:, :, None] & is_dim[None, None, :],
        other=0,
        cache_modifier=".cg",
    )
    share = tl.exp2(tops - tl.where(is_member, tl.max(tops, axis=0), 0.0)[None, :])
    total = tl.sum(norms * share, axis=0)
    answer = tl.sum(mixed * share[:, :, None], axis=0) / total[:, None]
    out = (group * GROUP + member)[:, None] * DIM + dim[None, :]
    tl.store(out_ptr + out, answer.to(out_ptr.dtype.element_ty), mask=is_member[:, None] & is_dim[None, :])


@triton.jit
def decode_attention(
    qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, query_norm_ptr, key_norm_ptr, rotations_ptr, positions_ptr,
    slots_ptr, sinks_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, mixed_ptr, top_ptr, norm_ptr,
    done_ptr, out_ptr, capacity, recent, scale, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, NUM_SINK: tl.constexpr, NUM_PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    position, slot, sink = tl.load(positions_ptr + row), tl.load(slots_ptr + row), tl.load(sinks_ptr + row)
    begin = tl.maximum(sink, position - recent + 1)
    is_sink = split < NUM_SINK
    low, high, place = split_of(split, begin, position + 1, sink, SPLIT, NUM_SINK, NUM_PLACES)
    is_live = (slot >= 0) & (low < high)
    slab = (slot * KV_HEADS + head) * capacity
    old = tl.minimum(high, position)  # keys below this are in the slab; the one at `position` is new
    if KEYS == SPLIT:
        k, v, key_scales, value_scales, is_old = _fetched(
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, old, is_live, is_sink, sink, capacity,
            DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    side = tl.where(is_sink, DIM, 0)  # queries have another rotation for sinks
    cos, sin = _rotation(rotations_ptr, row, side, DIM, DIM_BLOCK)
    take_turn()
    if is_live:
        member, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        is_dim, partner = dim < DIM, _partner(dim, DIM)
        is_query = (member < GROUP)[:, None] & is_dim[None, :]
        token = row * (HEADS + 2 * KV_HEADS) * DIM
        query_at = (head * GROUP + member)[:, None] * DIM
        key_at, value_at = (HEADS + head) * DIM, (HEADS + KV_HEADS + head) * DIM
        q = _raw(
            qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, query_at, dim[None, :], is_query, HAS_BIAS,
            IS_SCALED,
        )  # fmt: skip
        q_partner = _raw(
            qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, query_at, partner[None, :], is_query, HAS_BIAS,
            IS_SCALED,
        )  # fmt: skip
        new_key = _raw(
            qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, key_at, dim, is_dim, HAS_BIAS, IS_SCALED
        )
        key_partner = _raw(
            qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, key_at, partner, is_dim, HAS_BIAS, IS_SCALED
        )
        new_value = _raw(
            qkv_ptr, row_scales_ptr, scales_ptr, bias_ptr, row, token, value_at, dim, is_dim, HAS_BIAS, IS_SCALED
        )
        turned = _turned_queries(q, q_partner, query_norm_ptr, cos, sin, epsilon, DIM, DIM_BLOCK, HAS_NORM)
        query = turned.to(out_ptr.dtype.element_ty)
        top, norm, mixed = fresh(ROWS, DIM_BLOCK)
        if KEYS == SPLIT:
            top, norm, mixed = absorb(query, k, v, key_scales, value_scales, is_old[None, :], top, norm, mixed, scale)
        else:
            top, norm, mixed = _streamed(
                query, top, norm, mixed, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slab, low, old,
                position + member * 0, is_sink, sink, capacity, recent, scale, DIM, DIM_BLOCK, KEYS,
            )  # fmt: skip
        if high > position:  # this program's split contains the new key
            key = _turned_key(new_key, key_partner, key_norm_ptr, rotations_ptr, row, epsilon, DIM, DIM_BLOCK, HAS_NORM)
            cell = slab + cell_of(position, sink, capacity)
            key = _write(keys_ptr, key_scales_ptr, cell, key, DIM, DIM_BLOCK)
            value = _write(values_ptr, value_scales_ptr, cell, new_value, DIM, DIM_BLOCK)
            top, norm, mixed = absorb_one(query, key, value, top, norm, mixed, scale)
        group = row * KV_HEADS + head
        part = (group * NUM_PLACES + place) * GROUP + member
        store_part(top_ptr, norm_ptr, mixed_ptr, part, member < GROUP, top, norm, mixed, DIM, DIM_BLOCK)
        num_splits = _num_splits(position, begin, sink, SPLIT)
        tl.debug_barrier()
        num_done = tl.atomic_add(done_ptr + group, 1, sem="acq_rel", scope="gpu")
        if num_done == num_splits - 1:
            tl.store(done_ptr + group, 0)
            is_filled = filled_places(begin, position + 1, sink, SPLIT, NUM_SINK, NUM_PLACES)
            _add_up(
                top_ptr, norm_ptr, mixed_ptr, out_ptr, group, is_filled, GROUP, DIM, DIM_BLOCK, GROUP_BLOCK, NUM_PLACES
            )


def attend_decoded(
    qkv: Product,
    bias: Tensor | None,
    norms: Pair | None,
    rotations: Tensor,
    places: Places,
    cache: Cache,
    done: Tensor,
    settings: DecodeSettings,
) -> Tensor:
    """Attention [rows, heads * dim] of one token per row. Writes the tokens' keys and values into the slabs.

    qkv: [rows, (heads + 2 kv_heads) * dim]. done: zeros, one for each row and group of heads; left as zeros.
    """
    (num_rows, columns), (kv_heads, capacity, dim) = qkv.values.shape, cache.keys.shape[1:]
    heads = columns // dim - 2 * kv_heads
    group, tile, splits = heads // kv_heads, settings.tile, settings.splits
    device = qkv.values.device
    out = torch.empty(num_rows, heads * dim, dtype=settings.dtype, device=device)
    parts = new_parts((num_rows, kv_heads, splits.num_places, group), dim, device)
    decode_attention[(splits.num_sink + splits.num_recent, kv_heads, num_rows)](
        *qkv.pointers,
        rotations if bias is None else bias,
        *(norms or (rotations, rotations)),
        rotations,
        *places,
        *cache.pointers,
        *parts,
        done,
        out,
        capacity,
        settings.recent,
        score_scale(dim),
        settings.epsilon,
        GROUP_BLOCK=power_of_two(group),
        ROWS=power_of_two(group, 16),
        KEYS=tile.keys,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        IS_SCALED=qkv.is_scaled,
        **head_sizes(heads, group, dim),
        **split_sizes(tile, splits),
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out
