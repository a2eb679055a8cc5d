"""A GGUF file: architecture, vocabulary, and weights as float32, dequantised by the `gguf` package.

The header is read here, in one pass from front to back; `gguf` only dequantises.
"""

import dataclasses
import math
import mmap
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelError
from holdfast.models.architecture import Architecture, rotary_frequencies

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9  # ggml's numbers for value types
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {0: np.float32, 1: np.float16}  # tensor types that need no dequantisation, by ggml's numbers
_UNQUANTISED = (*_PLAIN, 30)  # and bfloat16
_Q4_0, _Q4_1, _Q4_K = 2, 3, 12
_SUPER_BLOCK = 8  # groups of Q4_K that share a half-precision scale
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# From the Hugging Face names, by which tensors are asked for, to those in the file.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is stored. `shape` is in the file's order: the last number is the number of rows."""

    name: str
    shape: tuple[int, ...]
    kind: int  # of quantisation, by ggml's numbers
    offset: int  # from the start of the file


@dataclasses.dataclass(frozen=True, slots=True)
class FourBits:
    """Weights of four bits in groups of 32 along a row: scale * nibble + offset. In Q4_0, offset is -8 * scale."""

    nibbles: NDArray[np.uint8]  # [out, in / 32, 16]: the first 16 of a group in the low halves, the others in the high
    scales: NDArray[np.float16]  # [out, in / 32]
    offsets: NDArray[np.float16] | None  # the same; None: -8 * scale

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups, half = self.nibbles.shape
        return rows, groups * half * 2

    def __getitem__(self, rows: slice) -> "FourBits":
        offsets = self.offsets if self.offsets is None else self.offsets[rows]
        return FourBits(self.nibbles[rows], self.scales[rows], offsets)

    def given_offsets(self) -> NDArray[np.float16]:
        return self.scales * np.float16(-8) if self.offsets is None else self.offsets

    def restored(self) -> NDArray[np.float32]:
        """The float weights that these stand for."""
        values = np.concatenate((self.nibbles & 15, self.nibbles >> 4), axis=2).astype(np.float32)
        scales = self.scales.astype(np.float32)[:, :, None]
        offsets = self.given_offsets().astype(np.float32)[:, :, None]
        weights: NDArray[np.float32] = (values * scales + offsets).reshape(len(values), -1)
        return weights


