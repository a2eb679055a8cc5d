"""One token a row: head norms, rotations, the write into the slab, attention and its combination, in one kernel.

Each program owns a split of one session's keys. Those of earlier steps it may fetch before its turn; the new key
is worked out by the program whose split it belongs to, which also writes it. The last program of a group of heads
to finish adds the splits up.
"""

import triton
import triton.language as tl

from holdfast.engine.cuda.kernels.launch import take_turn
from holdfast.engine.cuda.kernels.softmax import (
    absorb,
    absorb_one,
    attend,
    cell_of,
    filled_places,
    fresh,
    ring_at,
    split_of,
    store_part,
)


@triton.jit
def _num_splits(position, begin, sink, SPLIT: tl.constexpr):
    """How many splits have keys that a token at `position` sees."""
    num_recent = position // SPLIT - begin // SPLIT + 1
    return tl.where(position < sink, 0, num_recent) + (tl.minimum(sink, position + 1) + SPLIT - 1) // SPLIT


@triton.jit
def _fetched(keys_ptr, values_ptr, slab, low, high, is_live, is_sink, sink, capacity, DIM: tl.constexpr,
             DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """A split's keys and values, [keys, dim] each, and which of them lie in low..high; `slab` is its first cell."""
    dim, offset = tl.arange(0, DIM_BLOCK), tl.arange(0, KEYS)
    start = low // KEYS * KEYS
    key = start + offset
    ring, begin = ring_at(start, sink, capacity, KEYS)
    cell = tl.where(is_sink, key, sink + (begin + offset) % ring)
    is_there = (key >= low) & (key < high) & is_live
    at = (slab + cell)[:, None] * DIM + dim[None, :]
    mask = is_there[:, None] & (dim < DIM)[None, :]
    return tl.load(keys_ptr + at, mask=mask, other=0), tl.load(values_ptr + at, mask=mask, other=0), is_there


@triton.jit
def _streamed(
    query, top, norm, mixed, keys_ptr, values_ptr, low, high, positions, is_sink, sink, capacity, recent, scale,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take a split's keys into a running softmax, several tiles one after the other."""
    if is_sink:
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr, values_ptr, low, high, positions, sink, capacity, recent, scale,
            True, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    else:
        top, norm, mixed = attend(
            query, top, norm, mixed, keys_ptr, values_ptr, low, high, positions, sink, capacity, recent, scale,
            False, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    return top, norm, mixed


@triton.jit
def _rotation(rotations_ptr, row, side, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """What a vector and its partner are multiplied by, [dim] each; `side` chooses among a token's tables."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, DIM_BLOCK)
    at = rotations_ptr + row * 4 * HALF + dim % HALF + side
    sign = tl.where(dim < HALF, -1.0, 1.0)
    cos = tl.load(at, mask=dim < DIM, other=0)
    return cos, tl.load(at + HALF, mask=dim < DIM, other=0) * sign


@triton.jit
def _partner(dim, DIM: tl.constexpr):
    """What a rotation mixes a dimension with."""
    return (dim + DIM // 2) % DIM


@triton.jit
def _raw(qkv_ptr, bias_ptr, token, head, dim, is_live, HAS_BIAS: tl.constexpr):
    """Dimensions `dim` of the heads that begin at `head`, as the product left them, with their bias."""
    raw = tl.load(qkv_ptr + (token + head + dim), mask=is_live, other=0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + (head + dim), mask=is_live, other=0)
    return raw


@triton.jit
def _write(keys_ptr, values_ptr, at, key, value, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Put a new key and its value into the cell that begins at `at`; returns them as they are read from there."""
    dim = tl.arange(0, DIM_BLOCK)
    key, value = key.to(keys_ptr.dtype.element_ty), value.to(values_ptr.dtype.element_ty)
    tl.store(keys_ptr + at + dim, key, mask=dim < DIM)
    tl.store(values_ptr + at + dim, value, mask=dim < DIM)
    return key, value


@triton.jit
def _turned_queries(q, partner, weight_ptr, cos, sin, epsilon, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                    HAS_NORM: tl.constexpr):  # fmt: skip
    """Queries [rows, dim] after their norm and rotation."""
    if HAS_NORM:
        dim = tl.arange(0, DIM_BLOCK)
        scale = 1 / tl.sqrt(tl.sum(q * q, axis=1) / DIM + epsilon)
        q *= scale[:, None] * tl.load(weight_ptr + dim, mask=dim < DIM, other=0)[None, :]
        partner *= scale[:, None] * tl.load(weight_ptr + _partner(dim, DIM), mask=dim < DIM, other=0)[None, :]
    return q * cos[None, :] + partner * sin[None, :]


@triton.jit
def _turned_key(k, partner, weight_ptr, rotations_ptr, row, epsilon, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                HAS_NORM: tl.constexpr):  # fmt: skip
    """A row's new key [dim] after its norm and rotation."""
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
    """From the parts of one group of heads to its answers. Other programs wrote them: they are read past the L1."""
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
    qkv_ptr, bias_ptr, query_norm_ptr, key_norm_ptr, rotations_ptr, positions_ptr, slots_ptr, sinks_ptr, keys_ptr,
    values_ptr, mixed_ptr, top_ptr, norm_ptr, done_ptr, out_ptr, capacity, recent, scale, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, NUM_SINK: tl.constexpr, NUM_PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    position, slot, sink = tl.load(positions_ptr + row), tl.load(slots_ptr + row), tl.load(sinks_ptr + row)
    begin = tl.maximum(sink, position - recent + 1)
    is_sink = split < NUM_SINK
    low, high, place = split_of(split, begin, position + 1, sink, SPLIT, NUM_SINK, NUM_PLACES)
    is_live = (slot >= 0) & (low < high)
    slab = (slot * KV_HEADS + head) * capacity
    old = tl.minimum(high, position)  # keys below are in the slab; the one at `position` is new
    if KEYS == SPLIT:
        k, v, is_old = _fetched(
            keys_ptr, values_ptr, slab, low, old, is_live, is_sink, sink, capacity, DIM, DIM_BLOCK, KEYS
        )
    side = tl.where(is_sink, DIM, 0)  # sinks are looked at from another position
    cos, sin = _rotation(rotations_ptr, row, side, DIM, DIM_BLOCK)
    take_turn()
    if is_live:
        member, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        is_dim, partner = dim < DIM, _partner(dim, DIM)
        is_query = (member < GROUP)[:, None] & is_dim[None, :]
        token = row * (HEADS + 2 * KV_HEADS) * DIM
        query_at = (head * GROUP + member)[:, None] * DIM
        key_at, value_at = (HEADS + head) * DIM, (HEADS + KV_HEADS + head) * DIM
        q = _raw(qkv_ptr, bias_ptr, token, query_at, dim[None, :], is_query, HAS_BIAS)
        q_partner = _raw(qkv_ptr, bias_ptr, token, query_at, partner[None, :], is_query, HAS_BIAS)
        new_key = _raw(qkv_ptr, bias_ptr, token, key_at, dim, is_dim, HAS_BIAS)
        key_partner = _raw(qkv_ptr, bias_ptr, token, key_at, partner, is_dim, HAS_BIAS)
        new_value = _raw(qkv_ptr, bias_ptr, token, value_at, dim, is_dim, HAS_BIAS)
        turned = _turned_queries(q, q_partner, query_norm_ptr, cos, sin, epsilon, DIM, DIM_BLOCK, HAS_NORM)
        query = turned.to(keys_ptr.dtype.element_ty)
        top, norm, mixed = fresh(ROWS, DIM_BLOCK)
        if KEYS == SPLIT:
            top, norm, mixed = absorb(query, k, v, is_old[None, :], top, norm, mixed, scale)
        else:
            top, norm, mixed = _streamed(
                query, top, norm, mixed, keys_ptr + slab * DIM, values_ptr + slab * DIM, low, old,
                position + member * 0, is_sink, sink, capacity, recent, scale, DIM, DIM_BLOCK, KEYS,
            )  # fmt: skip
        if high > position:  # the new key is this program's
            key = _turned_key(new_key, key_partner, key_norm_ptr, rotations_ptr, row, epsilon, DIM, DIM_BLOCK, HAS_NORM)
            cell = (slab + cell_of(position, sink, capacity)) * DIM
            key, value = _write(keys_ptr, values_ptr, cell, key, new_value, DIM, DIM_BLOCK)
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
