"""The engine on PyTorch, and what it shares with the CUDA engine: slabs that are torch tensors."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engine.batch import pack
from holdfast.engine.interface import Engine, EngineInfo, KeysValues, Row, engine_info
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.torch.decoder import SlabTensors, TorchDecoder, TorchSlabAttention
from holdfast.engine.torch.weights import TensorReader, from_numpy, load_weights, tensor_places
from holdfast.engine.weights import decoder_shapes, open_weights
from holdfast.errors import InvalidArgument
from holdfast.models import Architecture, ModelSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TensorEngine(Engine):
    """An engine whose slabs are torch tensors; a subclass adds the forward."""

    def __init__(self, info: EngineInfo, *, shape: SlabShape, num_slabs: int, device: torch.device) -> None:
        super().__init__(info, shape=shape, num_slabs=num_slabs)
        self._device = device
        cells = (info.num_layers, num_slabs, info.num_kv_heads, shape.capacity, info.head_dim)
        self._slabs = self._new_slabs(cells)

    def _new_slabs(self, cells: tuple[int, int, int, int, int]) -> SlabTensors:
        return SlabTensors(cells, DTYPES[self.info.kv_dtype], self._device)

    @property
    def kv_reserved_bytes(self) -> int:
        return self._slabs.num_bytes

    def read_logits(self, logits: Tensor) -> NDArray[np.float32]:
        array: NDArray[np.float32] = logits.float().cpu().numpy()
        return array

    @torch.inference_mode()
    def copy_slab(self, source: Slab, target: Slab) -> None:
        self._slabs.copy(source, target)

    @torch.inference_mode()
    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return self._slabs.read(slab, positions)

    @torch.inference_mode()
    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        self._slabs.write(slab, positions, kv)

    @torch.inference_mode()
    def clear_slab(self, slab: Slab) -> None:
        self._slabs.clear(slab)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)  # a CUDA context does not recover; running out of memory does


class TorchEngine(TensorEngine):
    """A decoder and its slabs on the CPU or on CUDA."""

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
        info = engine_info(name, arch, digest=digest, dtype=dtype, shape=shape)
        place = torch.device(device)
        weights = load_weights(reader, arch, dtype=DTYPES[dtype], device=place)
        self._decoder = TorchDecoder(arch, weights)
        self._shapes, self._places = decoder_shapes(arch), tensor_places(weights, arch)
        super().__init__(info, shape=shape, num_slabs=num_slabs, device=place)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @torch.inference_mode()
    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        for held, first in self._places[name]:
            held[first : first + len(tensor)].copy_(from_numpy(tensor))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        packed = pack(rows)
        return self._decoder.forward(packed, TorchSlabAttention(self._slabs, packed.rows))


def require_cuda() -> None:
    if not torch.cuda.is_available():
        raise InvalidArgument("device cuda is not available: torch finds no CUDA device; use --device cpu")


def load_engine(
    source: ModelSource, *, num_slabs: int, shape: SlabShape, dtype: str = "float32", device: str = "cpu"
) -> TorchEngine:
    """The engine for a model on disk. Blocks for seconds."""
    if device.startswith("cuda"):
        require_cuda()
    return TorchEngine(
        source.name,
        source.architecture,
        open_weights(source),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        device=device,
    )
