"""A decoder's weights in the blocks that the native code reads: 16 outputs side by side for every input."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.quantisation import GROUP, quantise
from holdfast.errors import ModelError
from holdfast.models import Architecture

LANES = 16

Floats = NDArray[np.float32]
Bits = NDArray[np.uint8]


class TensorReader(Protocol):
    """Weights by their Hugging Face names."""

    def read(self, name: str) -> Floats: ...


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def pack_matrix(weight: Floats, dtype: str) -> Bits:
    """[blocks, bytes], an even number of blocks; what is beyond the last output is zero."""
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
    """Sixteen rows of one, sixteen of the other, and so on, each padded with zeros to whole blocks."""
    size, inputs = gate.shape
    both = np.zeros((-(-size // LANES), 2, LANES, inputs), np.float32)
    for index, part in enumerate((gate, up)):
        padded = np.zeros((both.shape[0] * LANES, inputs), np.float32)
        padded[:size] = part
        both[:, index] = padded.reshape(-1, LANES, inputs)
    return both.reshape(-1, inputs)


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """Reads, checks and packs the weights of one model, one named array after the other."""

    reader: TensorReader
    arch: Architecture
    dtype: str

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All of them: matrices as blocks of bits, vectors as float32."""
        arch = self.arch
        arrays: dict[str, NDArray[np.generic]] = {
            "norm": self._read("model.norm.weight", arch.hidden_size),
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
            "attention_norm": self._read(f"{at}.input_layernorm.weight", hidden),
            "mlp_norm": self._read(f"{at}.post_attention_layernorm.weight", hidden),
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
            layer |= {f"{n}_norm": self._read(f"{at}.self_attn.{n[0]}_norm.weight", dim) for n in ("query", "key")}
        return layer

    def _matrix(self, name: str, *shape: int) -> Bits:
        return self._packed(self._read(name, *shape))

    def _packed(self, weight: Floats) -> Bits:
        return pack_matrix(weight, self.dtype)

    def _read(self, name: str, *shape: int) -> Floats:
        tensor = np.ascontiguousarray(self.reader.read(name), np.float32)
        if tensor.shape != shape:
            raise ModelError(f"tensor {name} has shape {tensor.shape}, expected {shape}")
        return tensor
