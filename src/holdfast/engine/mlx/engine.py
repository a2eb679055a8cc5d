"""The engine on MLX.

MLX is lazy, and what it has not computed yet belongs to the thread that asked for it. Every call here therefore ends
with `mx.eval`, so that a model can be loaded on one thread and used on another.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from holdfast.engine.batch import pack
from holdfast.engine.interface import Engine, KeysValues, Row, engine_info
from holdfast.engine.mlx.decoder import MLXSlabAttention, SlabArrays, gather, load_decoder, scatter
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.weights import WeightSource, open_weights
from holdfast.models import Architecture, ModelSource

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_CACHE_BYTES = 256 << 20


class MLXEngine(Engine):
    """A decoder and its slabs on MLX's default device."""

    def __init__(
        self,
        name: str,
        arch: Architecture,
        weights: WeightSource,
        *,
        digest: str,
        num_slabs: int,
        shape: SlabShape,
        dtype: str = "float32",
    ) -> None:
        info = engine_info(name, arch, digest=digest, dtype=dtype, shape=shape)
        super().__init__(info, shape=shape, num_slabs=num_slabs)
        self._decoder = load_decoder(weights, arch, dtype=_DTYPES[dtype])
        cells = (arch.num_kv_heads, shape.capacity, arch.head_dim)
        self._slabs = SlabArrays(num_slabs, arch.num_layers, cells, _DTYPES[dtype])

    @property
    def kv_reserved_bytes(self) -> int:
        return self._slabs.num_bytes

    def forward(self, rows: Sequence[Row]) -> mx.array:
        packed = pack(rows)
        logits = self._decoder.forward(packed, MLXSlabAttention(self._slabs, packed.rows))
        mx.eval(logits, self._slabs.of(row.slot for row in packed.rows))
        return logits

    def read_logits(self, logits: mx.array) -> NDArray[np.float32]:
        return np.array(logits)

    def copy_slab(self, source: Slab, target: Slab) -> None:
        for slabs in (self._slabs.keys, self._slabs.values):
            slabs[target.slot] = [mx.array(array) for array in slabs[source.slot]]
        mx.eval(self._slabs.of([target.slot]))

    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        keys, values = (
            _to_bits(gather(slabs[slab.slot], slab, positions)) for slabs in (self._slabs.keys, self._slabs.values)
        )
        return KeysValues(keys, values)

    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        for slabs, bits in zip((self._slabs.keys, self._slabs.values), kv, strict=True):
            scatter(slabs[slab.slot], slab, positions, mx.array(bits).view(_DTYPES[self.info.kv_dtype]))
        mx.eval(self._slabs.of([slab.slot]))

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._decoder.shapes()

    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        self._decoder.write(name, tensor)

    def is_fatal(self, error: Exception) -> bool:
        """A failed Metal command buffer cannot be recovered; running out of memory before one is sent can."""
        return isinstance(error, RuntimeError) and str(error).startswith("[METAL]")

    def clear_slab(self, slab: Slab) -> None:
        for slabs in (self._slabs.keys, self._slabs.values):
            slabs[slab.slot] = [mx.zeros_like(array) for array in slabs[slab.slot]]
        mx.eval(self._slabs.of([slab.slot]))


def _to_bits(array: mx.array) -> NDArray[np.generic]:
    """A copy on the host, bfloat16 as 16-bit integers."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def load_engine(source: ModelSource, *, num_slabs: int, shape: SlabShape, dtype: str = "float32") -> MLXEngine:
    """The engine for a model on disk. Blocks for seconds."""
    # How much of freed buffers MLX keeps, for the whole process; the default is as much as there is memory.
    mx.set_cache_limit(_CACHE_BYTES)
    return MLXEngine(
        source.name,
        source.architecture,
        open_weights(source, for_mlx=True),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
    )
