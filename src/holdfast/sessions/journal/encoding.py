"""Values to what a database holds, and back, bit for bit; and the sums that tell when it is not so."""

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)
Value = bytes | str | int | float | None

_COPIED_BYTES = 16 * 1024  # what is larger is summed where it lies


def packed(values: "array[int] | array[float]") -> bytes:
    """Little-endian, whatever the machine."""
    if values.typecode not in "id":
        raise TypeError(f"tokens are array('i') and logprobs array('d'), got array({values.typecode!r})")
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = values[:]
    swapped.byteswap()
    return swapped.tobytes()


def tokens_of(data: bytes) -> "array[int]":
    return _unpacked(array("i"), data)


def floats_of(data: bytes) -> "array[float]":
    return _unpacked(array("d"), data)


def _unpacked(values: "array[N]", data: bytes) -> "array[N]":
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def checksum_of(*values: Value) -> int:
    """CRC-32 over the values in order; where one ends and the next begins counts too."""
    checksum = 0
    parts: list[bytes] = []
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        parts.append(b"%b %d " % (type(value).__name__.encode(), len(data)))
        if len(data) > _COPIED_BYTES:
            checksum = zlib.crc32(data, zlib.crc32(b"".join(parts), checksum))
            parts.clear()
        else:
            parts.append(data)
    return zlib.crc32(b"".join(parts), checksum)  # one call for many small values: each lets other threads run


def row_checksum(fields: Sequence[Value], state: Sequence[Value] = ()) -> int:
    """The sum of a row: of what never changes and of what may, so that either can be exchanged without the other."""
    return checksum_of(*fields) ^ checksum_of(*state)
