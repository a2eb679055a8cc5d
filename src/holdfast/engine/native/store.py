"""Where weights come from, and where their packed form is kept so that the next start is quick."""

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.native.weights import TensorReader, WeightPacker
from holdfast.errors import ModelError
from holdfast.models import GGUFSource, HFSource, ModelSource

FORMAT = "blocks-of-16/1"

logger = logging.getLogger(__name__)

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


class TensorFile:
    """A safetensors file, mapped: nothing is read before it is used."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            self._bytes = np.memmap(path, np.uint8, "r", offset=8 + size)
            self.facts: dict[str, str] = header.pop("__metadata__", {})
            self._entries = header
            for entry in header.values():
                if entry["data_offsets"][1] > len(self._bytes):
                    raise ValueError("its tensors reach past the end of the file")
        except (OSError, ValueError, KeyError, TypeError, struct.error) as exc:
            raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def checksum(self) -> int:
        """Over all tensors. Reads the whole file."""
        return zlib.crc32(self._bytes.data)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {name: self.array(name) for name in self._entries}

    def array(self, name: str) -> NDArray[np.generic]:
        """As stored; bfloat16 as 16-bit integers."""
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(f"tensor {name} has the type {entry['dtype']}; known: {', '.join(_DTYPES)}")
        first, last = entry["data_offsets"]
        found: NDArray[np.generic] = self._bytes[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return found

    def read(self, name: str) -> NDArray[np.float32]:
        stored = self.array(name)
        if self._entries[name]["dtype"] == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)


class GGUFReader:
    def __init__(self, source: GGUFSource) -> None:
        self._file = source.file

    def read(self, name: str) -> NDArray[np.float32]:
        return self._file.tensor(name)


class CheckpointReader:
    """The files of a Hugging Face directory."""

    def __init__(self, source: HFSource) -> None:
        if (source.read_json("config.json") or {}).get("quantization"):
            raise ModelError(f"{source.path} is quantised for MLX; use --device mlx, or the model it was made from")
        self._where = source.path
        self._files = [TensorFile(path) for path in source.weight_files]

    def read(self, name: str) -> NDArray[np.float32]:
        for file in self._files:
            if name in file:
                return file.read(name)
        raise ModelError(f"{self._where} lacks the tensor {name}")


def reader_for(source: ModelSource) -> TensorReader:
    return GGUFReader(source) if isinstance(source, GGUFSource) else CheckpointReader(source)


def packed_weights(source: ModelSource, reader: TensorReader, dtype: str) -> Mapping[str, NDArray[np.generic]]:
    """From the cache where they are there, else packed now and kept; a cache that cannot be written is no error."""
    path = cache_directory() / "weights" / f"{source.digest}-{dtype}.safetensors"
    facts = {"format": FORMAT, "digest": source.digest, "dtype": dtype}
    if path.exists():
        try:
            file = TensorFile(path)
            if file.facts == facts | {"crc32": str(file.checksum())}:
                return file.arrays()
            logger.warning("%s is not what was written there; the weights are packed again", path)
        except ModelError as exc:
            logger.warning("the weights are packed again: %s", exc)
    arrays = WeightPacker(reader, source.architecture, dtype).arrays()
    try:
        _write(path, arrays, facts)
    except OSError as exc:
        logger.warning("the packed weights could not be kept, so every start packs them again: %s", exc)
    return arrays


def cache_directory() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "holdfast"


def _write(path: Path, arrays: Mapping[str, NDArray[np.generic]], facts: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all; every tensor begins at a multiple of 64 bytes."""
    checksum = 0
    for array in arrays.values():
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    entries: dict[str, object] = {"__metadata__": {**facts, "crc32": str(checksum)}}
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
