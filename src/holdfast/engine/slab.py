"""Which cell of a slab holds a position, and how far a slab can be rewound. Pure integers: no tensors.

A slab has `capacity` cells, in whole blocks. The first `sink` positions keep a cell each; later positions share the
remaining `ring` cells in turn. Nothing else describes the layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.engine.window import Window
from holdfast.errors import CapacityExhausted, InvalidArgument, RecomputeTooLong

BLOCK = 16  # cells whose keys an engine may keep side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabShape:
    """The sizes that all slabs of a pool have in common."""

    recent: int = 2048
    max_pin: int = 512
    prefill_chunk: int = 256
    draft_length: int = 0
    rewind_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("max_pin", 0), ("prefill_chunk", 1), ("draft_length", 0)):
            if getattr(self, name) < least:
                raise InvalidArgument(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.rewind_tokens < 0:
            raise InvalidArgument(f"rewind_tokens must be 0 or more, got {self.rewind_tokens}")

    @property
    def slack(self) -> int:
        return max(self.prefill_chunk, self.draft_length + 1) + self.rewind_tokens

    @property
    def capacity(self) -> int:
        """A multiple of BLOCK."""
        return -(-(self.max_pin + self.recent + self.slack) // BLOCK) * BLOCK


@dataclass(slots=True, kw_only=True, eq=False)
class Slab:
    """The bookkeeping of one slab: which positions its cells hold. Mutable, owned by one thread."""

    slot: int
    window: Window
    capacity: int
    length: int = 0
    high: int = 0  # one past the highest position written since the ring was last discarded

    @property
    def ring(self) -> int:
        return self.capacity - self.window.sink

    @property
    def max_write(self) -> int:
        """How many tokens one forward may write without overwriting what its first query sees."""
        return self.ring - self.window.recent + 1

    def cell(self, position: int) -> int:
        sink = self.window.sink
        return position if position < sink else sink + (position - sink) % self.ring

    def runs(self, positions: range) -> Iterator[range]:
        """The cells of consecutive `positions`, as runs of consecutive cells, in order."""
        first = positions.start
        while first < positions.stop:
            cell = self.cell(first)
            end = self.window.sink if cell < self.window.sink else self.capacity
            num = min(positions.stop - first, end - cell)
            yield range(cell, cell + num)
            first += num

    def begin_write(self, num_tokens: int) -> None:
        """Declare the cells that a forward is about to overwrite; call before it touches memory."""
        if not 1 <= num_tokens <= self.max_write:
            raise InvalidArgument(f"a forward may write 1 to {self.max_write} tokens, got {num_tokens}")
        self.high = max(self.high, self.length + num_tokens)

    def end_write(self, num_tokens: int) -> None:
        self.length += num_tokens

    @property
    def lowest_intact(self) -> int:
        """The first ring position that is still in its cell; sink positions always are."""
        return max(self.window.sink, self.high - self.ring)

    def can_rewind(self, length: int) -> bool:
        """Whether everything that the query at `length` sees, except itself, is still in its cell."""
        sink, recent = self.window.sink, self.window.recent
        return length <= sink or self.lowest_intact <= max(sink, length - recent + 1)

    def lowest_rewind(self) -> int:
        """The lowest length, at or above the sink, that a rewind reaches without recomputing."""
        sink, recent = self.window.sink, self.window.recent
        return sink if self.lowest_intact == sink else self.lowest_intact + recent - 1

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on. Touches no tensors."""
        if not 0 <= length <= self.length:
            raise InvalidArgument(f"cannot rewind a slab of length {self.length} to {length}")
        if not self.can_rewind(length):
            raise RecomputeTooLong(target=length, lowest=self.lowest_rewind())
        self.length = length
        if length <= self.window.sink:
            self.high = length  # the ring is discarded; each cell is written again before it is read

    def reset(self) -> None:
        """Start over from position 0. Every cell is written again before it is read."""
        self.length = 0
        self.high = 0

    def intact(self) -> tuple[range, range]:
        """The sink positions and the ring positions below `length` that are still in their cells."""
        sink = self.window.sink
        return range(min(sink, self.length)), range(min(self.lowest_intact, self.length), self.length)

    def adopt(self, *, length: int, lowest: int) -> None:
        """Declare cells that were filled from a snapshot: the sinks, and `lowest` up to `length`."""
        sink = self.window.sink
        if length > sink and length - lowest > self.ring:
            raise InvalidArgument(f"{length - lowest} positions do not fit {self.ring} cells")
        self.length = length
        self.high = length if lowest <= sink else lowest + self.ring


@dataclass(slots=True)
class SlabPool:
    """The slabs of one engine. `acquire` and `release` allocate no memory."""

    num_slabs: int
    shape: SlabShape
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.num_slabs < 1:
            raise InvalidArgument(f"an engine needs at least 1 slab, got {self.num_slabs}")
        self._free = list(range(self.num_slabs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def check(self, sink: int) -> None:
        if not 0 <= sink <= self.shape.max_pin:
            raise InvalidArgument(f"cannot pin {sink} tokens: the limit is {self.shape.max_pin} (--max-pin)")

    def acquire(self, sink: int) -> Slab:
        self.check(sink)
        window = Window(sink=sink, recent=self.shape.recent)
        if not self._free:
            raise CapacityExhausted(f"all {self.num_slabs} slabs are in use; close a session or raise --sessions")
        return Slab(slot=self._free.pop(), window=window, capacity=self.shape.capacity)

    def release(self, slab: Slab) -> None:
        if slab.slot in self._free:
            raise InvalidArgument(f"slab {slab.slot} is already free")
        self._free.append(slab.slot)
