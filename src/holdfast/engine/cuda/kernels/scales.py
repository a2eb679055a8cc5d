"""fp8 (e4m3) with scales: rows of activations, results of their products, and keys and values in their cells.

A library multiplies fp8 fastest where it knows of no scales. So a product holds sums of fp8 times fp8, and the kernel
that reads it multiplies them with the scales of the row and of the output.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import overlapped, power_of_two, take_turn
from holdfast.engine.cuda.weights import FP8, LARGEST

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(1e-30)  # what is smaller than this is zero


class Scaled(NamedTuple):
    """Rows in fp8 [rows, columns], and the float32 scales [rows] that they are to be multiplied with."""

    values: Tensor
    scales: Tensor


Rows = Tensor | Scaled


class Product(NamedTuple):
    """A product [rows, outputs], and perhaps the scales of its rows and of its outputs, still to be multiplied with."""

    values: Tensor
    row_scales: Tensor | None = None
    scales: Tensor | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """As kernels take them, which read no scales where there are none."""
        if self.row_scales is None or self.scales is None:
            return self.values, self.values, self.values
        return self.values, self.row_scales, self.scales

    @property
    def is_scaled(self) -> bool:
        return self.scales is not None


def new_rows(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Memory for rows of this dtype."""
    values = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    return Scaled(values, torch.empty(num_rows, dtype=torch.float32, device=device)) if dtype == FP8 else values


def row_pointers(rows: Rows) -> tuple[Tensor, Tensor]:
    """Values and scales as kernels take them."""
    return (rows.values, rows.scales) if isinstance(rows, Scaled) else (rows, rows)


@triton.jit
def product_of(values_ptr, row_scales_ptr, scales_ptr, row, at, column, is_live, IS_SCALED: tl.constexpr):
    """The outputs `column` of one row of a product, which lie at `at`."""
    value = tl.load(values_ptr + at, mask=is_live, other=0).to(tl.float32)
    if IS_SCALED:
        value *= tl.load(row_scales_ptr + row) * tl.load(scales_ptr + column, mask=is_live, other=0)
    return value


@triton.jit
def store_row(out_ptr, scales_ptr, row, x, at, is_live, COLUMNS: tl.constexpr):
    """Store a whole row, of which x is zero where it is not live; in fp8 with its scale."""
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        largest = tl.max(tl.abs(x), axis=0)
        tl.store(scales_ptr + row, largest / _LARGEST)
        x *= tl.where(largest > _SMALLEST, _LARGEST / largest, 0.0)
    tl.store(out_ptr + row * COLUMNS + at, x.to(out_ptr.dtype.element_ty), mask=is_live)


@triton.jit
def _round(x_ptr, out_ptr, scales_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * COLUMNS + at, mask=at < COLUMNS, other=0).to(tl.float32)
    store_row(out_ptr, scales_ptr, row, x, at, at < COLUMNS, COLUMNS)


def rounded_rows(x: Tensor) -> Scaled:
    """The rows of x in fp8."""
    num_rows, columns = x.shape
    out = Scaled(torch.empty_like(x, dtype=FP8), torch.empty(num_rows, dtype=torch.float32, device=x.device))
    _round[(num_rows,)](x, *out, COLUMNS=columns, BLOCK=power_of_two(columns), **overlapped(8))
    return out


@triton.jit
def cell_scale(largest):
    """The smallest power of two that brings a key or value whose largest element is this into the range of fp8."""
    bits = tl.maximum(largest / _LARGEST, _SMALLEST).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def widened(tile, like):
    """A tile of keys or values in the dtype of the queries: the same numbers, still without their scales."""
    return tile.to(like.dtype)
