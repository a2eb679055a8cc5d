"""Matrix times one vector: every weight is read once, at the speed of memory.

A program owns whole rows of the matrix, so results need no second pass. The norm before a product costs nothing
extra: its scale is worked out beside the sum and applied to the result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, power_of_two, take_turn
from holdfast.engine.cuda.kernels.widening import widened
from holdfast.engine.cuda.weights import Matrix

STORE, ADD, GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class VectorTile(NamedTuple):
    """Rows and columns that a program has in flight, and its warps."""

    rows: int
    columns: int
    num_warps: int


@triton.jit
def _tile(w_ptr, scale_ptr, rows, is_row, START, K: tl.constexpr, COLUMNS: tl.constexpr, IS_INT8: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """Weights [rows, columns]; int8 ones in half groups, [segments, rows, 16], with their scales [segments, rows].

    Segments come first there because neighbouring threads are laid along the first axis: they read neighbouring bytes.
    """
    at_row = rows.to(tl.int64) * K
    if IS_INT8:
        segment = START // 16 + tl.arange(0, COLUMNS // 16)
        at = w_ptr + segment[:, None, None] * 16 + at_row[None, :, None] + tl.arange(0, 16)[None, None, :]
        scales = scale_ptr + segment[:, None] // 2 + at_row[None, :] // 32
        if EVEN:
            return tl.load(at), tl.load(scales)
        else:
            is_live = (segment * 16 < K)[:, None] & is_row[None, :]
            return tl.load(at, mask=is_live[:, :, None], other=0), tl.load(scales, mask=is_live, other=0)
    else:
        column = START + tl.arange(0, COLUMNS)
        at = w_ptr + at_row[:, None] + column[None, :]
        if EVEN:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=is_row[:, None] & (column < K)[None, :], other=0)
        return w, w


@triton.jit
def _columns(START, COLUMNS: tl.constexpr, IS_INT8: tl.constexpr):
    if IS_INT8:
        return START + tl.arange(0, COLUMNS // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    else:
        return START + tl.arange(0, COLUMNS)


@triton.jit
def _times(w, scale, x, IS_INT8: tl.constexpr):
    """A tile's products, not summed yet: [rows, columns], or [segments, rows]."""
    if IS_INT8:
        return tl.sum(widened(w) * x[:, None, :], axis=2) * scale.to(tl.float32)
    else:
        return w.to(tl.float32) * x[None, :]


@triton.jit
def _vector_product(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    N,
    epsilon,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    IS_INT8: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < N
    ACROSS: tl.constexpr = 0 if IS_INT8 else 1
    HEIGHT: tl.constexpr = COLUMNS // 16 if IS_INT8 else ROWS
    WIDTH: tl.constexpr = ROWS if IS_INT8 else COLUMNS
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
    squares = 0.0
    w, w_scale = _tile(w_ptr, scale_ptr, rows, is_row, 0, K, COLUMNS, IS_INT8, EVEN)
    if KIND == GATE:
        v, v_scale = _tile(w_ptr, scale_ptr, rows + N, is_row, 0, K, COLUMNS, IS_INT8, EVEN)
    take_turn()
    for start in tl.static_range(0, K, COLUMNS):
        column = _columns(start, COLUMNS, IS_INT8)
        x = tl.load(x_ptr + column, mask=column < K, other=0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x)
            x *= tl.load(norm_ptr + column, mask=column < K, other=0)
        if start > 0:
            w, w_scale = _tile(w_ptr, scale_ptr, rows, is_row, start, K, COLUMNS, IS_INT8, EVEN)
        total += _times(w, w_scale, x, IS_INT8)
        if KIND == GATE:
            if start > 0:
                v, v_scale = _tile(w_ptr, scale_ptr, rows + N, is_row, start, K, COLUMNS, IS_INT8, EVEN)
            gate += _times(v, v_scale, x, IS_INT8)
    y = tl.sum(total, axis=ACROSS)
    z = tl.sum(gate, axis=ACROSS)
    if HAS_NORM:
        scale = 1 / tl.sqrt(squares / K + epsilon)
        y *= scale
        z *= scale
    if KIND == GATE:  # the first half of the rows gates the second
        y = y / (1 + tl.exp(-y)) * z
    if KIND == ADD:
        y += tl.load(out_ptr + rows, mask=is_row, other=0)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=is_row)


def vector_product(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
    is_added: bool = False,
    tile: VectorTile | None = None,
) -> Tensor:
    """matrix @ x into `out` (added to it, or as silu(gate) * up); `norm` first turns x into its RMS norm."""
    columns = x.shape[-1]
    num_rows = matrix.num_outputs // 2 if is_gated else matrix.num_outputs
    tile = tile or tile_for(num_rows, columns, matrix.values.dtype, is_gated)
    is_int8 = matrix.scales is not None
    _vector_product[(blocks(num_rows, tile.rows),)](
        x,
        x if norm is None else norm,
        matrix.values,
        matrix.scales if is_int8 else matrix.values,
        out,
        num_rows,
        epsilon,
        K=columns,
        HAS_NORM=norm is not None,
        KIND=GATE if is_gated else ADD if is_added else STORE,
        IS_INT8=is_int8,
        EVEN=columns % tile.columns == 0 and num_rows % tile.rows == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        **overlapped(tile.num_warps),
    )
    return out


def tile_for(num_rows: int, columns: int, dtype: torch.dtype, is_gated: bool) -> VectorTile:
    """Tiles measured on an H200: whole rows in flight at once, up to 4,096 columns."""
    width = min(4096, power_of_two(columns, 32))
    num_warps = 8 if width >= 2048 else 4
    if dtype == torch.int8:
        return _int8_tile(columns, is_tall=num_rows >= 65536)
    if width >= 4096:
        return VectorTile(2 if is_gated else 4, width, num_warps)
    if width == 2048:
        return VectorTile(2, width, num_warps)
    return VectorTile(8 if num_rows >= 65536 else 4, width // 2 if is_gated else width, num_warps)


def _int8_tile(columns: int, *, is_tall: bool) -> VectorTile:
    if columns > 4096 or (is_tall and columns > 1024):
        return VectorTile(8, 2048, 4)
    if columns <= 1024:
        return VectorTile(16 if is_tall else 8, min(512 if is_tall else 1024, power_of_two(columns, 32)), 4)
    return VectorTile(8, 2048, 8) if columns != 3072 else VectorTile(4, 4096, 4)
