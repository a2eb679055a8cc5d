"""The header of a GGUF file: its facts, and where its tensors lie. Read in one pass, strings and all."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file. `shape` is as stored: the last number is that of the rows."""

    name: str
    shape: tuple[int, ...]
    kind: int  # of quantisation, as ggml numbers them
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    facts: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Raises ValueError, IndexError or struct.error where the file is not what it should be."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _HeaderReader(content).header()


class _HeaderReader:
    """Goes through the bytes from front to back."""

    def __init__(self, content: "mmap.mmap") -> None:
        self._content = content
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_facts = self._numbers("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; known: 2 and 3")
        facts = {}
        for _ in range(num_facts):
            name = self._string()
            facts[name] = self._value(self._numbers("<I")[0])
        stored = [self._tensor() for _ in range(num_tensors)]
        alignment = int(facts.get("general.alignment", _ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors = {name: TensorPlace(name, shape, kind, start + offset) for name, shape, kind, offset in stored}
        return GGUFHeader(facts, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._numbers("<I")
        shape = self._numbers(f"<{num_dimensions}Q")
        kind, offset = self._numbers("<IQ")
        return name, shape, kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._numbers("<" + _scalar(kind))[0]

    def _array(self) -> list[Any]:
        kind, length = self._numbers("<IQ")
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        dtype = np.dtype("<" + _scalar(kind))
        values: list[Any] = np.frombuffer(self._bytes(length * dtype.itemsize), dtype).tolist()
        return values

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        return self._bytes(length).decode("utf-8")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        return struct.unpack(form, self._bytes(size))

    def _bytes(self, num: int) -> bytes:
        end = self._at + num
        if end > len(self._content):
            raise ValueError("it ends in mid-header")
        part = self._content[self._at : end]
        self._at = end
        return part


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    return _SCALARS[kind]
