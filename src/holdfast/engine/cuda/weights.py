"""A decoder's weights on the device, in the form that the kernels read."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.engine.torch.weights import DecoderWeights, LayerWeights, TensorReader, WeightLoader
from holdfast.errors import ModelError
from holdfast.models import Architecture

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of its values
_UNIT = 16  # library products of fp8 take numbers of rows and columns that are multiples of this


@dataclass(frozen=True, slots=True)
class Matrix:
    """[out, in] weights; those in fp8 come with a float32 scale for each output, [out]."""

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


CudaLayer = LayerWeights[Matrix]


@dataclass(frozen=True, slots=True)
class CudaWeights(DecoderWeights[Matrix]):
    """Embedding and head are never fp8: a lookup reads only one row, and an error of the head is one of the logits."""

    @property
    def num_bytes_per_step(self) -> int:
        """The bytes that one decoding step reads: every matrix once."""
        return self.head.num_bytes + sum(matrix.num_bytes for layer in self.layers for matrix in layer.matrices)


def load_cuda_weights(reader: TensorReader, arch: Architecture, *, dtype: str, device: torch.device) -> CudaWeights:
    """All weights on `device`. fp8 is rounded there from float32, one layer at a time."""
    is_fp8 = dtype == "fp8"
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    loader = WeightLoader(reader, arch, dtype=plain, device=device)
    layers = WeightLoader(reader, arch, dtype=torch.float32, device=device) if is_fp8 else loader
    embedding = loader.embedding()

    def layer(index: int) -> CudaLayer:
        read = layers.layer(index).converted(rounded if is_fp8 else Matrix)
        return replace(read, qkv_bias=None if read.qkv_bias is None else read.qkv_bias.to(plain).float())

    return CudaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(arch.num_layers)),
        norm=loader.norm(),
        head=Matrix(embedding if arch.has_tied_embeddings else loader.head()),
    )


def overwrite(held: Tensor | Matrix, first: int, tensor: Tensor) -> None:
    """Write rows from `first` on: the bits that `load_cuda_weights` gives, at the address where the old ones were."""
    rows = slice(first, first + len(tensor))
    if isinstance(held, Tensor):
        held[rows].copy_(tensor)
    elif held.scales is None:
        held.values[rows].copy_(tensor)
    else:
        fresh = rounded(tensor.to(held.values.device))
        assert fresh.scales is not None
        held.values[rows].copy_(fresh.values)
        held.scales[rows].copy_(fresh.scales)


def rounded(weight: Tensor) -> Matrix:
    """In fp8 (e4m3), every row scaled so that its largest weight is the largest number of that type."""
    if weight.shape[0] % _UNIT or weight.shape[1] % _UNIT:
        sizes = " x ".join(map(str, weight.shape))
        raise ModelError(
            f"dtype fp8 needs matrices whose sizes are multiples of {_UNIT}, and this model has one of {sizes}; "
            "use --dtype bfloat16"
        )
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / LARGEST
    inverse = torch.where(scales > 1e-30, 1 / scales, 0.0)
    return Matrix((weight * inverse[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scales)
