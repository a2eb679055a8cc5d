"""What is done to one token's vector at a time: embedding and rotary tables, norms, gates. Free of neighbours."""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, power_of_two, take_turn


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
    x_ptr, delta_ptr, weight_ptr, out_ptr, epsilon, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_live = at < HIDDEN
    x = tl.load(x_ptr + index * HIDDEN + at, mask=is_live, other=0)
    if HAS_DELTA:
        x += tl.load(delta_ptr + index * HIDDEN + at, mask=is_live, other=0).to(tl.float32)
        tl.store(x_ptr + index * HIDDEN + at, x, mask=is_live)
    weight = tl.load(weight_ptr + at, mask=is_live, other=0)
    normed = x * (1 / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + epsilon)) * weight
    tl.store(out_ptr + index * HIDDEN + at, normed.to(out_ptr.dtype.element_ty), mask=is_live)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of x + delta; mutates x, which becomes that sum."""
    hidden = x.shape[1]
    _add_norm[(x.shape[0],)](
        x,
        x if delta is None else delta,
        weight,
        out,
        epsilon,
        HIDDEN=hidden,
        BLOCK=power_of_two(hidden),
        HAS_DELTA=delta is not None,
        **overlapped(8),
    )
    return out


@triton.jit
def _gate(x_ptr, out_ptr, MLP: tl.constexpr, BLOCK: tl.constexpr):
    take_turn()
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + index * 2 * MLP + at, mask=at < MLP, other=0).to(tl.float32)
    up = tl.load(x_ptr + index * 2 * MLP + MLP + at, mask=at < MLP, other=0).to(tl.float32)
    tl.store(out_ptr + index * MLP + at, (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=at < MLP)


def gate(x: Tensor, out: Tensor) -> Tensor:
    """silu(first half) * second half of every row."""
    num_tokens, mlp = out.shape
    _gate[(num_tokens, blocks(mlp, 1024))](x, out, MLP=mlp, BLOCK=1024, **overlapped(4))
    return out
