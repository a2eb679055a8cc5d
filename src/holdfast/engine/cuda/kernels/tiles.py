"""Matrix times several vectors, on the tensor cores: [tokens, in] @ [out, in]^T.

A result is the sum over one fixed order of column blocks, so with one fixed tile a row's bits depend on nothing but
the row: that is the deterministic product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, take_turn
from holdfast.engine.cuda.weights import Matrix
from holdfast.engine.quantisation import GROUP


class Tile(NamedTuple):
    """Tokens, outputs and columns that a program multiplies at once, and how it is compiled."""

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
        if IS_INT8:  # a tile is one group, and its scale applies to the products
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
    """The one tile of deterministic products, whatever is multiplied beside."""
    if matrix.scales is not None:
        return Tile(64, 32, GROUP, 4, 5)
    return Tile(16, 32, 32, 4, 2) if matrix.values.dtype == torch.float32 else Tile(64, 32, 128, 4, 3)


def head_tile(num_tokens: int) -> Tile:
    """For an int8 matrix with very many rows."""
    return Tile(16, 64, GROUP, 4, 5) if num_tokens <= 16 else Tile(64, 128, GROUP, 4, 5)
