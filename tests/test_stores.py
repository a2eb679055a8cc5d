"""Blobs in directories and object stores, and snapshots that several servers share: one suite for all stores."""

import importlib.util
import logging
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore

from holdfast.errors import ConfigError, InvalidArgument
from holdfast.sessions.journal.blobs import BlobStore, DirectoryBlobs, ObjectBlobs, open_blobs, usable_blobs
from holdfast.sessions.journal.snapshots import SharedSnapshots, SnapshotStore
from tests.postgres import fresh_database
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, said, until

KEYS = [f"{random.Random(number).getrandbits(128):032x}" for number in range(20)]


@pytest.fixture(params=["directory", "file URL", "obstore, files", "obstore, memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    match request.param:
        case "directory":
            return open_blobs(str(tmp_path / "a" / "blobs"))
        case "file URL":
            return open_blobs((tmp_path / "with space").as_uri())
        case "obstore, files":
            return ObjectBlobs(LocalStore(tmp_path))
        case _:
            return ObjectBlobs(MemoryStore())


def test_what_was_put_is_there_until_it_is_deleted(blobs: BlobStore) -> None:
    contents = {
        key: random.Random(key).randbytes(size) for key, size in zip(KEYS, range(0, 200_000, 10_000), strict=True)
    }
    for key, content in contents.items():
        blobs.put(key, content)
    blobs.put(KEYS[3], b"another")
    contents[KEYS[3]] = b"another"
    assert {key: blobs.get(key) for key in KEYS} == contents
    blobs.delete([KEYS[0], "neverthere", KEYS[1]])
    blobs.delete([])
    for key in (KEYS[0], KEYS[1], "neverthere"):
        with pytest.raises(FileNotFoundError):
            blobs.get(key)
    assert blobs.get(KEYS[2]) == contents[KEYS[2]]


def test_keys_are_found_by_how_they_begin(blobs: BlobStore) -> None:
    for name in ("", "t1", "t12", "u1"):
        blobs.put(f"{KEYS[0]}{name}", b"x")
    blobs.put(KEYS[0][:4] + KEYS[1][4:], b"a neighbour")
    assert blobs.keys(f"{KEYS[0]}t") == [f"{KEYS[0]}t1", f"{KEYS[0]}t12"]
    assert blobs.keys(f"{KEYS[2]}") == []


def test_many_threads_may_put_and_get(blobs: BlobStore) -> None:
    def work(number: int) -> None:
        for key in KEYS[number::4]:
            blobs.put(key, key.encode() * 1000)
            assert blobs.get(key) == key.encode() * 1000

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(blobs.get(key) == key.encode() * 1000 for key in KEYS)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "a/b", "a.new", "é", "a\n"])
def test_a_key_that_would_leave_the_store_is_refused(blobs: BlobStore, key: str) -> None:
    for call in (lambda: blobs.put(key, b""), lambda: blobs.get(key), lambda: blobs.delete([key])):
        with pytest.raises(InvalidArgument):
            call()


def test_only_the_owner_may_read_a_directory_of_blobs_and_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    for name, sync in (("fsync", os.fsync), ("fdatasync", os.fdatasync)):
        monkeypatch.setattr(
            os, name, lambda file, sync=sync: (synced.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))
        )
    os.umask(before := os.umask(0o022))
    blobs = DirectoryBlobs(tmp_path / "blobs")
    blobs.put(KEYS[0], b"secret")
    os.umask(before)
    (path,) = (path for path in (tmp_path / "blobs").rglob("*") if path.is_file())
    assert path.relative_to(tmp_path / "blobs") == Path(KEYS[0][:2], KEYS[0][2:4], KEYS[0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700
    assert [f"{path}.new", str(path.parent)] == synced[-2:]
    assert {str(path.parent.parent), str(tmp_path / "blobs")} <= set(synced)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ftp://host/x", "neither a directory nor a URL"),
        ("s3://", "cannot use s3://: "),
        ("/dev/null/x", "cannot use the directory /dev/null/x: Not a directory"),
    ],
)
def test_a_store_that_cannot_be_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_blobs(text)
    assert "\n" not in str(caught.value)


def test_without_obstore_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("obstore")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"s3:// needs the package obstore; to install it, run: .*\[objects\]"):
        open_blobs("s3://bucket/path")


def test_a_store_that_is_away_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.sessions.journal.blobs._NUM_RETRIES", 0)
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1") as caught:
        open_blobs("s3://bucket/path").get(KEYS[0])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"cannot use s3://bucket/path: .*127\.0\.0\.1:1"):
        usable_blobs("s3://bucket/path")


