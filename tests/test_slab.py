"""The slab's arithmetic against a plain list of what every cell holds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from holdfast.engine.slab import BLOCK, Slab, SlabPool, SlabShape
from holdfast.engine.window import Window
from holdfast.errors import CapacityExhausted, InvalidArgument, RecomputeTooLong
from tests.effort import examples

shapes = st.builds(
    SlabShape,
    recent=st.integers(5, 12),
    max_pin=st.integers(0, 5),
    prefill_chunk=st.integers(1, 6),
    draft_length=st.integers(0, 4),
    rewind_tokens=st.integers(0, 9),
)


class Model:
    """A slab beside the list it must agree with: `cells` says which version of a position each cell holds."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.cells: list[tuple[int, int] | None] = [None] * slab.capacity
        self.history: list[tuple[int, int]] = []  # (position, version)
        self.version = 0

    def write(self, num: int) -> None:
        slab = self.slab
        slab.begin_write(num)
        for position in range(slab.length, slab.length + num):
            self.version += 1
            self.history.append((position, self.version))
            self.cells[slab.cell(position)] = self.history[-1]
        for query in range(slab.length, slab.length + num):
            self.check_visible(query)
        slab.end_write(num)

    def check_visible(self, query: int) -> None:
        assert self.wrong_reads(query) == 0

    def wrong_reads(self, query: int) -> int:
        window = self.slab.window
        keys = (key for part in window.kept(query + 1) for key in part)
        return sum(self.cells[self.slab.cell(key)] != self.history[key] for key in keys)

    def rewind(self, length: int) -> None:
        self.slab.rewind(length)
        del self.history[length:]

    def fork(self, slab: Slab) -> "Model":
        slab.length, slab.high = self.slab.length, self.slab.high
        other = Model(slab)
        other.cells, other.history, other.version = list(self.cells), list(self.history), self.version
        return other


class SlabMachine(RuleBasedStateMachine):
    """append, draft, rewind, fork and move in any order: no overwritten key is ever visible."""

    models = Bundle("models")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Model] = []

    @initialize(target=models, shape=shapes, data=st.data())
    def start(self, shape: SlabShape, data: st.DataObject) -> Model:
        self.pool = SlabPool(8, shape)
        self.all = [Model(self.pool.acquire(data.draw(st.integers(0, shape.max_pin))))]
        return self.all[0]

    @rule(model=models, data=st.data())
    def append(self, model: Model, data: st.DataObject) -> None:
        model.write(data.draw(st.integers(1, model.slab.max_write)))

    @rule(model=models, data=st.data())
    def draft_and_reject_some(self, model: Model, data: st.DataObject) -> None:
        num = data.draw(st.integers(1, model.slab.max_write))
        model.write(num)
        rejected = data.draw(st.integers(0, num - 1))
        target = model.slab.length - rejected
        if model.slab.can_rewind(target):
            model.rewind(target)

    @rule(model=models, data=st.data())
    def rewind(self, model: Model, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, model.slab.length))
        if model.slab.can_rewind(target):
            model.rewind(target)
        else:
            with pytest.raises(RecomputeTooLong):
                model.slab.rewind(target)

    @rule(target=models, model=models)
    def fork(self, model: Model) -> object:
        if not self.pool.num_free:
            return multiple()
        self.all.append(model.fork(self.pool.acquire(model.slab.window.sink)))
        return self.all[-1]

    @rule(model=models)
    def move_elsewhere(self, model: Model) -> None:
        """What a snapshot does: keep only what is intact, in a slab that starts from it."""
        slab, (sinks, ring) = model.slab, model.slab.intact()
        kept = {position: model.cells[slab.cell(position)] for part in (sinks, ring) for position in part}
        slab.reset()
        slab.adopt(length=len(model.history), lowest=ring.start)
        model.cells = [None] * slab.capacity
        for position, content in kept.items():
            model.cells[slab.cell(position)] = content

    @rule(model=models)
    def recompute(self, model: Model) -> None:
        length = model.slab.length
        model.slab.reset()
        model.history.clear()
        while model.slab.length < length:
            model.write(min(model.slab.max_write, length - model.slab.length))

    @invariant()
    def intact_positions_are_where_they_should_be(self) -> None:
        for model in self.all:
            for part in model.slab.intact():
                for position in part:
                    assert model.cells[model.slab.cell(position)] == model.history[position]


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=examples(150), stateful_step_count=60)


