"""The engine protocol on PyTorch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.batch import pack
from holdfast.engine.description import engine_info
from holdfast.engine.interface import EngineInfo, KeysValues, Row
from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.torch.attention import SlabTensors, TorchSlabAttention
from holdfast.engine.torch.decoder import TorchDecoder
from holdfast.engine.torch.weights import TensorReader, load_weights, reader_for
from holdfast.errors import InvalidArgument, NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.models import Architecture, ModelSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine:
    """A decoder and its slabs on one device."""

    def __init__(
        self,
        name: str,
        arch: Architecture,
        reader: TensorReader,
        *,
        digest: str,
        num_slabs: int,
        shape: SlabShape,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        self._info = engine_info(name, arch, digest=digest, dtype=dtype, shape=shape)
        self._device = torch.device(device)
        self._shape = shape
        self._num_slabs = num_slabs
        self._decoder = TorchDecoder(arch, load_weights(reader, arch, dtype=_DTYPES[dtype], device=self._device))
        cells = (arch.num_layers, num_slabs, arch.num_kv_heads, shape.capacity, arch.head_dim)
        self._slabs = SlabTensors(cells, _DTYPES[dtype], self._device)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def shape(self) -> SlabShape:
        return self._shape

    @property
    def num_slabs(self) -> int:
        return self._num_slabs

    @property
    def kv_reserved_bytes(self) -> int:
        return self._slabs.num_bytes

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        packed = pack(rows)
        return self._decoder.forward(packed, TorchSlabAttention(self._slabs, packed.rows))

    def read_logits(self, logits: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = logits.float().cpu().numpy()
        return array

    def sample(self, logits: Tensor, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        return sample_rows(self.read_logits(logits), picks)

    @torch.inference_mode()
    def copy_slab(self, source: Slab, target: Slab) -> None:
        self._slabs.copy(source, target)

    @torch.inference_mode()
    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return self._slabs.read(slab, positions)

    @torch.inference_mode()
    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        self._slabs.write(slab, positions, kv)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)  # a CUDA context does not recover; running out of memory does

    @torch.inference_mode()
    def clear_slab(self, slab: Slab) -> None:
        self._slabs.clear(slab)


def load_engine(
    source: ModelSource, *, num_slabs: int, shape: SlabShape, dtype: str = "float32", device: str = "auto"
) -> TorchEngine:
    """The engine for a model on disk. Blocks for seconds; `device` auto means CUDA where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidArgument("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    return TorchEngine(
        source.name,
        source.architecture,
        reader_for(source),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        device=device,
    )
