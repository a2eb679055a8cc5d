"""A decoder's weights on the device, in the form that the kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.engine.quantisation import GROUP
from holdfast.engine.torch.weights import TensorReader, WeightLoader
from holdfast.errors import ModelError
from holdfast.models import Architecture


@dataclass(frozen=True, slots=True)
class Matrix:
    """[out, in] weights; int8 ones come with the float16 scales of their groups, [out, in / 32]."""

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class CudaLayer:
    attention_norm: Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: Matrix  # [hidden, heads * head_dim]
    mlp_norm: Tensor
    gate_up: Matrix  # [2 * mlp, hidden]
    down: Matrix  # [hidden, mlp]


@dataclass(frozen=True, slots=True)
class CudaWeights:
    embedding: Tensor  # [vocabulary, hidden]; never int8: a lookup reads one row
    layers: tuple[CudaLayer, ...]
    norm: Tensor
    head: Matrix  # [vocabulary, hidden]

    @property
    def num_bytes_per_step(self) -> int:
        """What one decode step reads of them: all matrices once."""
        layers = (m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return self.head.num_bytes + sum(matrix.num_bytes for matrix in layers)


def load_cuda_weights(reader: TensorReader, arch: Architecture, *, dtype: str, device: torch.device) -> CudaWeights:
    """All weights on `device`. int8 is quantised there, from float32, a layer at a time."""
    is_int8 = dtype == "int8"
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    loader = WeightLoader(reader, arch, dtype=torch.float32 if is_int8 else plain, device=device)
    embedding = WeightLoader(reader, arch, dtype=plain, device=device).embedding()

    def matrix(weight: Tensor) -> Matrix:
        return quantised(weight) if is_int8 else Matrix(weight)

    def layer(index: int) -> CudaLayer:
        read = loader.layer(index)
        return CudaLayer(
            attention_norm=read.attention_norm,
            qkv=matrix(read.qkv),
            qkv_bias=None if read.qkv_bias is None else read.qkv_bias.float(),
            query_norm=read.query_norm,
            key_norm=read.key_norm,
            output=matrix(read.output),
            mlp_norm=read.mlp_norm,
            gate_up=matrix(read.gate_up),
            down=matrix(read.down),
        )

    is_shared = arch.has_tied_embeddings and not is_int8
    return CudaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(arch.num_layers)),
        norm=loader.norm(),
        head=Matrix(embedding) if is_shared else matrix(loader.head()),
    )


def quantised(weight: Tensor) -> Matrix:
    """`quantisation.quantise` on the device: the same bits."""
    rows, columns = weight.shape
    if columns % GROUP:
        raise ModelError(f"int8 needs rows of whole groups of {GROUP} weights, got {columns}; use --dtype bfloat16")
    groups = weight.float().view(rows, -1, GROUP)
    scales = groups.abs().amax(dim=2) / 127.0
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    values = torch.round(groups * inverse[:, :, None]).to(torch.int8).view(rows, columns)
    return Matrix(values, scales.half())
