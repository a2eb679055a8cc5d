"""A decoder's weights on the device, in the form that the kernels read."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.engine.torch.weights import DecoderWeights, LayerWeights, TensorReader, WeightLoader
from holdfast.engine.weights import GROUP, check_groups
from holdfast.models import Architecture


@dataclass(frozen=True, slots=True)
class Matrix:
    """[out, in] weights; int8 weights come with the float16 scales of their groups, [out, in / 32]."""

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
    """The embedding is never int8: a lookup reads only one row."""

    @property
    def num_bytes_per_step(self) -> int:
        """The bytes that one decoding step reads: every matrix once."""
        return self.head.num_bytes + sum(matrix.num_bytes for layer in self.layers for matrix in layer.matrices)


def load_cuda_weights(reader: TensorReader, arch: Architecture, *, dtype: str, device: torch.device) -> CudaWeights:
    """All weights on `device`. int8 is quantised there from float32, one layer at a time."""
    is_int8 = dtype == "int8"
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    loader = WeightLoader(reader, arch, dtype=torch.float32 if is_int8 else plain, device=device)
    embedding = WeightLoader(reader, arch, dtype=plain, device=device).embedding()

    def matrix(weight: Tensor) -> Matrix:
        return quantised(weight) if is_int8 else Matrix(weight)

    def layer(index: int) -> CudaLayer:
        read = loader.layer(index).converted(matrix)
        return replace(read, qkv_bias=None if read.qkv_bias is None else read.qkv_bias.float())

    is_shared = arch.has_tied_embeddings and not is_int8
    return CudaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(arch.num_layers)),
        norm=loader.norm(),
        head=Matrix(embedding) if is_shared else matrix(loader.head()),
    )


def overwrite(held: Tensor | Matrix, first: int, tensor: Tensor) -> None:
    """Write rows from `first` on: the bits that `load_cuda_weights` gives, at the address where the old ones were."""
    rows = slice(first, first + len(tensor))
    if isinstance(held, Tensor):
        held[rows].copy_(tensor)
    elif held.scales is None:
        held.values[rows].copy_(tensor)
    else:
        fresh = quantised(tensor.to(held.values.device))
        assert fresh.scales is not None
        held.values[rows].copy_(fresh.values)
        held.scales[rows].copy_(fresh.scales)


def quantised(weight: Tensor) -> Matrix:
    """The same bits as `engine.weights.quantise` gives on the host."""
    rows, columns = weight.shape
    check_groups(columns)
    groups = weight.float().view(rows, -1, GROUP)
    scales = groups.abs().amax(dim=2) / 127.0
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    values = torch.round(groups * inverse[:, :, None]).to(torch.int8).view(rows, columns)
    return Matrix(values, scales.half())
