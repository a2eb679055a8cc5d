"""The engine protocol on MLX.

MLX is lazy, and what it has not computed yet belongs to the thread that asked for it. So every call here
computes all it began before it returns: a model may be loaded on one thread and used on another.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from holdfast.engine.batch import pack
from holdfast.engine.description import engine_info
from holdfast.engine.interface import EngineInfo, KeysValues, Row
from holdfast.engine.mlx.attention import MLXSlabAttention, SlabArrays, gather, scatter
from holdfast.engine.mlx.weights import ArrayReader, load_decoder, reader_for
from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import Slab, SlabShape
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.models import Architecture, ModelSource

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_CACHE_BYTES = 256 << 20


class MLXEngine:
    """A decoder and its slabs on MLX's default device."""

    def __init__(
        self,
        name: str,
        arch: Architecture,
        reader: ArrayReader,
        *,
        digest: str,
        num_slabs: int,
        shape: SlabShape,
        dtype: str = "float32",
    ) -> None:
        self._info = engine_info(name, arch, digest=digest, dtype=dtype, shape=shape)
        self._shape = shape
        self._num_slabs = num_slabs
        self._decoder = load_decoder(reader, arch, dtype=_DTYPES[dtype])
        cells = (arch.num_kv_heads, shape.capacity, arch.head_dim)
        self._slabs = SlabArrays(num_slabs, arch.num_layers, cells, _DTYPES[dtype])

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

    def forward(self, rows: Sequence[Row]) -> mx.array:
        packed = pack(rows)
        logits = self._decoder.forward(packed, MLXSlabAttention(self._slabs, packed.rows))
        mx.eval(logits, self._slabs.of(row.slot for row in packed.rows))
        return logits

    def read_logits(self, logits: mx.array) -> NDArray[np.float32]:
        return np.array(logits)

    def sample(self, logits: mx.array, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        return sample_rows(self.read_logits(logits), picks)

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
            scatter(slabs[slab.slot], slab, positions, mx.array(bits).view(_DTYPES[self._info.kv_dtype]))
        mx.eval(self._slabs.of([slab.slot]))

    def is_fatal(self, error: Exception) -> bool:
        """A failed Metal command buffer does not come back; running out of memory while planning one does."""
        return isinstance(error, RuntimeError) and str(error).startswith("[METAL]")

    def clear_slab(self, slab: Slab) -> None:
        for slabs in (self._slabs.keys, self._slabs.values):
            slabs[slab.slot] = [mx.zeros_like(array) for array in slabs[slab.slot]]
        mx.eval(self._slabs.of([slab.slot]))


def _to_bits(array: mx.array) -> NDArray[np.generic]:
    """A copy on the host; numpy has no bfloat16, so those travel as 16-bit integers."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def load_engine(source: ModelSource, *, num_slabs: int, shape: SlabShape, dtype: str = "float32") -> MLXEngine:
    """The engine for a model on disk. Blocks for seconds."""
    # What MLX keeps of freed buffers, for the whole process; by default as much as there is memory.
    mx.set_cache_limit(_CACHE_BYTES)
    return MLXEngine(
        source.name,
        source.architecture,
        reader_for(source),
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
    )
