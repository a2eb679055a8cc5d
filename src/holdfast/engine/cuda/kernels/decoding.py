"""One token a row: head norms, rotations, the write into the slab, attention and its combination, in one kernel.

Each program owns a split of one session's keys. Those of earlier steps it may fetch before its turn; the new key
is worked out by the program whose split it belongs to, which also writes it. The last program of a group of heads
to finish adds the splits up.
"""

import triton
import triton.language as tl

from holdfast.engine.cuda.kernels.attention import absorb, attend
from holdfast.engine.cuda.kernels.launching import take_turn


@triton.jit
def _raw(qkv_ptr, bias_ptr, at, bias_at, is_live, HAS_BIAS: tl.constexpr):
    raw = tl.load(qkv_ptr + at, mask=is_live, other=0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + bias_at, mask=is_live, other=0)
    return raw


@triton.jit
def decode_attention(
    qkv_ptr,
    bias_ptr,
    query_norm_ptr,
    key_norm_ptr,
    rotations_ptr,
    positions_ptr,
    slots_ptr,
    sinks_ptr,
    keys_ptr,
    values_ptr,
    mixed_ptr,
    top_ptr,
    norm_ptr,
    done_ptr,
    out_ptr,
    capacity,
    recent,
    scale,
    epsilon,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SINK: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    HALF: tl.constexpr = DIM // 2
    NUM_RING: tl.constexpr = NUM_PLACES - NUM_SINK
    position, slot, sink = tl.load(positions_ptr + row), tl.load(slots_ptr + row), tl.load(sinks_ptr + row)
    begin = tl.maximum(sink, position - recent + 1)
    is_sink = split < NUM_SINK
    number = begin // SPLIT + split - NUM_SINK
    low = tl.where(is_sink, split.to(tl.int64) * SPLIT, tl.maximum(begin, number * SPLIT))
    border = tl.where(is_sink, tl.minimum(sink, (split.to(tl.int64) + 1) * SPLIT), (number + 1) * SPLIT)
    high = tl.minimum(border, position + 1)
    place = tl.where(is_sink, NUM_RING + split.to(tl.int64), number % NUM_RING)
    is_live = (slot >= 0) & (low < high)
    dim = tl.arange(0, DIM_BLOCK)
    is_dim = dim < DIM
    partner = (dim + HALF) % DIM  # what a rotation mixes a dimension with
    cell_base = (slot * KV_HEADS + head) * capacity
    old = tl.minimum(high, position)  # keys below are in the slab; the one at `position` is new
    if KEYS == SPLIT:
        offset = tl.arange(0, KEYS)
        start = low // KEYS * KEYS
        key = start + offset
        ring = (capacity - sink).to(tl.int32)
        first_cell = ((start - sink + ring.to(tl.int64) * KEYS) % ring).to(tl.int32)
        cell = tl.where(is_sink, key, sink + (first_cell + offset) % ring)
        is_old = (key >= low) & (key < old) & is_live
        at = (cell_base + cell)[:, None] * DIM + dim[None, :]
        mask = is_old[:, None] & is_dim[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0)
        v = tl.load(values_ptr + at, mask=mask, other=0)
    turn = rotations_ptr + row * 4 * HALF + dim % HALF
    sign = tl.where(dim < HALF, -1.0, 1.0)
    side = tl.where(is_sink, 2 * HALF, 0)  # sinks are looked at from another position
    cos = tl.load(turn + side, mask=is_dim, other=0)
    sin = tl.load(turn + side + HALF, mask=is_dim, other=0) * sign
    take_turn()
    if is_live:
        member = tl.arange(0, ROWS)
        is_member = (member < GROUP)[:, None] & is_dim[None, :]
        base = row * (HEADS + 2 * KV_HEADS) * DIM
        bias_at = (head * GROUP + member)[:, None] * DIM
        q = _raw(qkv_ptr, bias_ptr, base + bias_at + dim[None, :], bias_at + dim[None, :], is_member, HAS_BIAS)
        q_partner = _raw(
            qkv_ptr, bias_ptr, base + bias_at + partner[None, :], bias_at + partner[None, :], is_member, HAS_BIAS
        )
        key_at = (HEADS + head) * DIM
        value_at = (HEADS + KV_HEADS + head) * DIM
        k_new = _raw(qkv_ptr, bias_ptr, base + key_at + dim, key_at + dim, is_dim, HAS_BIAS)
        k_partner = _raw(qkv_ptr, bias_ptr, base + key_at + partner, key_at + partner, is_dim, HAS_BIAS)
        v_new = _raw(qkv_ptr, bias_ptr, base + value_at + dim, value_at + dim, is_dim, HAS_BIAS)
        if HAS_NORM:
            q_scale = 1 / tl.sqrt(tl.sum(q * q, axis=1) / DIM + epsilon)
            q *= q_scale[:, None] * tl.load(query_norm_ptr + dim, mask=is_dim, other=0)[None, :]
            q_partner *= q_scale[:, None] * tl.load(query_norm_ptr + partner, mask=is_dim, other=0)[None, :]
        query = (q * cos[None, :] + q_partner * sin[None, :]).to(keys_ptr.dtype.element_ty)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
        if KEYS == SPLIT:
            top, norm, mixed = absorb(query, k, v, is_old[None, :], top, norm, mixed, scale)
        else:
            slab_keys, slab_values = keys_ptr + cell_base * DIM, values_ptr + cell_base * DIM
            positions = position + member * 0
            if is_sink:
                top, norm, mixed = attend(
                    query, top, norm, mixed, slab_keys, slab_values, low, old, positions, sink, capacity, recent,
                    scale, True, DIM, DIM_BLOCK, KEYS,
                )  # fmt: skip
            else:
                top, norm, mixed = attend(
                    query, top, norm, mixed, slab_keys, slab_values, low, old, positions, sink, capacity, recent,
                    scale, False, DIM, DIM_BLOCK, KEYS,
                )  # fmt: skip
        if high > position:  # the new key is this program's
            if HAS_NORM:
                k_scale = 1 / tl.sqrt(tl.sum(k_new * k_new, axis=0) / DIM + epsilon)
                k_new *= k_scale * tl.load(key_norm_ptr + dim, mask=is_dim, other=0)
                k_partner *= k_scale * tl.load(key_norm_ptr + partner, mask=is_dim, other=0)
            key_cos = tl.load(turn, mask=is_dim, other=0)
            key_sin = tl.load(turn + HALF, mask=is_dim, other=0) * sign
            stored_key = (k_new * key_cos + k_partner * key_sin).to(keys_ptr.dtype.element_ty)
            stored_value = v_new.to(values_ptr.dtype.element_ty)
            new_cell = tl.where(is_sink, position, sink + (position - sink) % (capacity - sink))
            tl.store(keys_ptr + (cell_base + new_cell) * DIM + dim, stored_key, mask=is_dim)
            tl.store(values_ptr + (cell_base + new_cell) * DIM + dim, stored_value, mask=is_dim)
            score = tl.sum(query.to(tl.float32) * stored_key.to(tl.float32)[None, :], axis=1) * scale
            new_top = tl.maximum(top, score)
            fade, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
            norm = norm * fade + weight
            mixed = mixed * fade[:, None] + weight[:, None] * stored_value.to(tl.float32)[None, :]
            top = new_top
        group_at = (row * KV_HEADS + head) * NUM_PLACES
        out = (group_at + place) * GROUP + member
        tl.store(top_ptr + out, top, mask=member < GROUP)
        tl.store(norm_ptr + out, norm, mask=member < GROUP)
        tl.store(mixed_ptr + out[:, None] * DIM + dim[None, :], mixed, mask=is_member)
        num_splits = position // SPLIT - begin // SPLIT + 1
        num_splits = tl.where(position < sink, 0, num_splits) + (tl.minimum(sink, position + 1) + SPLIT - 1) // SPLIT
        tl.debug_barrier()
        num_done = tl.atomic_add(done_ptr + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
        if num_done == num_splits - 1:
            tl.store(done_ptr + row * KV_HEADS + head, 0)
            places = tl.arange(0, NUM_PLACES)
            lowest = begin // SPLIT
            ring_number = lowest + (places - lowest % NUM_RING + NUM_RING) % NUM_RING
            is_recent = (tl.maximum(begin, ring_number * SPLIT) <= position) & (position >= sink)
            is_pinned = (places - NUM_RING) * SPLIT < tl.minimum(sink, position + 1)
            is_filled = tl.where(places < NUM_RING, is_recent, is_pinned)
            index = tl.arange(0, GROUP_BLOCK)
            is_part = is_filled[:, None] & (index < GROUP)[None, :]
            part_at = ((group_at + places) * GROUP)[:, None] + index[None, :]
            tops = tl.load(top_ptr + part_at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            norms = tl.load(norm_ptr + part_at, mask=is_part, other=0, cache_modifier=".cg")
            parts = tl.load(
                mixed_ptr + part_at[:, :, None] * DIM + dim[None, None, :],
                mask=is_part[:, :, None] & is_dim[None, None, :],
                other=0,
                cache_modifier=".cg",
            )
            best = tl.max(tops, axis=0)
            share = tl.exp2(tops - tl.where(index < GROUP, best, 0.0)[None, :])
            total = tl.sum(norms * share, axis=0)
            answer = tl.sum(parts * share[:, :, None], axis=0) / total[:, None]
            answer_at = (row * HEADS + head * GROUP + index)[:, None] * DIM + dim[None, :]
            is_answer = (index < GROUP)[:, None] & is_dim[None, :]
            tl.store(out_ptr + answer_at, answer.to(out_ptr.dtype.element_ty), mask=is_answer)
