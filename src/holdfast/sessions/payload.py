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

from holdfast.errors import ConfigError

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


def parse_expert_shape(text: str) -> tuple[int, int] | None:
    """Layers and experts per token from `LAYERS,TOPK`; None for an empty text. Raises ConfigError for anything else."""
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and 0 < int(part) < 1 << 16 for part in parts):
        raise ConfigError(f"routed_experts_shape must be LAYERS,TOPK, such as 48,8, got {text!r}")
    return int(parts[0]), int(parts[1])


def expert_rows(
    row: tuple[int, ...], *, shape: tuple[int, int] | None = None, routing: tuple[int, int, int] | None = None
) -> tuple[int, ...]:
    """The shape of a position's routed experts, of which `row` is known: flat or as layers and experts per token.

    `shape` is how it must be; `routing` are the layers that route, their experts per token, and all layers, of which a
    server counts the one or the other. Raises ValueError where the row is neither.
    """
    top_k = shape[1] if shape else routing[1] if routing else None
    found = (row[0] // top_k, top_k) if top_k and len(row) == 1 else row
    if math.prod(found) != math.prod(row) or (shape and found != shape):
        told = f"{shape[0]} layers with {shape[1]} experts each" if shape else f"layers with {top_k} experts each"
        raise ValueError(f"has {list(row)} values for each token, which are not {told}")
    if routing and not shape and (found[-1] != routing[1] or found[0] not in (routing[0], routing[2])):
        raise ValueError(
            f"has {list(row)} values for each token; {routing[0]} of {routing[2]} layers route to {routing[1]} experts"
        )
    return found


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
