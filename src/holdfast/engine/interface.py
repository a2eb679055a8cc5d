"""What every engine provides. None of it is thread-safe: all calls come from the one thread that owns the device.

An engine holds tensors and nothing else. `Slab` knows which positions a slab holds, the scheduler decides who is next.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.weights import WeightSource
from holdfast.errors import InvalidArgument, NonFiniteLogits, Unimplemented
from holdfast.generation import Sampled
from holdfast.models import Architecture

Logits = Any  # an implementation's own array of shape [sum of num_logits, vocabulary]

# By the dtype of the weights, where no other is asked for.
CACHE_DTYPES = {"float32": "float32"} | dict.fromkeys(("bfloat16", "fp8", "int8", "int4"), "bfloat16")
ITEMSIZES = {"float32": 4, "bfloat16": 2, "fp8": 1}
_SCALE_BYTES = 2  # of a head's key or value in an fp8 cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a model is to code that only handles token ids."""

    name: str
    vocab_size: int
    context: int  # the longest window the model was trained for
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str  # "float32", "bfloat16" or "fp8"
    fingerprint: str  # of weights, dtype and rotary settings; snapshots fit only engines with the same one
    dtype: str = "float32"  # of the weights
    row_invariant: bool = False  # whether a row's bits do not depend on the other rows of a batch
    row_cost: float = 0.25  # the time that one more row adds to a forward, relative to a forward of one row

    @property
    def kv_bytes_per_position(self) -> int:
        return kv_bytes_per_position(self, self.kv_dtype)

    @property
    def kv_itemsize(self) -> int:
        return ITEMSIZES[self.kv_dtype]

    @property
    def kv_width(self) -> int:
        return kv_width(self.head_dim, self.kv_dtype)


def cache_dtype(dtype: str, kv_dtype: str = "auto") -> str:
    """What `kv_dtype` means beside weights of `dtype`. Raises InvalidArgument for weights that are not supported."""
    if dtype not in CACHE_DTYPES:
        raise InvalidArgument(f"dtype {dtype!r} is not supported; choose one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[dtype] if kv_dtype == "auto" else kv_dtype


def kv_bytes_per_position(sizes: Architecture | EngineInfo, kv_dtype: str) -> int:
    """Keys and values of one position in all layers."""
    width = kv_width(sizes.head_dim, kv_dtype)
    return sizes.num_layers * 2 * sizes.num_kv_heads * width * ITEMSIZES[kv_dtype]


def kv_width(head_dim: int, kv_dtype: str) -> int:
    """How many items a head's key or value takes in the cache: its elements, and the bytes of its scale in fp8."""
    return head_dim + (_SCALE_BYTES if kv_dtype == "fp8" else 0)


def engine_info(
    name: str,
    arch: Architecture,
    *,
    digest: str,
    dtype: str,
    shape: SlabShape,
    kv_dtype: str = "auto",
    row_invariant: bool = False,
    row_cost: float = 0.25,
) -> EngineInfo:
    """The description of an engine: the same for the same weights on every device. `digest` is of the model's files.

    Raises InvalidArgument for a dtype that is not supported or a window larger than the model's context.
    """
    kv_dtype = cache_dtype(dtype, kv_dtype)
    if shape.max_pin + shape.recent > arch.context:
        most = arch.context - shape.max_pin
        raise InvalidArgument(
            f"max_pin {shape.max_pin} and recent {shape.recent} add up to more than the model's "
            f"context of {arch.context}; lower {f'recent to {most} or less' if most > 0 else 'max_pin'}"
        )
    facts = [digest, dtype, arch.family, arch.norm_epsilon, arch.inverse_frequencies]
    if kv_dtype != CACHE_DTYPES[dtype]:
        facts.append(kv_dtype)
    return EngineInfo(
        name=name,
        vocab_size=arch.vocab_size,
        context=arch.context,
        num_layers=arch.num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        kv_dtype=kv_dtype,
        fingerprint=hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest(),
        dtype=dtype,
        row_invariant=row_invariant,
        row_cost=row_cost,
    )


class Row(NamedTuple):
    """Tokens to write from position `slab.length` on, and for how many of the last ones logits are wanted."""

    slab: Slab
    tokens: Sequence[int]
    num_logits: int


class KeysValues(NamedTuple):
    """Cached keys and values, as raw bits: [layers, kv_heads, positions, kv_width] each."""

    keys: NDArray[np.generic]
    values: NDArray[np.generic]


class Engine(ABC):
    """A model and its slabs on one device."""

    num_cores = 0  # of the processor that computes; 0 where it computes elsewhere

    def __init__(self, info: EngineInfo, *, shape: SlabShape, num_slabs: int) -> None:
        self.info = info
        self.shape = shape
        self.num_slabs = num_slabs
        self.weight_version = ""  # of the weights that the next forward computes with
        self.base_weights: Callable[[], WeightSource] | None = None  # those of the model that was loaded
        self.replaced_names: set[str] = set()  # tensors that are not those of the model that was loaded
        self.loaded_fingerprint = info.fingerprint
        self.kept_fingerprints: frozenset[str] = frozenset()  # of earlier weights whose snapshots still fit

    @property
    @abstractmethod
    def kv_reserved_bytes(self) -> int:
        """The memory of all slabs together, read from the tensors."""

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> Logits:
        """Write every row's keys and values, then attend under its window. Mutates cells, not `Slab`s.

        Running a row again writes the same cells with the same values. The logits are valid until the next forward.
        """

    @abstractmethod
    def read_logits(self, logits: Logits) -> NDArray[np.float32]:
        """The logits on the host: [rows, vocabulary]."""

    def sample(self, logits: Logits, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        """One outcome per pick."""
        return sample_rows(self.read_logits(logits), picks)

    @abstractmethod
    def copy_slab(self, source: Slab, target: Slab) -> None:
        """Copy all cells. Mutates the target's."""

    @abstractmethod
    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        """Copy out the cells of `positions`, in order."""

    @abstractmethod
    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        """Copy into the cells of `positions`, in order. Mutates them."""

    @abstractmethod
    def clear_slab(self, slab: Slab) -> None:
        """Zero all cells, so that a failed computation leaves no NaN for the slab's next owner."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that `write_weight` takes, by their Hugging Face names."""
        return {}

    def write_weight(self, name: str, tensor: NDArray[np.generic]) -> None:
        """Convert a tensor, whose name and shape fit, as the loader does, and overwrite the one that is there."""
        raise Unimplemented("the weights of this engine cannot be changed")

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is lost and nothing more can be computed on it in this process."""
        return False


@runtime_checkable
class BurstingEngine(Protocol):
    """An engine that can also decode several tokens by itself: it samples on the device and feeds the token back."""

    def max_burst(self) -> int:
        """The most tokens it decodes in one call."""

    def can_burst(self, pick: Pick) -> bool:
        """Whether it can sample such a token on the device."""

    def burst(
        self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int
    ) -> list[list[Sampled | NonFiniteLogits]]:
        """At most `num_steps` outcomes for every row of one token, as many for each: those that single forwards and
        samples would give. Mutates cells, not `Slab`s; the caller has declared `num_steps` cells."""
