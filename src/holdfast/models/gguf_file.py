"""A GGUF file: architecture, vocabulary, and weights as float32, dequantised by the `gguf` package."""

import math
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelError
from holdfast.models.architecture import Architecture, rotary_frequencies
from holdfast.models.gguf_header import MAGIC, TensorPlace, read_header

_PLAIN = {0: np.float32, 1: np.float16}  # what needs no dequantising, by ggml's numbers
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Hugging Face's names on the left are the ones that the loader asks for.
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


class GGUFFile:
    """An open GGUF file. Opening checks that it is whole; weights are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                magic = stream.read(4)
            if magic != MAGIC:
                raise ModelError(f"{path} is not a GGUF file")
            header = read_header(path)
            self._facts, self._tensors = header.facts, header.tensors
            self._bytes = np.memmap(path, np.uint8, "r")
            ends = [place.offset + math.prod(_stored_shape(place)) for place in self._tensors.values()]
        except ImportError as exc:
            raise ModelError("reading GGUF files needs the gguf package: pip install gguf") from exc
        except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error, MemoryError) as exc:
            raise ModelError(f"{path} is truncated or damaged; download it again ({exc})") from exc
        if any(end > len(self._bytes) for end in ends):
            raise ModelError(f"{path} is truncated: its tensors reach past the end of the file")

    def value(self, key: str, default: Any = None) -> Any:
        return self._facts.get(key, default)

    def _required(self, key: str) -> Any:
        value = self.value(key)
        if value is None:
            raise ModelError(f"{self.path} lacks the GGUF key {key!r}")
        return value

    @cached_property
    def architecture(self) -> Architecture:
        kind = self._required("general.architecture")
        if kind not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ModelError(f"{self.path}: GGUF architecture {kind!r} is not supported; known: {known}")
        try:
            return self._architecture(kind)
        except (TypeError, ValueError, ZeroDivisionError) as exc:  # lists where one number is expected, zeros
            raise ModelError(f"{self.path} has a value that is not supported: {exc}") from exc

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
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
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
            raise ModelError(f"{self.path}: rotary scaling {scaling!r} is not supported; known: none, linear")
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
        """The weight with Hugging Face name `name`, dequantised, rows in Hugging Face's order."""
        place = self._tensors.get(self._stored_name(name))
        if place is None:
            raise ModelError(f"{self.path} lacks the tensor {self._stored_name(name)}")
        return self._unpermuted(name, self._dequantised(place))

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

    def _unpermuted(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """llama files interleave the two halves of every rotary pair in q and k; undo that."""
        is_query, is_key = ".q_proj." in name, ".k_proj." in name
        if not (is_query or is_key) or self.value("general.architecture") != "llama":
            return weight
        num_heads = self.architecture.num_heads if is_query else self.architecture.num_kv_heads
        halves = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)


def _stored_shape(place: TensorPlace) -> tuple[int, ...]:
    """Rows of bytes, as `dequantize` takes them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
    *others, row = reversed(place.shape)
    if row % block:
        raise ValueError(f"the tensor {place.name} has rows of {row}, no whole blocks of {block}")
    return (*others, row // block * num_bytes)