def test_judging_a_rewind_by_length_instead_of_high_reads_overwritten_keys() -> None:
    """The negative control: the machine above would notice."""
    wrong = 0
    for seed in range(50):
        source = random.Random(seed)
        model = Model(Slab(slot=0, window=Window(sink=2, recent=8), capacity=2 + 8 + 6))
        room = model.slab.ring - model.slab.window.recent + 1
        for _ in range(200):
            num = source.randint(1, model.slab.max_write)
            model.slab.begin_write(num)
            for position in range(model.slab.length, model.slab.length + num):
                model.version += 1
                model.history.append((position, model.version))
                model.cells[model.slab.cell(position)] = model.history[-1]
                wrong += model.wrong_reads(position)
            model.slab.end_write(num)
            back = source.randint(0, min(room, model.slab.length))  # trusts length, ignores high
            model.slab.length -= back
            del model.history[model.slab.length :]
    assert wrong > 1000


def test_cells_are_sinks_then_a_ring() -> None:
    slab = Slab(slot=0, window=Window(sink=2, recent=3), capacity=7)
    assert [slab.cell(p) for p in range(12)] == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6]
    assert list(slab.runs(range(1, 9))) == [range(1, 2), range(2, 7), range(2, 4)]


@given(shapes)
def test_free_rewind_reaches_at_least_the_promised_tokens(shape: SlabShape) -> None:
    slab = SlabPool(1, shape).acquire(shape.max_pin)
    while slab.length < 3 * shape.capacity:
        slab.begin_write(shape.prefill_chunk)
        slab.end_write(shape.prefill_chunk)
    spare = shape.capacity - shape.max_pin - shape.recent  # the slack, and what is left of the last block
    assert shape.slack <= spare < shape.slack + BLOCK
    assert slab.can_rewind(slab.length - spare - 1)
    assert not slab.can_rewind(slab.length - spare - 2)
    assert slab.lowest_rewind() == slab.length - spare - 1


def test_unused_pin_room_becomes_rewind_room() -> None:
    shape = SlabShape(recent=8, max_pin=6, prefill_chunk=4, rewind_tokens=2)
    slab = SlabPool(1, shape).acquire(0)
    while slab.length < 100:
        slab.begin_write(4)
        slab.end_write(4)
    assert slab.can_rewind(slab.length - shape.slack - 1 - 6)


def test_rewinding_into_the_pinned_part_is_always_free() -> None:
    slab = SlabPool(1, SlabShape(recent=8, max_pin=4, prefill_chunk=4, rewind_tokens=2)).acquire(4)
    while slab.length < 100:
        slab.begin_write(4)
        slab.end_write(4)
    assert [length for length in range(50) if slab.can_rewind(length)] == [0, 1, 2, 3, 4]


def test_a_slab_rewound_into_its_pinned_part_starts_its_ring_anew() -> None:
    slab = SlabPool(1, SlabShape(recent=8, max_pin=4, prefill_chunk=4, rewind_tokens=2)).acquire(4)
    while slab.length < 100:
        slab.begin_write(4)
        slab.end_write(4)
    slab.rewind(2)
    slab.begin_write(4)
    slab.end_write(4)
    assert slab.intact() == (range(4), range(4, 6))


def test_the_pool_lends_every_slab_once() -> None:
    pool = SlabPool(2, SlabShape(recent=8, max_pin=4))
    first, second = pool.acquire(0), pool.acquire(4)
    assert {first.slot, second.slot} == {0, 1}
    with pytest.raises(CapacityExhausted, match="all 2 slabs"):
        pool.acquire(0)
    pool.release(first)
    assert pool.num_free == 1
    with pytest.raises(InvalidArgument, match="already free"):
        pool.release(first)


def test_what_cannot_be_is_refused() -> None:
    pool = SlabPool(1, SlabShape(recent=8, max_pin=4))
    with pytest.raises(InvalidArgument, match="cannot pin 5"):
        pool.acquire(5)
    assert pool.num_free == 1
    with pytest.raises(InvalidArgument, match="at least 1 slab"):
        SlabPool(0, SlabShape())
    for bad in ({"recent": 0}, {"max_pin": -1}, {"prefill_chunk": 0}, {"rewind_tokens": -1}):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            SlabShape(**bad)
    slab = pool.acquire(4)
    for num in (0, slab.max_write + 1):
        with pytest.raises(InvalidArgument, match="may write"):
            slab.begin_write(num)
    with pytest.raises(InvalidArgument, match="cannot rewind"):
        slab.rewind(1)
    with pytest.raises(InvalidArgument, match="do not fit"):
        slab.adopt(length=10_000, lowest=4)
