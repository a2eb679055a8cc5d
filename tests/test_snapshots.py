"""Snapshots of parked sessions: within budgets, the least recently used go first, and never altered."""

import logging
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidArgument
from holdfast.sessions.journal.snapshots import LocalSnapshots, SnapshotStore

HEADER = 20  # bytes that a file has beside its content


@given(
    st.lists(st.tuples(st.sampled_from("pppgds"), st.integers(0, 5), st.integers(0, 120)), max_size=30),
    st.sampled_from([0, 100, 250]),
    st.sampled_from([0, 150, 400]),
)
def test_snapshots_stay_within_budgets_and_come_back_as_they_were_or_not_at_all(
    acts: list[tuple[str, int, int]], memory_budget: int, disk_budget: int
) -> None:
    last: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = SnapshotStore(
            LocalSnapshots(Path(directory), budget_bytes=disk_budget), memory_budget_bytes=memory_budget
        )
        for what, number, size in acts:
            name, content = f"s{number}", random.Random(size).randbytes(size)
            if what == "p":
                is_kept = store.put(name, bytearray(content))
                assert is_kept == (name in store.ids())
                assert is_kept or (size > memory_budget and size + HEADER > disk_budget)
                last[name] = content
            elif what == "d":
                store.delete(name)
                last.pop(name, None)
            elif what == "s":
                store.spill()
                assert store.memory_bytes == 0
                store = SnapshotStore(
                    LocalSnapshots(Path(directory), budget_bytes=disk_budget), memory_budget_bytes=memory_budget
                )
            assert store.get(name) in (None, last.get(name))
            assert (name in store.ids()) == (store.get(name) is not None)
            assert store.memory_bytes <= memory_budget
            assert store.disk_bytes <= disk_budget
            assert store.disk_bytes == sum(path.stat().st_size for path in Path(directory).iterdir())
            assert len(store) == len(store.ids()) <= len(last)


def test_the_least_recently_used_go_to_disk_then_for_good_and_the_order_outlives_a_restart(tmp_path: Path) -> None:
    def opened() -> SnapshotStore:
        return SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=2 * (100 + HEADER)), memory_budget_bytes=200)

    store = opened()
    for name in "abcd":
        assert store.put(name, bytes(100))
    assert store.ids() == ["a", "b", "c", "d"]
    assert (store.memory_bytes, store.disk_bytes) == (200, 240)
    assert store.get("a") == store.get("c") == bytes(100)
    assert store.ids() == ["b", "a", "d", "c"]
    store.put("e", memoryview(bytes(100)))
    assert store.ids() == ["a", "d", "c", "e"]
    assert store.get("b") is None
    assert opened().ids() == ["a", "d"]
    store.spill()
    assert opened().ids() == ["c", "e"]


def test_a_damaged_or_unfinished_snapshot_is_as_good_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=10_000))
    for name in ("flipped", "short", "empty", "whole", "gone"):
        store.put(name, random.Random(name).randbytes(1000))
    flipped = bytearray((tmp_path / "flipped.snapshot").read_bytes())
    flipped[500] ^= 4
    (tmp_path / "flipped.snapshot").write_bytes(flipped)
    (tmp_path / "short.snapshot").write_bytes((tmp_path / "short.snapshot").read_bytes()[:-1])
    (tmp_path / "empty.snapshot").write_bytes(b"")
    (tmp_path / "unfinished.new").write_bytes(b"half")
    store = SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=10_000))
    (tmp_path / "gone.snapshot").unlink()
    assert [store.get(name) for name in ("flipped", "short", "empty", "gone", "unfinished")] == [None] * 5
    assert store.get("whole") == random.Random("whole").randbytes(1000)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.snapshot"]
    assert "snapshot of session flipped is damaged" in caplog.text


def test_a_smaller_budget_evicts_at_start(tmp_path: Path) -> None:
    store = SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=10_000))
    for name in "abc":
        store.put(name, bytes(1000))
    assert SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=1100)).ids() == ["c"]
    assert SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=0)).ids() == []
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        SnapshotStore(LocalSnapshots(tmp_path, budget_bytes=100)).put("../x", b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_costs_the_snapshot_and_nothing_else(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SnapshotStore(LocalSnapshots(small_disk, budget_bytes=1_000_000))
    assert store.put("a", bytes(10_000))
    with caplog.at_level(logging.WARNING):
        assert not store.put("b", bytes(100_000))
    assert "No space left" in caplog.text
    assert store.ids() == ["a"]
    assert [path.name for path in small_disk.iterdir()] == ["a.snapshot"]
    assert store.put("c", bytes(10_000))
