"""int8 weights back to bfloat16, for products large enough to be worth it."""

import triton
import triton.language as tl
from torch import Tensor

from holdfast.engine.cuda.kernels.launch import blocks, overlapped, take_turn

_BLOCK = 4096


@triton.jit
def _restore(values_ptr, scales_ptr, out_ptr, num, BLOCK: tl.constexpr):
    take_turn()
    group = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    scale = tl.load(scales_ptr + group, mask=group * 32 < num, other=0).to(tl.float32)
    value = tl.load(values_ptr + at, mask=at < num, other=0).to(tl.float32)
    tl.store(out_ptr + at, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=at < num)


def restore(values: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """values [out, in] times the scales [out, in / 32] of their groups."""
    num = values.numel()
    _restore[(blocks(num, _BLOCK),)](values, scales, out, num, BLOCK=_BLOCK, **overlapped(4))
    return out
