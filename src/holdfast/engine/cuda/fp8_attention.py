"""Attention of one token of each row over an fp8 cache, in CUDA C++ for Hopper.

Knows the layout of `attend.cu`'s arguments; not weights, graphs or sampling.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from holdfast.engine.cuda.kernels.attention import Pair, Places, new_parts, score_scale
from holdfast.engine.cuda.module import Kernel, Launch
from holdfast.engine.cuda.slabs import Cache, CudaSlabs, Fp8Slabs
from holdfast.models import Architecture

_SOURCE = Path(__file__).with_name("attend.cu")
_HEAD_DIM = 128
_MOST_HEADS = 8  # of a group
_THREADS = 128
_SHARED_BYTES = 4 * 3 * 4096  # rings of four warps
_BLOCKS = 4  # on a multiprocessor at once
_HOPPER = (9, 0)


class _Attention(ctypes.Structure):
    """`Attention` in attend.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "sink_query", "keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "sinks", "mixed", "tops", "norms", "done", "out")),
        ("capacity", ctypes.c_int),
        ("recent", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


def can_attend(arch: Architecture, dtype: torch.dtype, slabs: CudaSlabs) -> bool:
    """Whether `Fp8Attention` can compute this model: bfloat16 activations, an fp8 cache on Hopper, heads of 128."""
    device = slabs.keys.device
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    has_sizes = arch.head_dim == _HEAD_DIM and arch.num_heads // arch.num_kv_heads <= _MOST_HEADS
    return is_hopper and has_sizes and dtype == torch.bfloat16 and isinstance(slabs, Fp8Slabs)


class Fp8Attention:
    """Compiled for one model and device."""

    def __init__(self, arch: Architecture, recent: int, device: torch.device) -> None:
        self._arch = arch
        self._recent = recent
        self._most_blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        macros = {"HEADS": arch.num_heads, "KV_HEADS": arch.num_kv_heads}
        self._kernel = Kernel(
            _SOURCE, "attend", macros, device, threads=_THREADS, shared_bytes=_SHARED_BYTES, launch=Launch.OVERLAPPED
        )

    def attend(self, queries: Pair, cache: Cache, places: Places, done: Tensor) -> Tensor:
        """Attention [rows, heads * dim] of queries [rows, heads, dim], whose keys and values are in the slabs.

        done: zeros, one for each row and group of heads; left as zeros.
        """
        query, arch = queries[0], self._arch
        num_rows, heads, kv_heads = query.shape[0], arch.num_heads, arch.num_kv_heads
        num_parts = max(1, self._most_blocks // (num_rows * kv_heads))
        out = torch.empty(num_rows, heads * _HEAD_DIM, dtype=query.dtype, device=query.device)
        mixed, tops, norms = new_parts((num_rows, kv_heads, num_parts, heads // kv_heads), _HEAD_DIM, query.device)
        tensors = (*queries, *cache.pointers, *places, mixed, tops, norms, done, out)
        addresses = (tensor.data_ptr() for tensor in tensors)
        capacity = cache.keys.shape[2]
        self._kernel.launch(
            (num_parts, kv_heads, num_rows), _Attention(*addresses, capacity, self._recent, score_scale(_HEAD_DIM))
        )
        return out
