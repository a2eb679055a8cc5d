"""Slabs as the CUDA kernels read them; in fp8 with a byte for each element, and a scale for each key and each value.

A scale belongs to one cell, so it does not depend on the chunks in which a prompt was computed, and nothing is ever
clipped. It is a power of two, so it costs no accuracy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.engine.cuda.weights import FP8
from holdfast.engine.interface import KeysValues
from holdfast.engine.slab import Slab
from holdfast.engine.torch.decoder import SlabTensors, gather, scatter, to_bits

Shape = tuple[int, int, int, int, int]  # layers, slabs, kv_heads, capacity, head_dim


class Cache(NamedTuple):
    """One layer of all slabs: [slabs, kv_heads, capacity, dim], and in fp8 [slabs, kv_heads, capacity] scales."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels take them, which read no scales where there are none."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values, self.keys, self.values
        return self.keys, self.values, self.key_scales, self.value_scales


class CudaSlabs(SlabTensors):
    """Keys and values in the dtype of the activations."""

    def layer(self, index: int) -> Cache:
        return Cache(self.keys[index], self.values[index])


class Fp8Slabs(CudaSlabs):
    """Keys and values in fp8, held as bytes because torch cannot index fp8."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, torch.uint8, device)
        self.key_scales, self.value_scales = torch.zeros(2, *shape[:-1], dtype=torch.bfloat16, device=device)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self.keys, self.values, self.key_scales, self.value_scales

    def layer(self, index: int) -> Cache:
        keys, values = self.keys[index].view(FP8), self.values[index].view(FP8)
        return Cache(keys, values, self.key_scales[index], self.value_scales[index])

    def read(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        """The bytes of each key or value, followed by those of its scale."""

        def together(values: Tensor, scales: Tensor) -> Tensor:
            own = gather(scales[..., None], slab, positions).contiguous().view(torch.uint8)
            return torch.cat([gather(values, slab, positions), own], dim=-1)

        keys, values = together(self.keys, self.key_scales), together(self.values, self.value_scales)
        return KeysValues(to_bits(keys), to_bits(values))

    def write(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        dim = self.keys.shape[-1]
        for values, scales, bits in zip(self._tensors[:2], self._tensors[2:], kv, strict=True):
            content = torch.from_numpy(bits).view(torch.uint8).to(values.device)
            scatter(values, slab, positions, content[..., :dim])
            scatter(scales[..., None], slab, positions, content[..., dim:].contiguous().view(torch.bfloat16))
