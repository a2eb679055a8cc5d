"""Products of activations with the weights of a layer.

`tile_product` multiplies several vectors on the tensor cores: [tokens, in] @ [out, in]^T. A result is a sum over one
fixed order of column blocks, so with one fixed tile a row's bits depend only on the row: this is the deterministic
product. `vector_product` multiplies one vector and reads every weight once, at the speed of memory: a program owns
whole rows of the matrix, so there is no second pass, and the norm before a product costs nothing extra, because its
scale is computed beside the sum and applied to the result. `restore` is for products large enough for a library.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import OVERLAP, blocks, overlapped, power_of_two, take_turn
from holdfast.engine.cuda.weights import Matrix
from holdfast.engine.weights import GROUP

STORE, ADD, GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_BLOCK = 4096
# int8 to float32, four at a time: a byte becomes the lowest bits of a large float, and then that float is subtracted.
# 0x4B000000 is 2^23, whose last bit has the value 1; a byte b with its sign bit flipped makes it 2^23 + b + 128.
_WIDEN = tl.constexpr(
    "{ .reg .b32 t, a, b, c, d;"
    " xor.b32 t, $4, 0x80808080;"
    " prmt.b32 a, t, 0x4B000000, 0x7440;"
    " prmt.b32 b, t, 0x4B000000, 0x7441;"
    " prmt.b32 c, t, 0x4B000000, 0x7442;"
    " prmt.b32 d, t, 0x4B000000, 0x7443;"
    " mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;"
    " sub.f32 $0, $0, 0f4B000080; sub.f32 $1, $1, 0f4B000080;"
    " sub.f32 $2, $2, 0f4B000080; sub.f32 $3, $3, 0f4B000080; }"
)


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
    IS_INT8: tl.constexpr,
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
            w = tl.load(at_w, mask=is_output[:, None] & (column < K)[None, :], other=0)
        if IS_INT8:  # a tile is one group, so its scale applies to the products
            scale = tl.load(scale_ptr + outputs.to(tl.int64) * (K // 32) + start // 32, mask=is_output, other=0)
            total += tl.dot(x, tl.trans(w.to(x.dtype))) * scale.to(tl.float32)[None, :]
        else:
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    at = out_ptr + tokens.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


def tile_product(x: Tensor, matrix: Matrix, out: Tensor, tile: Tile) -> Tensor:
    """x @ matrix^T into `out`."""
    num_tokens, columns = x.shape
    num_outputs = matrix.num_outputs
    is_int8 = matrix.scales is not None
    _tile_product[(blocks(num_outputs, tile.outputs), blocks(num_tokens, tile.tokens))](
        x,
        matrix.values,
        matrix.scales if is_int8 else matrix.values,
        out,
        num_tokens,
        num_outputs,
        K=columns,
        IS_INT8=is_int8,
        EVEN=columns % tile.columns == 0 and num_outputs % tile.outputs == 0,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        **overlapped(tile.num_warps, tile.num_stages),
    )
    return out


def fixed_tile(matrix: Matrix) -> Tile:
    """The tile of deterministic products. It depends only on the dtype."""
    if matrix.scales is not None:
        return Tile(64, 32, GROUP, 4, 5)
    return Tile(16, 32, 32, 4, 2) if matrix.values.dtype == torch.float32 else Tile(64, 32, 128, 4, 3)


def head_tile(num_tokens: int) -> Tile:
    """The tile for an int8 matrix with very many outputs."""
    return Tile(16, 64, GROUP, 4, 5) if num_tokens <= 16 else Tile(64, 128, GROUP, 4, 5)


class VectorTile(NamedTuple):
    """Rows and columns that a program loads at once, and its number of warps."""

    rows: int
    columns: int
    num_warps: int


@triton.jit
def _tile(w_ptr, scale_ptr, rows, is_row, START, K: tl.constexpr, COLUMNS: tl.constexpr, IS_INT8: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """Weights [rows, columns]; int8 weights in half groups [segments, rows, 16], with their scales [segments, rows].

    Segments come first because neighbouring threads lie along the first axis and so read neighbouring bytes.
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
def widened(values):
    """The same numbers as `values.to(tl.float32)`, in half the instructions."""
    if OVERLAP:
        return tl.inline_asm_elementwise(_WIDEN, "=f,=f,=f,=f,r", [values], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return values.to(tl.float32)


@triton.jit
def _times(w, scale, x, IS_INT8: tl.constexpr):
    """The products of a tile before they are summed: [rows, columns], or [segments, rows]."""
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
    """matrix @ x into `out`: stored, added, or as silu(gate) * up. With `norm`, x is RMS-normalised first."""
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
    """Tiles measured on an H200: whole rows at once, up to 4,096 columns."""
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


@triton.jit
def _restore(values_ptr, scales_ptr, out_ptr, num, BLOCK: tl.constexpr):
    take_turn()
    group = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    scale = tl.load(scales_ptr + group, mask=group * 32 < num, other=0).to(tl.float32)
    value = tl.load(values_ptr + at, mask=at < num, other=0).to(tl.float32)
    tl.store(out_ptr + at, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=at < num)


def restore(values: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """int8 weights as bfloat16: values [out, in] times the scales [out, in / 32] of their groups."""
    num = values.numel()
    _restore[(blocks(num, _BLOCK),)](values, scales, out, num, BLOCK=_BLOCK, **overlapped(4))
    return out
