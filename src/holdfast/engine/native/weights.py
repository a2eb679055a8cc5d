"""A decoder's weights in the blocks that the native code reads: 16 outputs side by side for every input.

Packing takes seconds, so the packed form is kept in the user's cache directory for the next start.
"""

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.weights import (
    GROUP,
    TensorFile,
    WeightSource,
    as_float32,
    check_groups,
    check_shape,
    decoder_shapes,
    quantise,
)
from holdfast.errors import ModelError
from holdfast.models import Architecture, ModelSource

LANES = 16
FORMAT = "blocks-of-16/1"
_GROUP_BYTES = LANES * (2 + GROUP)  # int8: for each group of inputs 16 scales, then the values
_PIECE = 1 << 18  # values that are converted at once: they stay in the cache of a core

Arrays = Mapping[str, NDArray[np.generic]]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint8]

logger = logging.getLogger(__name__)

_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


def packed_weights(source: ModelSource, weights: WeightSource, dtype: str) -> Arrays:
    """The packed weights from the cache; where they are not there, packs them now and tries to write the cache."""
    path = cache_directory() / "weights" / f"{source.digest}-{dtype}.safetensors"
    metadata = {"format": FORMAT, "digest": source.digest, "dtype": dtype}
    if path.exists():
        try:
            file = TensorFile(path)
            if file.metadata == metadata | {"crc32": str(file.checksum())}:
                return {name: file.tensor(name) for name in file.names}
            logger.warning("packing the weights again: the content of %s does not match its checksum", path)
        except ModelError as exc:
            logger.warning("packing the weights again: %s", exc)
    arrays = WeightPacker(weights, source.architecture, dtype).arrays()
    try:
        _write(path, arrays, metadata)
    except OSError as exc:
        logger.warning("the packed weights could not be cached, so the next start packs them again: %s", exc)
    return arrays


def cache_directory() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "holdfast"


