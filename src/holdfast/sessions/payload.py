"""Training payloads as upstreams send them: routed experts and indexer choices, text to integers. Pure.

The text is a nested JSON list, base64 of a .npy file (vLLM), or base64 of int32 without a shape (SGLang).
"""

import base64
import binascii
import io
import math
import tokenize
from typing import Any

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_NPY = b"\x93NUMPY"
_NPY_TEXT = base64.b64encode(_NPY)
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_INT32 = np.iinfo(np.int32)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_UNREADABLE = (ValueError, TypeError, KeyError, SyntaxError, EOFError, tokenize.TokenError, RecursionError, MemoryError)


def payload_values(text: str) -> NDArray[np.int32]:
    """The integers of a payload, in its own shape if it has one. Raises ValueError, which says what is wrong."""
    try:
        values = _array(text)
    except _UNREADABLE as exc:
        raise ValueError(f"cannot be read: {exc}") from exc
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"holds {values.dtype}, not integers")
    if values.size and not (_INT32.min <= values.min() and values.max() <= _INT32.max):
        raise ValueError("holds numbers beyond 32 bits")
    return values.astype(np.int32)


def payload_shape(content: bytes) -> tuple[int, ...]:
    """The shape of a payload that is spelled as a JSON list or string; ValueError if it has none.

    Base64 without a shape is checked and counted, not decoded: that takes a tenth of the time.
    """
    if content.startswith(b"["):
        return payload_values(content.decode()).shape
    text = content[1:-1]
    if b"\\" in text:
        text = msgspec.json.decode(content, type=str).encode()
    if text.startswith(_NPY_TEXT):
        return payload_values(text.decode()).shape
    digits = text.removesuffix(b"=").removesuffix(b"=")
    num_bytes = len(digits) * 3 // 4
    if len(text) % 4 or num_bytes % 4 or digits.translate(None, _ALPHABET):
        raise ValueError("cannot be read: it is not base64 of 32-bit integers")
    return (num_bytes // 4,)


def _array(text: str) -> NDArray[Any]:
    if text.startswith("["):
        return np.asarray(msgspec.json.decode(text))
    raw = binascii.a2b_base64(text, strict_mode=True)
    if not raw.startswith(_NPY):
        return np.frombuffer(raw, "<i4")
    file = io.BytesIO(raw)
    shape, is_fortran, dtype = _HEADERS[npy.read_magic(file)](file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(raw) - file.tell():
        raise ValueError("the .npy file is not as long as its header says")
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
