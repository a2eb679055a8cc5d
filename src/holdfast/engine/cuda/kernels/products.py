"""Products of activations with the weights of a layer.

`tile_product` multiplies several vectors on the tensor cores: [tokens, in] @ [out, in]^T. A result is a sum over one
fixed order of column blocks, so with one fixed tile a row's bits depend only on the row: this is the deterministic
product. `vector_product` multiplies one vector and reads every weight once, at the speed of memory: a program owns
whole rows of the matrix, so there is no second pass, and the norm before a product costs nothing extra, because its
scale is computed beside the sum and applied to the result. Both take fp8 weights with activations that are not rounded.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, power_of_two, take_turn
from holdfast.engine.cuda.weights import FP8, Matrix

STORE, ADD, GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Tile(NamedTuple):
    """Tokens, outputs and columns that a program multiplies at once, and its compile options."""

    tokens: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile_product(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    IS_SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_output, is_token = outputs < N, tokens < M
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    take_turn()
    for start in range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at_x = x_ptr + tokens.to(tl.int64)[:, None] * K + column[None, :]
        at_w = w_ptr + outputs.to(tl.int64)[:, None] * K + column[None, :]
        x = tl.load(at_x, mask=is_token[:, None] & (column < K)[None, :], other=0)
        if EVEN:
            w = tl.load(at_w)
        else:
            w = tl.load(at_w, mask=is_output[:, None] & (column < K)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="ieee")
    if IS_SCALED:
        total *= tl.load(scale_ptr + outputs, mask=is_output, other=0)[None, :]
    at = out_ptr + tokens.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


def tile_product(x: Tensor, matrix: Matrix, out: Tensor, tile: Tile) -> Tensor:
    """x @ matrix^T into `out`."""
    num_tokens, columns = x.shape
    num_outputs = matrix.num_outputs
    _tile_product[(blocks(num_outputs, tile.outputs), blocks(num_tokens, tile.tokens))](
        x,
        matrix.values,
        matrix.values if matrix.scales is None else matrix.scales,
        out,
        num_tokens,
        num_outputs,
        K=columns,
        IS_SCALED=matrix.scales is not None,
        EVEN=columns % tile.columns == 0 and num_outputs % tile.outputs == 0,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out


def fixed_tile(matrix: Matrix) -> Tile:
    """The tile of deterministic products. It depends only on the dtype."""
    return Tile(16, 32, 32, 4, 2) if matrix.values.dtype == torch.float32 else Tile(64, 32, 128, 4, 3)


class VectorTile(NamedTuple):
    """Rows and columns that a program loads at once, and its number of warps."""

    rows: int
    columns: int
    num_warps: int


@triton.jit
def _tile(w_ptr, rows, is_row, START, K: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Weights [rows, columns]."""
    column = START + tl.arange(0, COLUMNS)
    at = w_ptr + rows.to(tl.int64)[:, None] * K + column[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=is_row[:, None] & (column < K)[None, :], other=0.0)


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
    IS_SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = 0.0
    w = _tile(w_ptr, rows, is_row, 0, K, COLUMNS, EVEN)
    if KIND == GATE:
        v = _tile(w_ptr, rows + N, is_row, 0, K, COLUMNS, EVEN)
    take_turn()
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column, mask=column < K, other=0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x)
            x *= tl.load(norm_ptr + column, mask=column < K, other=0)
        if start > 0:
            w = _tile(w_ptr, rows, is_row, start, K, COLUMNS, EVEN)
        total += w.to(tl.float32) * x[None, :]
        if KIND == GATE:
            if start > 0:
                v = _tile(w_ptr, rows + N, is_row, start, K, COLUMNS, EVEN)
            gate += v.to(tl.float32) * x[None, :]
    y = tl.sum(total, axis=1)
    z = tl.sum(gate, axis=1)
    if IS_SCALED:
        y *= tl.load(scale_ptr + rows, mask=is_row, other=0)
        if KIND == GATE:
            z *= tl.load(scale_ptr + rows + N, mask=is_row, other=0)
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
    """matrix @ x into `out`: stored, added, or as silu(gate) * up. With `norm`, x is RMS-normalised first."""
    columns = x.shape[-1]
    num_rows = matrix.num_outputs // 2 if is_gated else matrix.num_outputs
    tile = tile or tile_for(num_rows, columns, matrix.values.dtype, is_gated)
    _vector_product[(blocks(num_rows, tile.rows),)](
        x,
        x if norm is None else norm,
        matrix.values,
        matrix.values if matrix.scales is None else matrix.scales,
        out,
        num_rows,
        epsilon,
        K=columns,
        HAS_NORM=norm is not None,
        KIND=GATE if is_gated else ADD if is_added else STORE,
        IS_SCALED=matrix.scales is not None,
        EVEN=columns % tile.columns == 0 and num_rows % tile.rows == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        **overlapped(tile.num_warps),
    )
    return out


def tile_for(num_rows: int, columns: int, dtype: torch.dtype, is_gated: bool) -> VectorTile:
    """Tiles measured on an H200: whole rows at once, up to 4,096 columns."""
    width = min(4096, power_of_two(columns, 32))
    num_warps = 8 if width >= 2048 else 4
    if dtype == FP8:
        return VectorTile(8 if width <= 2048 else 4, width, num_warps)
    if width >= 4096:
        return VectorTile(2 if is_gated else 4, width, num_warps)
    if width == 2048:
        return VectorTile(2, width, num_warps)
    return VectorTile(8 if num_rows >= 65536 else 4, width // 2 if is_gated else width, num_warps)
