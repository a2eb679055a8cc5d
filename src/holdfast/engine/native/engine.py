"""The engine in native code."""

import ctypes
import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Engine, KeysValues, Row, engine_info
from holdfast.engine.native import library as native
from holdfast.engine.native.slabs import NativeSlabs
from holdfast.engine.native.weights import Arrays, kind_of, packed_weights, tensor_places, write_tensor
from holdfast.engine.sampling import Pick, not_finite, sample_rows
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.weights import GROUP, decoder_shapes, open_weights
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.models import Architecture, ModelSource

_KEPT_ROWS = 128  # of logits
_COLDEST = 1e-3  # below this temperature, scaled logits leave the range of float32
# `EngineInfo.row_cost` by dtype and row invariance: the fewer bytes a weight has, the more of the time goes to
# multiplication.
_ROW_COSTS = {
    ("int4", True): 0.25,
    ("int8", True): 0.2,
    ("bfloat16", False): 0.13,
    ("bfloat16", True): 0.2,
    ("float32", True): 0.1,
}
_MAX_BURST = 16  # tokens; a message of so many costs little more than one of more
_BURST_S = 0.025  # commands, cancelled runs and new prompts wait for at most so long, or for one step
MAX_HEAD = 256  # the largest head_dim that decoder.cpp is built for