def test_a_store_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    usable_blobs(str(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Snapshots


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_snapshot_that_one_server_shares_is_found_by_another(blobs: BlobStore) -> None:
    first, second = (SnapshotStore(SharedSnapshots(blobs), memory_budget_bytes=1000) for _ in range(2))
    first.put(KEYS[0], b"one" * 100)
    first.put(f"{KEYS[0]}t5", b"two" * 100)
    assert second.get(KEYS[0]) is None
    first.put(KEYS[1], b"not asked for")
    first.share([KEYS[0]])
    assert (first.memory_bytes, second.get(KEYS[1])) == (13, None)
    assert KEYS[0] not in second
    second.find(KEYS[0])
    assert f"{KEYS[0]}t5" in second
    assert (second.get(KEYS[0]), second.get(f"{KEYS[0]}t5")) == (b"one" * 100, b"two" * 100)
    second.put(KEYS[0], b"newer")
    assert (second.get(KEYS[0]), first.get(KEYS[0])) == (b"newer", b"one" * 100)
    second.spill()
    assert first.get(KEYS[0]) == b"newer"
    second.delete(KEYS[0])
    second.delete_all(f"{KEYS[0]}t")
    assert KEYS[0] not in second
    eventually(lambda: blobs.keys(KEYS[0]) == [])
    assert first.get(KEYS[0]) is None


def test_what_memory_has_no_room_for_goes_to_the_shared_store(blobs: BlobStore) -> None:
    store = SnapshotStore(SharedSnapshots(blobs), memory_budget_bytes=250)
    assert all(store.put(key, key.encode() * 3) for key in KEYS[:5])
    assert store.put(KEYS[5], bytes(1000))
    assert store.memory_bytes == 2 * 96
    assert [key for key in KEYS[:6] if blobs.keys(key)] == [KEYS[0], KEYS[1], KEYS[2], KEYS[5]]
    assert [store.get(key) for key in KEYS[:6]] == [*(key.encode() * 3 for key in KEYS[:5]), bytes(1000)]


def test_a_damaged_shared_snapshot_is_as_good_as_none(blobs: BlobStore, caplog: pytest.LogCaptureFixture) -> None:
    store = SnapshotStore(SharedSnapshots(blobs))
    store.put(KEYS[0], bytes(100))
    whole = blobs.get(KEYS[0])
    for damaged in (whole[:-1], whole[:30] + b"?" + whole[31:], b""):
        blobs.put(KEYS[0], damaged)
        assert store.get(KEYS[0]) is None
        eventually(lambda: not blobs.keys(KEYS[0]))
    assert "is damaged" in caplog.text


class Failing:
    """A store that fails, or that does not answer until it is told to."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.answers = threading.Event()
        self.hangs = False

    def get(self, key: str) -> bytes:
        self.num_calls += 1
        if self.hangs:
            self.answers.wait()
        raise OSError("it is away")

    def put(self, key: str, content: bytes) -> None:
        self.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.get("")

    def keys(self, prefix: str) -> list[str]:
        return [str(self.get(prefix))]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_shared_store_that_is_away_or_hangs_is_a_miss_and_is_left_alone_for_a_while(
    hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    failing.hangs = hangs
    store = SnapshotStore(SharedSnapshots(failing, patience_s=0.05, pause_s=30.0), memory_budget_bytes=100)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert store.get(KEYS[0]) is None
        assert not store.put(KEYS[0], bytes(1000))
        for key in KEYS:
            store.put(key, bytes(60))
            store.delete(key)
            store.find(key)
        store.spill()
    failing.answers.set()
    assert time.monotonic() - started < 2
    assert failing.num_calls == 1
    assert store.memory_bytes == 0
    (record,) = caplog.records
    assert "shared snapshots are not used for 30 s" in record.message
    assert ("no answer within 0.05 s" if hangs else "it is away") in record.message


def num_files(directory: Path, name: str) -> int:
    return sum(path.is_file() for path in directory.rglob(f"{name}*"))


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_a_member_that_drains_leaves_its_snapshots_to_the_next_owner(tmp_path: Path, history: str) -> None:
    with fresh_database() as url:
        options: dict[str, Any] = {"journal": url, "snapshots": str(tmp_path), "max_parked": 10}
        async with serving(wordy_engine(), default_chat(), member="a", **options) as first, client_of(first) as client:
            session = await open_session(client, history=history)
            reply = (await client.post(chat_path(session), json=said("a"))).json()["choices"][0]["message"]["content"]
        assert num_files(tmp_path, session) == 1
        async with serving(wordy_engine(), default_chat(), member="b", **options) as other, client_of(other) as client:
            more = await client.post(chat_path(session), json=said("a", reply, "b"))
            assert more.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert other.metrics.session_woken.labels("snapshot")._value.get() == 1
            assert (await client.delete(f"/sessions/{session}")).status_code == 204
            await until(lambda: num_files(tmp_path, session) == 0)