class GGUFFile:
    """An open GGUF file. Opening checks that it is complete; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise ModelError(f"{path} is not a GGUF file")
                (version,) = struct.unpack("<I", file.read(4))
                if version not in VERSIONS:
                    raise ModelError(f"{path} has GGUF version {version}, which is not supported; supported: 2 and 3")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    self._values, self._tensors = _HeaderReader(content).read()
            self._bytes = np.memmap(path, np.uint8, "r")
            ends = [place.offset + math.prod(_stored_shape(place)) for place in self._tensors.values()]
        except ImportError as exc:
            raise ModelError("reading GGUF files needs the gguf package: pip install gguf") from exc
        except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error, MemoryError) as exc:
            raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc
        if any(end > len(self._bytes) for end in ends):
            raise ModelError(f"{path} is truncated: its tensors reach past the end of the file; download it again")

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value stored under `key`."""
        return self._values.get(key, default)

    def _required(self, key: str) -> Any:
        value = self.value(key)
        if value is None:
            raise ModelError(f"{self.path} lacks the GGUF key {key!r}")
        return value

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding; without that tensor, the number of texts in the vocabulary."""
        if place := self._tensors.get("token_embd.weight"):
            return int(place.shape[1])
        return len(self._required("tokenizer.ggml.tokens"))

    @property
    def context(self) -> int | None:
        context = self.value(f"{self.value('general.architecture')}.context_length")
        return context if isinstance(context, int) and context > 0 else None

    @cached_property
    def architecture(self) -> Architecture:
        kind = self._required("general.architecture")
        if kind not in _FAMILIES:
            supported = ", ".join(_FAMILIES)
            raise ModelError(f"{self.path}: GGUF architecture {kind!r} is not supported; supported: {supported}")
        try:
            return self._architecture(kind)
        except (TypeError, ValueError, ZeroDivisionError) as exc:  # a list where a number is expected, or zero heads
            raise ModelError(f"{self.path} has an invalid value in its header: {exc}") from exc

    def _architecture(self, kind: str) -> Architecture:
        if "token_embd.weight" not in self._tensors:
            raise ModelError(f"{self.path} lacks the tensor token_embd.weight")
        num_heads = int(self._required(f"{kind}.attention.head_count"))
        hidden_size = int(self._required(f"{kind}.embedding_length"))
        head_dim = int(self.value(f"{kind}.attention.key_length", hidden_size // num_heads))
        if int(self.value(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
            raise ModelError(f"{self.path}: partial rotary embeddings are not supported")
        return Architecture(
            family=_FAMILIES[kind],
            vocab_size=self.vocab_size,
            hidden_size=hidden_size,
            mlp_size=int(self._required(f"{kind}.feed_forward_length")),
            num_layers=int(self._required(f"{kind}.block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self.value(f"{kind}.attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            norm_epsilon=float(self._required(f"{kind}.attention.layer_norm_rms_epsilon")),
            context=self._trained_context(kind),
            inverse_frequencies=self._frequencies(kind, head_dim),
            has_qkv_bias="blk.0.attn_q.bias" in self._tensors,
            has_qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            has_tied_embeddings="output.weight" not in self._tensors,
        )

    def _trained_context(self, kind: str) -> int:
        context = int(self._required(f"{kind}.context_length"))
        return min(context, int(self.value(f"{kind}.attention.sliding_window") or context))

    def _frequencies(self, kind: str, head_dim: int) -> tuple[float, ...]:
        scaling = self.value(f"{kind}.rope.scaling.type", "none")
        base = float(self.value(f"{kind}.rope.freq_base", 10000.0))
        if scaling == "linear":
            factor = float(self._required(f"{kind}.rope.scaling.factor"))
            return rotary_frequencies(head_dim, base, {"rope_type": "linear", "factor": factor})
        if scaling != "none":
            raise ModelError(f"{self.path}: rotary scaling {scaling!r} is not supported; supported: none, linear")
        plain = rotary_frequencies(head_dim, base)
        if "rope_freqs.weight" not in self._tensors:
            return plain
        # Llama 3's scaling is stored as one divisor per frequency.
        divisors = self._dequantised(self._tensors["rope_freqs.weight"]).astype(np.float64)
        return tuple(float(f) for f in np.asarray(plain) / divisors)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def _stored_name(self, name: str) -> str:
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            return f"blk.{layer}.{_NAMES[part]}.{kind}"
        return f"{_NAMES[stem]}.{kind}"

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The weight with the Hugging Face name `name`, dequantised, its rows in Hugging Face's order."""
        return self._unpermuted(name, self._dequantised(self._place(name)))

    def _place(self, name: str) -> TensorPlace:
        place = self._tensors.get(self._stored_name(name))
        if place is None:
            raise ModelError(f"{self.path} lacks the tensor {self._stored_name(name)}")
        return place

    def is_quantised(self, name: str) -> bool:
        return self._place(name).kind not in _UNQUANTISED

    def four_bits(self, name: str) -> FourBits | None:
        """The matrix with the Hugging Face name `name` as stored in Q4_0 or Q4_1, or from Q4_K with the scales of its
        groups rounded to half precision; None for other types."""
        place = self._place(name)
        if place.kind not in (_Q4_0, _Q4_1, _Q4_K) or len(place.shape) != 2:
            return None
        inputs, rows = place.shape
        num_bytes = math.prod(_stored_shape(place))
        stored = self._bytes[place.offset : place.offset + num_bytes].reshape(rows, -1)
        read = _read_q4_k if place.kind == _Q4_K else _read_q4
        nibbles, *halves = read(stored, inputs // 32)
        parts = [self._unpermuted(name, part) for part in (nibbles, *halves)]
        return FourBits(parts[0], parts[1], parts[2] if len(parts) > 2 else None)

    def _dequantised(self, place: TensorPlace) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind, shape = GGMLQuantizationType(place.kind), _stored_shape(place)
        stored = self._bytes[place.offset : place.offset + math.prod(shape)].reshape(shape)
        if kind in _PLAIN:
            stored = stored.view(_PLAIN[kind])
        try:
            weight: NDArray[np.float32] = dequantize(stored, kind).astype(np.float32)
        except NotImplementedError as exc:
            raise ModelError(f"{self.path}: quantisation {kind.name} is not supported") from exc
        return weight.reshape(tuple(reversed(place.shape)))

    def _unpermuted(self, name: str, weight: NDArray[Any]) -> NDArray[Any]:
        """Undo llama files' order of q and k, in which the two halves of every rotary pair are interleaved."""
        is_query, is_key = ".q_proj." in name, ".k_proj." in name
        if not (is_query or is_key) or self.value("general.architecture") != "llama":
            return weight
        num_heads = self.architecture.num_heads if is_query else self.architecture.num_kv_heads
        halves = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)