class NativeEngine(Engine):
    """A decoder and its slabs in the memory of the process. `arrays` are made by `WeightPacker`."""

    _decoder: int | None = None  # the native object

    def __init__(
        self,
        name: str,
        arch: Architecture,
        arrays: Arrays,
        *,
        digest: str,
        num_slabs: int,
        shape: SlabShape,
        dtype: str = "int8",
        deterministic: bool = False,
        num_threads: int = 0,
        variant: str | None = None,
    ) -> None:
        self._library = native.library(variant)
        is_exact = deterministic or not self._library.holdfast_mixes(native.KINDS[dtype])
        row_cost = _ROW_COSTS.get((dtype, is_exact), 1.0)  # `engine_info` refuses other dtypes
        info = engine_info(
            name, arch, digest=digest, dtype=dtype, shape=shape, row_invariant=is_exact, row_cost=row_cost
        )
        super().__init__(info, shape=shape, num_slabs=num_slabs)
        self._slabs = NativeSlabs(
            layers=arch.num_layers,
            slots=num_slabs,
            heads=arch.num_kv_heads,
            capacity=shape.capacity,
            dim=arch.head_dim,
            kind=np.float32 if info.kv_dtype == "float32" else np.uint16,
        )
        self._logits = np.empty((0, info.vocab_size), np.float32)  # of the last forward
        self.arrays = arrays
        self._tensor_shapes, self._tensor_places = decoder_shapes(arch), tensor_places(arch)
        self._held = _described(arch, arrays, dtype)  # keeps alive what the decoder points to
        slabs = native.SlabsStruct(
            self._slabs.keys.ctypes.data,
            self._slabs.values.ctypes.data,
            num_slabs,
            shape.capacity,
            shape.recent,
            native.KINDS[info.kv_dtype],
        )
        self.num_cores = num_threads or _num_threads()
        self._decoder = self._library.holdfast_decoder(self._held[0], slabs, self.num_cores, not is_exact)

    def __del__(self) -> None:
        if self._decoder:
            self._library.holdfast_free(self._decoder)

    @property
    def kv_reserved_bytes(self) -> int:
        return self._slabs.nbytes

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        specs = _specs(rows)
        tokens = np.fromiter((token for row in rows for token in row.tokens), np.int32)
        logits = self._room_for(sum(row.num_logits for row in rows))
        self._library.holdfast_forward(self._decoder, specs, len(rows), tokens.ctypes.data, logits.ctypes.data)
        return logits

    def read_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits.copy()  # the next forward writes over them

    def sample(self, logits: NDArray[np.float32], picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        return [self._draw(logits, pick) if _is_plain(pick) else sample_rows(logits, [pick])[0] for pick in picks]

    def max_burst(self) -> int:
        return _MAX_BURST

    def can_burst(self, pick: Pick) -> bool:
        return _is_plain(pick)

    def burst(
        self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int
    ) -> list[list[Sampled | NonFiniteLogits]]:
        """Ends early with a step in which a row ends, and where one more step would take too long."""
        num = len(rows)
        tokens = np.array([row.tokens[0] for row in rows], np.int32)
        ends = [np.array([*pick.params.eos_token_ids, *pick.params.stop_token_ids], np.int32) for pick in picks]
        facts = ((pick.params, end) for pick, end in zip(picks, ends, strict=True))
        wanted = (native.WantedStruct * num)(  # type: ignore[misc]
            *((own.seed, own.temperature, end.ctypes.data, end.size, own.choice) for own, end in facts)
        )
        drawn = (native.DrawnStruct * (num * num_steps))()
        logits = self._room_for(num)
        called = self._decoder, _specs(rows), num, tokens.ctypes.data, wanted, num_steps, _BURST_S
        num_done = self._library.holdfast_burst(*called, logits.ctypes.data, drawn)
        return [
            [_outcome(drawn[step * num + row], pick.position + step) for step in range(num_done)]
            for row, pick in enumerate(picks)
        ]

    def copy_slab(self, source: Slab, target: Slab) -> None:
        self._slabs.copy(source.slot, target.slot)

    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        return self._slabs.read(slab, positions)

    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        self._slabs.write(slab, positions, kv)

    def clear_slab(self, slab: Slab) -> None:
        self._slabs.clear(slab.slot)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._tensor_shapes

    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        write_tensor(self.arrays, self._tensor_places[name], tensor, self.info.dtype)

    def _draw(self, logits: NDArray[np.float32], pick: Pick) -> Sampled | NonFiniteLogits:
        params, row, drawn = pick.params, logits[pick.row], native.DrawnStruct()
        where = params.seed, pick.position, params.choice
        self._library.holdfast_draw(row.ctypes.data, row.size, params.temperature, *where, drawn)
        return _outcome(drawn, pick.position)

    def _room_for(self, num: int) -> NDArray[np.float32]:
        """Memory for rows of logits. That of few rows is kept, since the system has to clear fresh pages."""
        if num > _KEPT_ROWS:
            return np.empty((num, self.info.vocab_size), np.float32)
        if len(self._logits) < num:
            self._logits = np.empty((num, self.info.vocab_size), np.float32)
        return self._logits[:num]


def _specs(rows: Sequence[Row]) -> "ctypes.Array[native.RowStruct]":
    return (native.RowStruct * len(rows))(  # type: ignore[misc]
        *((row.slab.length, len(row.tokens), row.slab.slot, row.slab.window.sink, row.num_logits) for row in rows)
    )


def _outcome(drawn: native.DrawnStruct, position: int) -> Sampled | NonFiniteLogits:
    if drawn.token < 0:
        return not_finite(position)
    return Sampled(token=drawn.token, logprob=drawn.logprob, sampling_logprob=drawn.sampling_logprob)


def _is_plain(pick: Pick) -> bool:
    """Whether the token is drawn from unchanged logits: no filters, no penalties, no top logprobs."""
    params = pick.params
    is_whole = params.top_p == 1 and not params.top_k and not params.min_p
    is_bare = params.repetition_penalty == 1 and not (params.presence_penalty or params.frequency_penalty)
    is_free = pick.allowed is None and not params.logit_bias and not params.top_logprobs
    return is_whole and is_bare and is_free and (params.temperature == 0 or params.temperature >= _COLDEST)


def _num_threads() -> int:
    """OMP_NUM_THREADS where it is set, else the number of cores that this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named):
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _described(arch: Architecture, arrays: Arrays, dtype: str) -> tuple[native.ModelStruct, object, object]:
    """The model as a C struct, and the arrays that the struct points to."""
    dim = arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim

    def matrix(name: str, outputs: int, inputs: int) -> native.MatrixStruct:
        blocks = arrays[name]
        kind = native.KINDS[kind_of(blocks, inputs, dtype)]
        return native.MatrixStruct(blocks.ctypes.data, len(blocks), inputs, kind, outputs)

    def vector(name: str) -> int | None:
        return arrays[name].ctypes.data if name in arrays else None

    def layer(at: str) -> native.LayerStruct:
        return native.LayerStruct(
            matrix(f"{at}.qkv", queries + 2 * keys, arch.hidden_size),
            matrix(f"{at}.output", arch.hidden_size, queries),
            matrix(f"{at}.gate_up", 2 * arch.mlp_size, arch.hidden_size),
            matrix(f"{at}.down", arch.hidden_size, arch.mlp_size),
            *(vector(f"{at}.{name}") for name in ("attention_norm", "mlp_norm", "qkv_bias", "query_norm", "key_norm")),
        )

    frequencies = (ctypes.c_double * len(arch.inverse_frequencies))(*arch.inverse_frequencies)
    layers = (native.LayerStruct * arch.num_layers)(*(layer(str(index)) for index in range(arch.num_layers)))
    head = "embedding" if arch.has_tied_embeddings else "head"
    model = native.ModelStruct(
        arch.num_layers,
        arch.hidden_size,
        arch.mlp_size,
        arch.num_heads,
        arch.num_kv_heads,
        dim,
        arch.vocab_size,
        arch.norm_epsilon,
        frequencies,
        layers,
        matrix("embedding", arch.vocab_size, arch.hidden_size),
        matrix(head, arch.vocab_size, arch.hidden_size),
        vector("norm"),
    )
    return model, frequencies, layers


def fits(arch: Architecture, dtype: str) -> bool:
    """Whether the native code can compute this model in this dtype."""
    inputs = (arch.hidden_size, arch.num_heads * arch.head_dim, arch.mlp_size)
    return arch.head_dim <= MAX_HEAD and all(size % (GROUP if dtype in ("int8", "int4") else 2) == 0 for size in inputs)


def load_engine(
    source: ModelSource,
    *,
    num_slabs: int,
    shape: SlabShape,
    dtype: str = "int8",
    deterministic: bool = False,
    num_threads: int = 0,
) -> NativeEngine:
    """The engine for a model on disk. Blocks for seconds the first time; later starts find the packed weights."""
    arrays = packed_weights(source, open_weights(source), dtype)
    return NativeEngine(
        source.name,
        source.architecture,
        arrays,
        digest=source.digest,
        num_slabs=num_slabs,
        shape=shape,
        dtype=dtype,
        deterministic=deterministic,
        num_threads=num_threads,
    )
