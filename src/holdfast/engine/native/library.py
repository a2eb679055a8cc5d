"""The compiled decoder as a ctypes library: which build this machine can run, and the structs that it takes."""

import ctypes
import functools
import os
import platform
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from holdfast.engine.native.build import library_path, variants
from holdfast.errors import ConfigError
from holdfast.extras import HOW_TO_BUILD

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "int4_offset": 4}
CHOICE = "HOLDFAST_NATIVE"  # environment variable that names one build; "off": none

_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}
_AVX2 = {"avx2", "fma", "f16c"}
_NEEDS = {
    "avx512bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
}


class MatrixStruct(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("num_blocks", c_int32),
        ("inputs", c_int32),
        ("kind", c_int32),
        ("outputs", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("mlp", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("vocabulary", c_int32),
        ("epsilon", c_float),
        ("frequencies", POINTER(c_double)),
        ("layers", POINTER(LayerStruct)),
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        ("norm", c_void_p),
    )


class SlabsStruct(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_slabs", c_int32),
        ("capacity", c_int32),
        ("recent", c_int32),
        ("kind", c_int32),
    )


class RowStruct(Structure):
    _fields_ = (
        ("start", c_int64),
        ("count", c_int32),
        ("slot", c_int32),
        ("sink", c_int32),
        ("num_logits", c_int32),
    )


class WantedStruct(Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("temperature", c_double),
        ("ends", c_void_p),
        ("num_ends", c_int32),
        ("choice", c_uint32),
    )


class DrawnStruct(Structure):
    _fields_ = (
        ("token", c_int32),
        ("padding", c_int32),
        ("logprob", c_double),
        ("sampling_logprob", c_double),
    )


def usable_variants() -> list[str]:
    """The installed builds that this machine can run: the one that HOLDFAST_NATIVE names, then the best; none where it
    is "off"."""
    named = os.environ.get(CHOICE)
    if named == "off":
        return []
    has = _features()
    usable = [name for name in variants() if _NEEDS.get(name, set()) <= has and library_path(name).is_file()]
    return sorted(usable, key=lambda name: name != named)


def _features() -> set[str]:
    """The instruction sets of this machine's processor, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # a Mac; Intel Macs have had AVX2 since 2013
        return _AVX2 if platform.machine() == "x86_64" else set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def is_available() -> bool:
    return bool(usable_variants())


@functools.cache
def library(variant: str | None = None) -> ctypes.CDLL:
    """The named build, or the best one for this machine."""
    wanted = variant or os.environ.get(CHOICE)
    usable = usable_variants()
    if wanted and wanted not in usable:
        raise ConfigError(f"there is no native build {wanted!r} on this machine; usable: {', '.join(usable) or 'none'}")
    if not usable:
        raise ConfigError(f"the native engine is not built; {HOW_TO_BUILD}")
    found = ctypes.CDLL(str(library_path(wanted or usable[0])))
    found.holdfast_decoder.argtypes = (POINTER(ModelStruct), POINTER(SlabsStruct), c_int32, c_int32)
    found.holdfast_decoder.restype = c_void_p
    found.holdfast_free.argtypes = (c_void_p,)
    found.holdfast_free.restype = None
    found.holdfast_forward.argtypes = (c_void_p, POINTER(RowStruct), c_int32, c_void_p, c_void_p)
    found.holdfast_forward.restype = None
    found.holdfast_burst.argtypes = (
        *(c_void_p, POINTER(RowStruct), c_int32, c_void_p, POINTER(WantedStruct)),
        *(c_int32, c_double, c_void_p, POINTER(DrawnStruct)),
    )
    found.holdfast_burst.restype = c_int32
    found.holdfast_mixes.argtypes = (c_int32,)
    found.holdfast_mixes.restype = c_int32
    found.holdfast_draw.argtypes = (c_void_p, c_int32, c_double, c_uint64, c_uint64, c_uint32, POINTER(DrawnStruct))
    found.holdfast_draw.restype = None
    return found