def _write(path: Path, arrays: Arrays, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, completely or not at all. Every tensor begins at a multiple of 64 bytes."""
    checksum = 0
    for array in arrays.values():
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    entries: dict[str, object] = {"__metadata__": {**metadata, "crc32": str(checksum)}}
    offset = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with fresh.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a tensor lies: in the array `array`, from its row `first` on. A gate has every second block of its array,
    beginning with the first, `up` those between: `step` is 2, and `offset` says which. Vectors have no blocks."""

    array: str
    first: int = 0
    step: int = 1
    offset: int = 0


def tensor_places(arch: Architecture) -> dict[str, PackedPlace]:
    """The place of every tensor of a decoder by its Hugging Face name."""
    dim = arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
    firsts = {"q": 0, "k": queries, "v": queries + keys}
    names = {
        "input_layernorm.weight": PackedPlace("attention_norm"),
        "post_attention_layernorm.weight": PackedPlace("mlp_norm"),
        "self_attn.q_norm.weight": PackedPlace("query_norm"),
        "self_attn.k_norm.weight": PackedPlace("key_norm"),
        "self_attn.o_proj.weight": PackedPlace("output"),
        "mlp.gate_proj.weight": PackedPlace("gate_up", step=2),
        "mlp.up_proj.weight": PackedPlace("gate_up", step=2, offset=1),
        "mlp.down_proj.weight": PackedPlace("down"),
        **{f"self_attn.{name}_proj.weight": PackedPlace("qkv", first) for name, first in firsts.items()},
        **{f"self_attn.{name}_proj.bias": PackedPlace("qkv_bias", first) for name, first in firsts.items()},
    }
    places = {
        "model.norm.weight": PackedPlace("norm"),
        "model.embed_tokens.weight": PackedPlace("embedding"),
        "lm_head.weight": PackedPlace("head"),
    }
    for index in range(arch.num_layers):
        for name, place in names.items():
            places[f"model.layers.{index}.{name}"] = replace(place, array=f"{index}.{place.array}")
    return {name: places[name] for name in decoder_shapes(arch)}


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """Reads, checks and packs the weights of one model, one tensor at a time."""

    weights: WeightSource
    arch: Architecture
    dtype: str

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All arrays by name: matrices as blocks of bits, vectors as float32. What no output has is zero."""
        shapes, places = decoder_shapes(self.arch), tensor_places(self.arch)
        arrays: dict[str, NDArray[np.generic]] = {}
        for array, sizes in _array_sizes(shapes, places).items():
            arrays[array] = self._empty(*sizes)
        for name, place in places.items():
            tensor = self.weights.tensor(name)
            check_shape(name, tensor.shape, shapes[name])
            write_tensor(arrays, place, tensor, self.dtype)
        return arrays

    def _empty(self, num_blocks: int, inputs: int) -> NDArray[np.generic]:
        """`num_blocks` blocks; a vector of that many values where there are no inputs."""
        if not inputs:
            return np.zeros(num_blocks, np.float32)
        if inputs % 2:
            raise ModelError(f"the native engine needs an even number of inputs, got {inputs}")
        if self.dtype == "int8":
            check_groups(inputs)
            return np.zeros((num_blocks, inputs // GROUP * _GROUP_BYTES), np.uint8)
        return np.zeros((num_blocks, inputs * LANES * (2 if self.dtype == "bfloat16" else 4)), np.uint8)


def _array_sizes(
    shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, PackedPlace]
) -> dict[str, tuple[int, int]]:
    """The blocks and inputs of every array; of a vector its values and 0."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, place in places.items():
        rows, inputs = (*shapes[name], 0)[:2]
        size = place.first + rows
        if inputs:  # an even number of blocks
            blocks = -(-size // LANES)
            size = blocks * 2 if place.step == 2 else blocks + blocks % 2
        sizes[place.array] = max(sizes.get(place.array, (0, 0)), (size, inputs))
    return sizes


def write_tensor(arrays: Arrays, place: PackedPlace, tensor: NDArray[np.generic], dtype: str) -> None:
    """Convert a tensor, which has the right shape, and write it to its place; nothing else in the arrays changes."""
    target = arrays[place.array]
    if tensor.ndim == 1:
        target[place.first : place.first + len(tensor)] = as_float32(tensor)
        return
    blocks = target[place.offset :: place.step]
    step = max(LANES, _PIECE // tensor.shape[1] // LANES * LANES)
    for first in range(0, len(tensor), step):
        _write_rows(blocks, place.first + first, as_float32(tensor[first : first + step]), dtype)


def _write_rows(blocks: NDArray[np.generic], first: int, weight: Floats, dtype: str) -> None:
    """Write the outputs from `first` on: weight is [outputs, inputs]. The blocks that it begins and ends in may hold
    others besides."""
    parts: tuple[NDArray[np.generic], ...] = (weight,)
    if dtype != "float32":
        parts = quantise(weight) if dtype == "int8" else (to_bfloat16(weight),)
    near, end = first // LANES, -(-(first + len(weight)) // LANES)
    for lanes, part in zip(_lanes(blocks[near:end], dtype), parts, strict=True):
        held = np.moveaxis(lanes, -1, 1)  # [blocks, 16, ...]
        rows = np.ascontiguousarray(held).reshape(len(held) * LANES, -1)
        rows[first - near * LANES :][: len(part)] = part
        held[...] = rows.reshape(held.shape)


def _lanes(blocks: NDArray[np.generic], dtype: str) -> tuple[NDArray[np.generic], ...]:
    """Views of blocks with the 16 outputs last: [blocks, inputs, 16], of int8 the values and then the scales."""
    num = len(blocks)
    if dtype != "int8":
        kind = np.uint16 if dtype == "bfloat16" else np.float32
        return (blocks.view(kind).reshape(num, -1, LANES),)
    groups = blocks.reshape(num, -1, _GROUP_BYTES)
    scales, values = groups[:, :, : 2 * LANES], groups[:, :, 2 * LANES :]
    return values.view(np.int8).reshape(num, -1, GROUP, LANES), scales.view(np.float16)
