"""What every engine promises: the logits of a dense forward over the whole history, however it got there."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from holdfast.engine import snapshot as snapshots
from holdfast.engine.interface import Engine, Row
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import Slab, SlabPool, SlabShape
from tests import engine_cases
from tests.driving import difference, forward, run_chunks
from tests.effort import examples
from tests.engine_cases import Case, random_tokens

SHAPE = SlabShape(recent=12, max_pin=5, prefill_chunk=9, draft_length=3, rewind_tokens=7)
WINDOW = SHAPE.recent + 4


@cache
def cached_case(name: str) -> Case:
    return engine_cases.make(name, num_slabs=6, shape=SHAPE)


@pytest.fixture(params=engine_cases.NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return cached_case(request.param)


def _tokens(case: Case, num: int, seed: int = 0) -> list[int]:
    return random_tokens(num, case.engine.info.vocab_size, seed)


def _check(case: Case, slab: Slab, history: list[int], logits: np.ndarray) -> None:
    truth = case.truth(history, slab.window)[len(history) - len(logits) :]
    assert difference(logits, truth) <= case.tolerance


@pytest.mark.parametrize("windows", [1, 2, 10])
@settings(max_examples=examples(6))
@given(sink=st.integers(0, SHAPE.max_pin), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@pytest.mark.parametrize("name", engine_cases.NAMES)
def test_any_chunking_gives_the_dense_logits(name: str, windows: int, sink: int, sizes: list[int]) -> None:
    case = cached_case(name)
    slab = SlabPool(1, SHAPE).acquire(sink)
    tokens = _tokens(case, windows * WINDOW)
    _check(case, slab, tokens, run_chunks(case.engine, slab, tokens, sizes))


def test_neighbours_in_a_batch_change_nothing(case: Case) -> None:
    pool = SlabPool(6, SHAPE)
    slabs = [pool.acquire(sink) for sink in (0, 2, 4, 5)]
    histories = [_tokens(case, 60, seed) for seed in range(4)]
    source = np.random.default_rng(5)
    seen: list[list[np.ndarray]] = [[] for _ in slabs]
    while any(slab.length < 60 for slab in slabs):
        rows = [i for i, slab in enumerate(slabs) if slab.length < 60 and source.random() < 0.7]
        parts = []
        for i in rows:
            start = slabs[i].length
            parts.append((slabs[i], histories[i][start : start + int(source.integers(1, 10))]))
        for i, logits in zip(rows, forward(case.engine, parts), strict=True) if parts else ():
            seen[i].append(logits)
    for slab, history, logits in zip(slabs, histories, seen, strict=True):
        _check(case, slab, history, np.concatenate(logits))


class EngineMachine(RuleBasedStateMachine):
    """append, draft, rewind, fork, snapshot and restore in any order, always against the dense truth."""

    case: Case
    branches = Bundle("branches")

    @initialize(target=branches, sink=st.integers(0, SHAPE.max_pin), first=st.integers(1, 9))
    def start(self, sink: int, first: int) -> Sequence:
        self.pool = SlabPool(self.case.engine.num_slabs, SHAPE)
        branch = Sequence(1, self.pool.acquire(sink))
        self._write(branch, _tokens(self.case, first))
        return branch

    def _write(self, branch: Sequence, tokens: list[int]) -> None:
        branch.append(tokens)
        (logits,) = forward(self.case.engine, [(branch.slab, tokens)])
        branch.computed(len(tokens))
        _check(self.case, branch.slab, branch.tokens.tolist(), logits)

    @rule(branch=branches, num=st.integers(1, 9), seed=st.integers(0, 99))
    def append(self, branch: Sequence, num: int, seed: int) -> None:
        self._write(branch, _tokens(self.case, num, seed))

    @rule(branch=branches, num=st.integers(2, 4), kept=st.integers(1, 3), seed=st.integers(0, 99))
    def draft_and_reject_some(self, branch: Sequence, num: int, kept: int, seed: int) -> None:
        start = len(branch.tokens)
        self._write(branch, _tokens(self.case, num, seed))
        branch.rewind(start + min(kept, num), max_recompute=10**6)
        self._catch_up(branch)

    @rule(branch=branches, data=st.data())
    def rewind(self, branch: Sequence, data: st.DataObject) -> None:
        branch.rewind(data.draw(st.integers(1, len(branch.tokens))), max_recompute=10**6)
        self._catch_up(branch)

    def _catch_up(self, branch: Sequence) -> None:
        while branch.num_uncomputed:
            tokens = branch.next_tokens(SHAPE.prefill_chunk)
            (logits,) = forward(self.case.engine, [(branch.slab, tokens)])
            branch.computed(len(tokens))
            _check(self.case, branch.slab, branch.tokens[: branch.slab.length].tolist(), logits)

    @rule(target=branches, branch=branches)
    def fork(self, branch: Sequence) -> object:
        if not self.pool.num_free:
            return multiple()
        slab = self.pool.acquire(branch.slab.window.sink)
        self.case.engine.copy_slab(branch.slab, slab)
        slab.length, slab.high = branch.slab.length, branch.slab.high
        return Sequence(branch.id + 1, slab, branch.tokens)

    @rule(branch=branches)
    def snapshot_and_restore(self, branch: Sequence) -> None:
        data = snapshots.encode(snapshots.take(self.case.engine, branch))
        self.case.engine.clear_slab(branch.slab)
        snapshot = snapshots.decode(data)
        snapshots.check(self.case.engine, snapshot, branch.tokens)
        branch.slab.reset()
        snapshots.restore(self.case.engine, snapshot, branch.slab)


@pytest.mark.parametrize("name", engine_cases.NAMES)
def test_any_history_of_operations_gives_the_dense_logits(name: str) -> None:
    machine = type("Machine", (EngineMachine,), {"case": cached_case(name)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(8), stateful_step_count=30))


def test_only_wanted_logits_come_back(case: Case) -> None:
    pool = SlabPool(6, SHAPE)
    first, second, third = (pool.acquire(2) for _ in range(3))
    tokens = _tokens(case, 6)
    rows = [Row(first, tokens, 0), Row(second, tokens, 2), Row(third, tokens[:1], 1)]
    logits = case.engine.read_logits(case.engine.forward(rows))
    truth = case.truth(tokens, second.window)
    assert logits.shape == (3, case.engine.info.vocab_size)
    assert difference(logits, np.stack([truth[4], truth[5], truth[0]])) <= case.tolerance
    assert case.engine.read_logits(case.engine.forward([Row(first, tokens, 0)])).shape[0] == 0


def test_running_a_row_again_changes_nothing(case: Case) -> None:
    slab = SlabPool(6, SHAPE).acquire(3)
    tokens = _tokens(case, 50)
    run_chunks(case.engine, slab, tokens[:41], [9])
    row = Row(slab, tokens[41:], 9)
    slab.begin_write(9)
    case.engine.forward([row])
    again = case.engine.read_logits(case.engine.forward([row]))
    _check(case, slab, tokens, again)


def test_a_fork_and_its_source_do_not_touch_each_other(case: Case) -> None:
    pool = SlabPool(6, SHAPE)
    slab, fork = pool.acquire(3), pool.acquire(3)
    tokens = _tokens(case, 40)
    run_chunks(case.engine, slab, tokens, [8])
    case.engine.copy_slab(slab, fork)
    fork.length, fork.high = slab.length, slab.high
    for branch, seed in ((slab, 1), (fork, 2)):
        more = _tokens(case, 30, seed)
        _check(case, branch, tokens + more, run_chunks(case.engine, branch, more, [4, 1]))


def test_cells_travel_bit_for_bit(case: Case) -> None:
    pool = SlabPool(6, SHAPE)
    slab, other = pool.acquire(3), pool.acquire(3)
    run_chunks(case.engine, slab, _tokens(case, 70), [9])
    kv = case.engine.read_slab(slab, slab.intact())
    info = case.engine.info
    num = sum(map(len, slab.intact()))
    assert kv.keys.shape == kv.values.shape == (info.num_layers, info.num_kv_heads, num, info.head_dim)
    case.engine.clear_slab(other)
    case.engine.write_slab(other, slab.intact(), kv)
    back = case.engine.read_slab(other, slab.intact())
    assert (back.keys == kv.keys).all()
    assert (back.values == kv.values).all()
    case.engine.clear_slab(other)
    assert not case.engine.read_slab(other, slab.intact()).keys.any()
    assert case.engine.read_slab(slab, slab.intact()).keys.any()


def test_an_engine_says_what_it_was_built_with(case: Case) -> None:
    engine = case.engine
    assert isinstance(engine, Engine)
    assert (engine.shape, engine.num_slabs) == (SHAPE, 6)
    assert not engine.is_fatal(ValueError("an ordinary error"))


def test_reserved_memory_is_the_formula(case: Case) -> None:
    engine = case.engine
    assert engine.kv_reserved_bytes == engine.num_slabs * SHAPE.capacity * engine.info.kv_bytes_per_position
