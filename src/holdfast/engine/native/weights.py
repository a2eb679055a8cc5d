"""A decoder's weights in the blocks that the native code reads: 16 outputs side by side for every input.

Packing takes seconds, so the packed form is kept in the user's cache directory for the next start.
"""

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
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
    quantise_to_four_bits,
)
from holdfast.errors import ModelError
from holdfast.models import Architecture, ModelSource
from holdfast.models.gguf_file import FourBits, GGUFFile

LANES = 16
FORMAT = "blocks-of-16/2"
# The bytes of a group of inputs in a block. In int8: 16 scales, then the values. In int4: 16 scales and perhaps 16
# offsets, then the nibbles. Both have four inputs of an output side by side.
_GROUP_BYTES = {
    "float32": LANES * 4 * GROUP,
    "bfloat16": LANES * 2 * GROUP,
    "int8": LANES * (2 + GROUP),
    "int4": LANES * (2 + GROUP // 2),
    "int4_offset": LANES * (4 + GROUP // 2),
}
FOUR_BITS = ("int4", "int4_offset")
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
            is_ours = metadata.items() <= file.metadata.items()  # else another release wrote it
            if is_ours and file.metadata.get("crc32") == str(file.checksum()):
                return {name: file.tensor(name) for name in file.names}
            if is_ours:
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
    """Reads, checks and packs the weights of one model, one tensor at a time.

    With dtype int4, matrices that are not quantised yet get four bits, and embedding and head eight. In a GGUF file,
    tensors of four bits keep theirs. Those with another quantisation get eight, as do all that are multiplied together
    with one of them.
    """

    weights: WeightSource
    arch: Architecture
    dtype: str

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All arrays by name: matrices as blocks of bits, vectors as float32. What no output has is zero."""
        shapes, places = decoder_shapes(self.arch), tensor_places(self.arch)
        arrays: dict[str, NDArray[np.generic]] = {}
        for array, (rows, inputs) in _array_sizes(shapes, places).items():
            names = [name for name, place in places.items() if place.array == array]
            arrays[array] = _empty(rows, inputs, self._kind(array, names) if inputs else "float32")
        for name, place in places.items():
            kind = kind_of(arrays[place.array], shapes[name][-1], self.dtype)
            bits = self._four_bits(name) if kind in FOUR_BITS else None
            tensor = bits or self.weights.tensor(name)
            check_shape(name, tensor.shape, shapes[name])
            write_tensor(arrays, place, tensor, self.dtype)
        return arrays

    def _four_bits(self, name: str) -> FourBits | None:
        return self.weights.four_bits(name) if isinstance(self.weights, GGUFFile) else None

    def _kind(self, array: str, names: Sequence[str]) -> str:
        """How a matrix is stored that consists of these tensors."""
        if self.dtype != "int4":
            return self.dtype
        stored = [self._four_bits(name) for name in names]
        if all(stored):
            return "int4" if all(bits and bits.offsets is None for bits in stored) else "int4_offset"
        if isinstance(self.weights, GGUFFile) and any(
            bits is None and self.weights.is_quantised(name) for name, bits in zip(names, stored, strict=True)
        ):
            return "int8"
        return "int8" if array in ("embedding", "head") else "int4_offset"


def _empty(num_blocks: int, inputs: int, kind: str) -> NDArray[np.generic]:
    """`num_blocks` blocks; a vector of that many values where there are no inputs."""
    if not inputs:
        return np.zeros(num_blocks, np.float32)
    if inputs % 2:
        raise ModelError(f"the native engine needs an even number of inputs, got {inputs}")
    if kind not in ("float32", "bfloat16"):
        check_groups(inputs)
    return np.zeros((num_blocks, inputs * _GROUP_BYTES[kind] // GROUP), np.uint8)


def kind_of(blocks: NDArray[np.generic], inputs: int, dtype: str) -> str:
    """How these blocks of a model of this dtype store their weights."""
    if blocks.ndim == 1:
        return "float32"
    if dtype != "int4":
        return dtype
    return next(kind for kind in (*FOUR_BITS, "int8") if blocks.shape[1] * GROUP == inputs * _GROUP_BYTES[kind])


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


def write_tensor(arrays: Arrays, place: PackedPlace, tensor: NDArray[np.generic] | FourBits, dtype: str) -> None:
    """Convert a tensor, which has the right shape, and write it to its place; nothing else in the arrays changes."""
    target = arrays[place.array]
    if len(tensor.shape) == 1:
        target[place.first : place.first + tensor.shape[0]] = as_float32(tensor)
        return
    rows, inputs = tensor.shape
    blocks, kind = target[place.offset :: place.step], kind_of(target, inputs, dtype)
    step = max(LANES, _PIECE // inputs // LANES * LANES)
    for first in range(0, rows, step):
        some = tensor[first : first + step]
        _write_rows(blocks, place.first + first, _converted(some, kind), kind)


def _converted(weight: NDArray[np.generic] | FourBits, kind: str) -> tuple[NDArray[np.generic], ...]:
    """The parts of a block for these rows, in the order of `_lanes`. Four bits are only for blocks of four bits."""
    if isinstance(weight, FourBits):
        bits = weight
    elif kind in FOUR_BITS:
        bits = quantise_to_four_bits(as_float32(weight), has_offsets=kind == "int4_offset")
    elif kind == "int8":
        return quantise(as_float32(weight))
    else:
        return (to_bfloat16(as_float32(weight)) if kind == "bfloat16" else as_float32(weight),)
    return (bits.nibbles, bits.scales, *((bits.given_offsets(),) if kind == "int4_offset" else ()))


def _write_rows(blocks: NDArray[np.generic], first: int, parts: tuple[NDArray[np.generic], ...], kind: str) -> None:
    """Write the outputs from `first` on: a part is [outputs, ...]. The blocks that they begin and end in may hold
    others besides."""
    num = len(parts[0])
    near, end = first // LANES, -(-(first + num) // LANES)
    for lanes, part in zip(_lanes(blocks[near:end], kind), parts, strict=True):
        held = np.moveaxis(lanes, -1, 1)  # [blocks, 16, ...]
        rows = np.ascontiguousarray(held).reshape(len(held) * LANES, -1)
        rows[first - near * LANES :][:num] = part.reshape(num, -1)
        held[...] = rows.reshape(held.shape)


def _lanes(blocks: NDArray[np.generic], kind: str) -> tuple[NDArray[np.generic], ...]:
    """Views of blocks with the 16 outputs last: [blocks, inputs, 16]. Of int8 and int4 the values, in quads with four
    inputs or four bytes of nibbles side by side in an output, then the scales and the offsets."""
    num = len(blocks)
    if kind in ("float32", "bfloat16"):
        return (blocks.view(np.uint16 if kind == "bfloat16" else np.float32).reshape(num, -1, LANES),)
    groups = blocks.reshape(num, -1, _GROUP_BYTES[kind])
    head = 2 * LANES * (2 if kind == "int4_offset" else 1)
    halves = groups[:, :, :head].view(np.float16)
    values = groups[:, :, head:].view(np.uint8 if kind in FOUR_BITS else np.int8)
    quads = values.reshape(num, groups.shape[1], -1, LANES, 4).swapaxes(3, 4)
    return (quads, *(halves[:, :, first : first + LANES] for first in range(0, halves.shape[2], LANES)))
