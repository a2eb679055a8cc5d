"""A decoder's weights in the blocks that the native code reads: 16 outputs side by side for every input.

Packing takes seconds, so the packed form is kept in the user's cache directory for the next start.
"""

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.weights import GROUP, TensorFile, WeightSource, as_float32, check_shape, quantise
from holdfast.errors import ModelError
from holdfast.models import Architecture, ModelSource

LANES = 16
FORMAT = "blocks-of-16/1"

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


def pack_matrix(weight: Floats, dtype: str) -> Bits:
    """[blocks, bytes], an even number of blocks. Outputs beyond the last one are zero."""
    outputs, inputs = weight.shape
    if inputs % 2:
        raise ModelError(f"the native engine needs an even number of inputs, got {inputs}")
    whole = np.zeros((-(-outputs // (2 * LANES)) * 2 * LANES, inputs), np.float32)
    whole[:outputs] = weight
    num_blocks = len(whole) // LANES
    if dtype == "int8":
        values, scales = quantise(whole)
        lanes_last = values.reshape(num_blocks, LANES, -1, GROUP).transpose(0, 2, 3, 1)
        beside = scales.reshape(num_blocks, LANES, -1).transpose(0, 2, 1)
        groups = [
            np.ascontiguousarray(beside).view(np.uint8),
            np.ascontiguousarray(lanes_last).reshape(num_blocks, -1, GROUP * LANES).view(np.uint8),
        ]
        return np.concatenate(groups, axis=2).reshape(num_blocks, -1)
    turned = np.ascontiguousarray(whole.reshape(num_blocks, LANES, inputs).transpose(0, 2, 1))
    return (to_bfloat16(turned) if dtype == "bfloat16" else turned).reshape(num_blocks, -1).view(np.uint8)


def interleaved(gate: Floats, up: Floats) -> Floats:
    """Sixteen rows of `gate`, sixteen of `up`, and so on, each padded with zeros to whole blocks."""
    size, inputs = gate.shape
    both = np.zeros((-(-size // LANES), 2, LANES, inputs), np.float32)
    for index, part in enumerate((gate, up)):
        padded = np.zeros((both.shape[0] * LANES, inputs), np.float32)
        padded[:size] = part
        both[:, index] = padded.reshape(-1, LANES, inputs)
    return both.reshape(-1, inputs)


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """Reads, checks and packs the weights of one model, one tensor at a time."""

    weights: WeightSource
    arch: Architecture
    dtype: str

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All arrays by name: matrices as blocks of bits, vectors as float32."""
        arch = self.arch
        arrays: dict[str, NDArray[np.generic]] = {
            "norm": self._vector("model.norm.weight", arch.hidden_size),
            "embedding": self._matrix("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size),
        }
        if not arch.has_tied_embeddings:
            arrays["head"] = self._matrix("lm_head.weight", arch.vocab_size, arch.hidden_size)
        for index in range(arch.num_layers):
            arrays |= {f"{index}.{name}": array for name, array in self._layer(f"model.layers.{index}").items()}
        return arrays

    def _layer(self, at: str) -> dict[str, NDArray[np.generic]]:
        arch, hidden = self.arch, self.arch.hidden_size
        dim, mlp = arch.head_dim, arch.mlp_size
        queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
        sizes = (("q", queries), ("k", keys), ("v", keys))
        parts = [(f"{at}.self_attn.{name}_proj", size) for name, size in sizes]
        layer: dict[str, NDArray[np.generic]] = {
            "attention_norm": self._vector(f"{at}.input_layernorm.weight", hidden),
            "mlp_norm": self._vector(f"{at}.post_attention_layernorm.weight", hidden),
            "qkv": self._packed(np.concatenate([self._read(f"{name}.weight", size, hidden) for name, size in parts])),
            "output": self._matrix(f"{at}.self_attn.o_proj.weight", hidden, queries),
            "gate_up": self._packed(
                interleaved(*(self._read(f"{at}.mlp.{part}_proj.weight", mlp, hidden) for part in ("gate", "up")))
            ),
            "down": self._matrix(f"{at}.mlp.down_proj.weight", hidden, mlp),
        }
        if arch.has_qkv_bias:
            layer["qkv_bias"] = np.concatenate([self._read(f"{name}.bias", size) for name, size in parts])
        if arch.has_qk_norm:
            layer |= {f"{n}_norm": self._vector(f"{at}.self_attn.{n[0]}_norm.weight", dim) for n in ("query", "key")}
        return layer

    def _vector(self, name: str, size: int) -> Floats:
        return self._read(name, size).copy()  # must not refer to the model's file

    def _matrix(self, name: str, *shape: int) -> Bits:
        return self._packed(self._read(name, *shape))

    def _packed(self, weight: Floats) -> Bits:
        return pack_matrix(weight, self.dtype)

    def _read(self, name: str, *shape: int) -> Floats:
        tensor = as_float32(self.weights.tensor(name))
        check_shape(name, tensor.shape, shape)
        return np.ascontiguousarray(tensor)