def _read_q4(stored: NDArray[np.uint8], num_groups: int) -> list[NDArray[Any]]:
    """The nibbles and the scales of Q4_0 or Q4_1, of the latter also the offsets: stored is [out, bytes]."""
    groups = stored.reshape(len(stored), num_groups, -1)
    head = groups.shape[2] - 16
    halves = np.ascontiguousarray(groups[:, :, :head]).view(np.float16)
    return [groups[:, :, head:], *(halves[:, :, index] for index in range(head // 2))]


def _read_q4_k(stored: NDArray[np.uint8], num_groups: int) -> list[NDArray[Any]]:
    """The nibbles, scales and offsets of Q4_K. A super-block has two half-precision scales, 8 pairs of 6-bit numbers in
    12 bytes, and for every two groups 32 bytes: the low halves are the first group, the high halves the second."""
    rows = len(stored)
    blocks = stored.reshape(rows, num_groups // _SUPER_BLOCK, -1)
    halves = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float32)
    packed = blocks[:, :, 4:16]
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    sizes = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=2)
    shifts = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=2)
    scales = (halves[:, :, :1] * sizes).astype(np.float16)
    offsets = (-halves[:, :, 1:] * shifts).astype(np.float16)
    two = blocks[:, :, 16:].reshape(rows, -1, 2, 16)  # [out, pairs of groups, halves of a group, 16]
    low, high = two & 15, two >> 4
    nibbles = np.stack((low[:, :, 0] | low[:, :, 1] << 4, high[:, :, 0] | high[:, :, 1] << 4), axis=2)
    return [nibbles.reshape(rows, num_groups, 16), scales.reshape(rows, -1), offsets.reshape(rows, -1)]


def _stored_shape(place: TensorPlace) -> tuple[int, ...]:
    """The shape of the stored bytes, as `dequantize` expects it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
    *others, row = reversed(place.shape)
    if row % block:
        raise ValueError(f"tensor {place.name} has rows of {row} values, not a multiple of the block size {block}")
    return (*others, row // block * num_bytes)


class _HeaderReader:
    """Reads what follows the version in a header. Raises ValueError or struct.error where it is damaged."""

    def __init__(self, content: "mmap.mmap") -> None:
        self._content = content
        self._at = len(MAGIC) + 4

    def read(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        """The metadata values by key, and the tensors by name."""
        num_tensors, num_values = self._numbers("<QQ")
        values = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._numbers("<I")[0])
        stored = [self._tensor() for _ in range(num_tensors)]
        alignment = int(values.get("general.alignment", _ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        return values, {place.name: dataclasses.replace(place, offset=start + place.offset) for place in stored}

    def _tensor(self) -> TensorPlace:
        """With the offset as stored: from the end of the header."""
        name = self._string()
        (num_dimensions,) = self._numbers("<I")
        shape = self._numbers(f"<{num_dimensions}Q")
        kind, offset = self._numbers("<IQ")
        return TensorPlace(name, shape, kind, offset)

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
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, num: int) -> bytes:
        end = self._at + num
        if end > len(self._content):
            raise ValueError("the file ends inside its header")
        part = self._content[self._at : end]
        self._at = end
        return part


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind} in the header")
    return _SCALARS[kind]
