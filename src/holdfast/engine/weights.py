"""A model's weights as numpy arrays, whatever file they come from; each engine converts them to its own tensors.

Tensors have their Hugging Face names. numpy has no bfloat16, so bfloat16 values travel as 16-bit integers.
"""

import json
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelError
from holdfast.models import Architecture, GGUFSource, HFSource, ModelSource, require_plain_weights
from holdfast.models.gguf_file import FourBits

_MAX_HEADER = 100 << 20  # bytes, as other readers of safetensors have it
GROUP = 32  # weights along a row that share a scale in int8 and in int4

_DTYPES = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
    **{"U64": np.uint64, "U32": np.uint32, "U8": np.uint8, "BOOL": np.bool_},
}


class WeightSource(Protocol):
    """Tensors by name. Each is read when it is asked for."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor in the dtype of the file. Raises ModelError where there is none."""


def open_weights(source: ModelSource, *, for_mlx: bool = False) -> WeightSource:
    """The weights of a model on disk. Raises ModelError where a file is damaged or only MLX can compute with it."""
    if not for_mlx:
        require_plain_weights(source)
    return source.file if isinstance(source, GGUFSource) else Checkpoint(source)


class Checkpoint:
    """The safetensors files of a Hugging Face directory."""

    def __init__(self, source: HFSource) -> None:
        self._path = source.path
        self._files: dict[str, TensorFile] = {}
        for path in source.weight_files:
            file = TensorFile(path)
            self._files |= dict.fromkeys(file.names, file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> NDArray[np.generic]:
        if name not in self._files:
            raise ModelError(f"{self._path} lacks the tensor {name}")
        return self._files[name].tensor(name)


class TensorFile:
    """A safetensors file. Opening checks that it is complete; tensors are read when they are used.

    A mapped file costs no memory of its own, but must not change while it is open.
    """

    def __init__(self, path: Path, *, is_mapped: bool = True) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                num_bytes = path.stat().st_size - 8 - size
                if num_bytes < 0 or size > _MAX_HEADER:
                    raise ValueError("the file ends inside its header")
                header = json.loads(file.read(size))
            self._start = 8 + size
            # Copy on write: new weights may be written into the memory, but never into the file.
            self._mapped = np.asarray(np.memmap(path, np.uint8, "c", offset=8 + size)) if is_mapped else None
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries = header
            self._check_offsets(num_bytes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as exc:
            raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc

    def _check_offsets(self, num_bytes: int) -> None:
        """The tensors must fill the file from its header to its end, each with the bytes of its shape."""
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            first, last = entry["data_offsets"]
            if not all(type(number) is int for number in (first, last, *entry["shape"])):
                raise ValueError(f"the shape of the tensor {name} has a value that is not an integer")
            dtype = _DTYPES.get(entry["dtype"])
            size = last - first if dtype is None else math.prod(entry["shape"]) * np.dtype(dtype).itemsize
            if first != end or last != first + size or size < 0:
                raise ValueError(f"the bytes of the tensor {name} do not fit its shape")
            end = last
        if end != num_bytes:
            raise ValueError(f"the tensors take {end} bytes, the file has {num_bytes}")

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def checksum(self) -> int:
        """CRC-32 of all tensors. Reads the whole file."""
        return zlib.crc32(self._read(0, None).data)

    def tensor(self, name: str) -> NDArray[np.generic]:
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(
                f"tensor {name} has type {entry['dtype']}, which is not supported; supported: {', '.join(_DTYPES)}"
            )
        first, last = entry["data_offsets"]
        found = self._read(first, last).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return np.require(found, requirements="A")  # old files are not aligned, which torch expects

    def _read(self, first: int, last: int | None) -> NDArray[np.uint8]:
        if self._mapped is not None:
            return self._mapped[first:last]
        try:
            found = np.fromfile(self._path, np.uint8, -1 if last is None else last - first, offset=self._start + first)
        except OSError as exc:
            raise ModelError(f"{self._path} cannot be read: {exc}") from exc
        if last is not None and len(found) < last - first:
            raise ModelError(f"{self._path} became shorter while it was read")
        return found


def decoder_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder by their Hugging Face names. A head that is tied to the embedding is none of them."""
    hidden, mlp, dim = arch.hidden_size, arch.mlp_size, arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
    projections = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not arch.has_tied_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    for index in range(arch.num_layers):
        at = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (hidden,)
        for name, size in projections.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (size, hidden)
            if arch.has_qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (size,)
        for name in ("q_norm", "k_norm") if arch.has_qk_norm else ():
            shapes[f"{at}.self_attn.{name}.weight"] = (dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, queries)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, mlp)
    return shapes


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ModelError(f"tensor {name} has shape {found}, expected {expected}")


def as_float32(tensor: NDArray[np.generic]) -> NDArray[np.float32]:
    """The values of a tensor from a `WeightSource`; float32 tensors are not copied."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32, copy=False)


class Quantised(NamedTuple):
    """int8 weights in the format of GGUF's Q8_0: each group of 32 along a row has one half-precision scale."""

    values: NDArray[np.int8]  # [out, in]
    scales: NDArray[np.float16]  # [out, in / 32]

    def restored(self) -> NDArray[np.float32]:
        """The float weights that these stand for."""
        return self.values.astype(np.float32) * np.repeat(self.scales.astype(np.float32), GROUP, axis=1)


def quantise(weight: NDArray[np.float32]) -> Quantised:
    """The nearest int8 form of `weight` [out, in]."""
    rows, columns = weight.shape
    check_groups(columns)
    groups = weight.reshape(rows, -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(127.0)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    values = np.rint(groups * inverse[:, :, None]).astype(np.int8)
    return Quantised(values.reshape(rows, columns), scales.astype(np.float16))


def quantise_to_four_bits(weight: NDArray[np.float32], has_offsets: bool) -> FourBits:
    """The four-bit form of `weight` [out, in]: the range of each group in 15 steps, with offsets as in Q4_1, without
    them as in Q4_0."""
    rows, columns = weight.shape
    check_groups(columns)
    groups = weight.reshape(rows, -1, GROUP)
    if has_offsets:
        lowest = groups.min(axis=2)
        scales = ((groups.max(axis=2) - lowest) / np.float32(15)).astype(np.float16)
        offsets = lowest.astype(np.float16)
        shifted = groups - offsets.astype(np.float32)[:, :, None]
    else:
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], 2)[:, :, 0]
        scales, offsets = (largest / np.float32(-8)).astype(np.float16), None
        shifted = groups
    steps = scales.astype(np.float32)
    inverse = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps != 0)
    values = np.rint(shifted * inverse[:, :, None]) + (0 if has_offsets else 8)
    nibbles = values.clip(0, 15).astype(np.uint8)
    return FourBits(nibbles[:, :, : GROUP // 2] | nibbles[:, :, GROUP // 2 :] << 4, scales, offsets)


def check_groups(columns: int) -> None:
    """Raise ModelError where rows of `columns` weights cannot be divided into groups."""
    if columns % GROUP:
        raise ModelError(
            f"int8 and int4 need rows of whole groups of {GROUP} weights, got {columns}; use --dtype bfloat16"
        )
