"""What every engine implementation provides. All of it is required; none of it is thread-safe.

An engine holds tensors and nothing else: which positions a slab holds is `Slab`'s to know, whose turn
it is the scheduler's. All calls come from the one thread that owns the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.sampling import Pick
from holdfast.engine.slab import Slab, SlabShape
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled

Logits = Any  # an implementation's own array of shape [sum of num_logits, vocabulary]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a model is to those who only handle token ids."""

    name: str
    vocab_size: int
    context: int  # the longest window the model was trained for
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str  # "float32" or "bfloat16"
    kv_itemsize: int
    fingerprint: str  # weights, dtype and rotary settings; caches of one fit no other
    row_invariant: bool = False  # whether a row's bits are free of its neighbours
    row_cost: float = 0.25  # what one more row adds to a forward of one, in such forwards

    @property
    def kv_bytes_per_position(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize


class Row(NamedTuple):
    """Tokens to write at `slab.length` and on, and how many of the last ones need logits."""

    slab: Slab
    tokens: Sequence[int]
    num_logits: int


class KeysValues(NamedTuple):
    """Cached keys and values, as raw bits: [layers, kv_heads, positions, head_dim] each."""

    keys: NDArray[np.generic]
    values: NDArray[np.generic]


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def shape(self) -> SlabShape: ...

    @property
    def num_slabs(self) -> int: ...

    @property
    def kv_reserved_bytes(self) -> int:
        """What all slabs together really occupy, read from the tensors."""

    def forward(self, rows: Sequence[Row]) -> Logits:
        """Write every row's keys and values, then attend under its window. Mutates cells, not `Slab`s.

        Running a row again writes the same cells with the same values.
        """

    def read_logits(self, logits: Logits) -> NDArray[np.float32]:
        """The logits on the host: [rows, vocabulary]."""

    def sample(self, logits: Logits, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        """One outcome per pick."""

    def copy_slab(self, source: Slab, target: Slab) -> None:
        """Copy all cells. Mutates the target's."""

    def read_slab(self, slab: Slab, positions: Sequence[range]) -> KeysValues:
        """Copy out the cells of `positions`, in order."""

    def write_slab(self, slab: Slab, positions: Sequence[range], kv: KeysValues) -> None:
        """Copy into the cells of `positions`, in order. Mutates them."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is lost: nothing more can be computed on it in this process."""

    def clear_slab(self, slab: Slab) -> None:
        """Zero all cells: what a failed computation left must not poison the next owner."""


@runtime_checkable
class BurstingEngine(Protocol):
    """An engine that can also go on alone for some tokens: sample on the device and feed back what it sampled."""

    def max_burst(self) -> int:
        """How many tokens it may go ahead in one call."""

    def can_burst(self, pick: Pick) -> bool:
        """Whether it can draw such a token by itself."""

    def burst(
        self, rows: Sequence[Row], picks: Sequence[Pick], num_steps: int
    ) -> list[list[Sampled | NonFiniteLogits]]:
        """`num_steps` outcomes for every row of one token, as many single forwards and samples would give."""
