"""Which positions a query attends to. Pure integers: no tensors, no I/O."""

from dataclasses import dataclass

from holdfast.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Keep the first `sink` tokens and the last `recent` ones."""

    sink: int = 4
    recent: int = 2048

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise InvalidArgument(f"sink must be 0 or more, got {self.sink}")
        if self.recent < max(1, self.sink):
            raise InvalidArgument(
                f"the window is smaller than its sink: recent is {self.recent}, sink is {self.sink}; "
                "recent must be at least 1 and at least sink"
            )

    @property
    def size(self) -> int:
        return self.sink + self.recent

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at absolute position `query` attends to the key at `key`."""
        return key <= query and (key < self.sink or key > query - self.recent)

    def kept(self, length: int) -> tuple[range, range]:
        """The sink positions and the recent ones that the last of `length` tokens sees."""
        pinned = min(self.sink, length)
        return range(pinned), range(max(pinned, length - self.recent), length)

    def num_visible(self, length: int) -> int:
        return min(length, self.size)

    def dropped(self, length: int) -> range:
        """The positions that have left the window once `length` tokens have been seen."""
        return range(self.sink, max(self.sink, length - self.recent))

    def sink_query(self, query: int) -> int:
        """The rotary position of `query` for sink keys: beyond the window, the distance to them stops growing."""
        return min(query, self.size - 1)
