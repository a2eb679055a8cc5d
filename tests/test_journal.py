"""The journal: what was acknowledged is there, bit for bit, whatever happened to the process or the disk."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, JournalFailed, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal import schema
from holdfast.sessions.journal.base import (
    Entry,
    ForkedFrom,
    Journal,
    NoJournal,
    Rewarded,
    SessionClosed,
    SessionOpened,
    SessionPurged,
    TokensGiven,
    TurnDelivered,
    TurnRecorded,
)
from holdfast.sessions.journal.files import write_file
from holdfast.sessions.journal.salvage import salvage
from holdfast.sessions.journal.segments import Segments
from holdfast.sessions.journal.snapshots import LocalSnapshots
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.record import TurnRecord
from tests import journaling
from tests.effort import examples
from tests.journaling import open_sessions
from tests.talking import until

REPOSITORY = Path(__file__).parent.parent
HEAVY = 100_000  # bytes: beyond what goes into the database


@contextlib.asynccontextmanager
async def opened(directory: Path, **settings: Any) -> AsyncIterator[SqliteJournal]:
    journal = SqliteJournal(directory, **settings)
    try:
        yield journal
    finally:
        await journal.close()


def session(session_id: str = "a", number: int = 1, **fields: Any) -> SessionOpened:
    return SessionOpened(session_id=session_id, number=number, owner="me", created_at=1.5, **fields)


def turn(number: int = 1, session_id: str = "a", **fields: Any) -> TurnRecorded:
    plain: dict[str, Any] = {
        "parent": number - 1,
        "given": array("i", [1, 2]),
        "sampled": array("i", [3]),
        "logprobs": array("d", [-0.1]),
        "sampling_logprobs": array("d", [-0.2]),
        "request": b"asked",
        "response": b"answered",
    }
    return TurnRecorded(session_id, TurnRecord(number=number, **(plain | fields)))


def without_bodies(recorded: TurnRecorded) -> TurnRecord:
    return msgspec.structs.replace(recorded.turn, request=None, response=None)


async def test_segments_go_once_nobody_needs_them_and_a_forks_bytes_stay(tmp_path: Path) -> None:
    heavy = [random.Random(number).randbytes(HEAVY) for number in range(4)]
    async with opened(tmp_path, max_segment_bytes=HEAVY) as journal:
        await journal.write(session(), *(turn(number + 1, response=body) for number, body in enumerate(heavy)))
        await journal.write(session("b", 2, forked_from=ForkedFrom("a", (2,))))
        await journal.write(SessionClosed("a", "closed", 1.0))
        assert len(list((tmp_path / "segments").iterdir())) == 4
        assert await journal.purge(before=2.0) == 1
        assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == [
            "00000002.segment",
            "00000004.segment",  # the one that is being written
        ]
        assert await journal.read_response("b", 1) == heavy[1]
        with pytest.raises(SessionNotFound):
            await journal.read_session("a")


# Kills


async def verified(directory: Path, acknowledged: dict[int, int]) -> None:
    """Everything acknowledged is there, and all that is there is as it was written."""
    async with opened(directory, max_segment_bytes=journaling.SEGMENT_BYTES) as journal:
        found = {known.opened.session_id: known for known in open_sessions(journal)}
        for index in range(journaling.NUM_SESSIONS):
            known = found.get(journaling.name(index))
            if known is None:
                assert index not in acknowledged
                continue
            assert (known.opened, known.failure) == (journaling.opening(index), None)
            num_turns = len(known.turns)
            assert len(known.steps) == 3 * num_turns
            assert acknowledged.get(index, 0) <= num_turns <= acknowledged.get(index, 0) + 1
            acknowledged[index] = num_turns
            for number in range(1, num_turns + 1):
                assert journaling.same_turn(known, index, number)
                *_, recorded = journaling.spoken(index, number)
                assert await journal.read_request(known.opened.session_id, number) == recorded.turn.request
                assert await journal.read_response(known.opened.session_id, number) == recorded.turn.response


@pytest.mark.parametrize("run", range(3))
async def test_kills_at_any_moment_lose_nothing_acknowledged(tmp_path: Path, run: int) -> None:
    draw = random.Random(run)
    acknowledged: dict[int, int] = {}
    for _ in range(examples(10)):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.journaling", tmp_path, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        lines = [await child.stdout.readline() for _ in range(draw.randrange(12))]
        await asyncio.sleep(draw.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        lines += (await child.stdout.read()).splitlines(keepends=True)
        assert await child.wait() == -signal.SIGKILL
        for line in lines:
            if line.endswith(b"\n"):
                index, number = map(int, line.split())
                acknowledged[index] = number
        await verified(tmp_path, acknowledged)
    assert sum(acknowledged.values()) > examples(10)


# Disks

FAILURES = """
import asyncio, resource, sys
from array import array
from pathlib import Path
from holdfast.errors import JournalFailed
from holdfast.sessions.journal.files import write_file
from holdfast.sessions.journal.salvage import salvage
from holdfast.sessions.journal.segments import Segments
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.journal.sqlite import SqliteJournal
from tests.test_journal import session, turn

async def main(size):
    journal = SqliteJournal(Path(sys.argv[1]), recover_s=0.05)
    await journal.write(session())
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
    number = 0
    try:
        while True:
            await journal.write(turn(number + 1, response=bytes([number % 256]) * size))
            number += 1
    except JournalFailed:
        assert journal.health
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while journal.health:
        await asyncio.sleep(0.01)
    await journal.write(turn(number + 1, response=bytes([number % 256]) * size))
    await journal.close()
    print(number + 1)

asyncio.run(main(int(sys.argv[2])))
"""


@pytest.mark.parametrize("size", [3_000, HEAVY], ids=["database", "segments"])
async def test_writing_goes_on_after_errors_of_the_file_system(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-c", FAILURES, str(tmp_path), str(size)]
    child = await asyncio.to_thread(subprocess.run, command, cwd=REPOSITORY, capture_output=True, check=False)
    assert child.returncode == 0, child.stderr.decode()
    async with opened(tmp_path) as journal:
        turns = (await journal.read_session("a")).turns
        assert [known.number for known in turns] == list(range(1, int(child.stdout) + 1))
        for known in turns:
            assert await journal.read_response("a", known.number) == bytes([(known.number - 1) % 256]) * size


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)


@pytest.mark.parametrize("size", [3_000, HEAVY], ids=["database", "segments"])
@pytest.mark.parametrize("waits", [True, False], ids=["by itself", "with the next write"])
async def test_a_full_disk_fails_writes_and_room_heals_them(small_disk: Path, size: int, waits: bool) -> None:
    async with opened(small_disk / "data", recover_s=0.02 if waits else 3600) as journal:
        await journal.write(session())
        number = 0
        while journal.health is None:
            with contextlib.suppress(JournalFailed):
                await journal.write(turn(number + 1, response=random.Random(number).randbytes(size)))
                number += 1
        assert number > 2
        for _ in range(3):
            with pytest.raises(JournalFailed):
                await journal.write(turn(number + 1, response=bytes(2_000_000)), turn(number + 2))
        assert "cannot write" in str(journal.health)
        assert len((await journal.read_session("a")).turns) == number
        remount(small_disk, "size=20m")
        if waits:
            async with asyncio.timeout(60):
                while journal.health:
                    await asyncio.sleep(0.01)
        await journal.write(turn(number + 1, response=random.Random(number).randbytes(size)))
        assert journal.health is None
    async with opened(small_disk / "data") as journal:
        assert len((await journal.read_session("a")).turns) == number + 1
        for index in range(number + 1):
            assert await journal.read_response("a", index + 1) == random.Random(index).randbytes(size)


async def test_a_write_that_does_not_fit_does_not_take_others_with_it(small_disk: Path) -> None:
    async with opened(small_disk / "data") as journal:
        await journal.write(session())
        small, large = await asyncio.gather(
            journal.write(turn(1)), journal.write(turn(2, response=bytes(3_000_000))), return_exceptions=True
        )
        assert small is None
        assert isinstance(large, JournalFailed)
        await journal.write(turn(2, response=bytes(HEAVY)))
        [segment] = (small_disk / "data" / "segments").iterdir()
        assert 0 <= segment.stat().st_size - HEAVY < 4096  # the place of what failed was used again


async def test_a_read_only_directory_is_refused_by_name(small_disk: Path) -> None:
    async with opened(small_disk / "data") as journal:
        await journal.write(session())
    remount(small_disk, "ro")
    with pytest.raises(ConfigError, match=rf"{small_disk}.*--data-dir"):
        SqliteJournal(small_disk / "data")
    remount(small_disk, "rw")
    async with opened(small_disk / "data") as journal:
        assert [known.opened for known in open_sessions(journal)] == [session()]


async def test_segments_that_cannot_be_made_fail_the_write_until_they_can(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write(session())
        (tmp_path / "segments").rmdir()
        (tmp_path / "segments").touch()
        with pytest.raises(JournalFailed):
            await journal.write(turn(1, response=bytes(HEAVY)))
        assert journal.health
        (tmp_path / "segments").unlink()
        (tmp_path / "segments").mkdir()
        await journal.write(turn(1, response=bytes(HEAVY)))
        assert journal.health is None


async def test_two_servers_cannot_share_a_directory(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by another Holdfast, process {os.getpid()}"):
            SqliteJournal(tmp_path)
    async with opened(tmp_path):
        pass


@pytest.mark.parametrize("name", ["lock", "journal.db-wal"])
async def test_a_deleted_lock_or_log_is_noticed_and_costs_nothing_that_was_acknowledged(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, recover_s=0.01) as journal:
        await journal.write(session(), turn(1))
        (tmp_path / name).unlink()
        with pytest.raises(ConfigError, match="in use by another Holdfast"):
            SqliteJournal(tmp_path)
        await until(lambda: f"{name} was deleted or replaced while the server runs" in caplog.text)
        await until(lambda: journal.health is None)
        assert (tmp_path / name).exists()
        await journal.write(turn(2))
        shutil.copytree(tmp_path, tmp_path / "crashed")
    async with opened(tmp_path / "crashed") as journal:
        assert [known.number for known in (await journal.read_session("a")).turns] == [1, 2]


@pytest.mark.parametrize("is_old", [False, True])
async def test_no_write_is_acknowledged_into_a_log_that_was_deleted(tmp_path: Path, is_old: bool) -> None:
    async with opened(tmp_path, recover_s=60) as journal:
        if is_old:  # the files are not looked at as long as the directory stays as it is
            os.utime(tmp_path, (1, 1))
        await journal.write(session(), turn(1))
        (tmp_path / "journal.db-wal").unlink()
        with pytest.raises(JournalFailed, match=r"journal\.db-wal was deleted or replaced"):
            await journal.write(turn(2))
        assert "journal.db-wal was deleted" in str(journal.health)
        assert [known.number for known in (await journal.read_session("a")).turns] == [1]


@pytest.mark.parametrize("is_old", [False, True])
async def test_a_log_that_is_deleted_during_a_commit_does_not_take_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    async with opened(tmp_path, recover_s=60) as journal:
        if is_old:
            os.utime(tmp_path, (1, 1))
        await journal.write(session())
        sync = Segments.sync

        def delete_and_sync(segments: Segments) -> None:
            (tmp_path / "journal.db-wal").unlink()
            monkeypatch.setattr(Segments, "sync", sync)

        monkeypatch.setattr(Segments, "sync", delete_and_sync)
        await journal.write(turn(1))
        assert journal.health is None
        shutil.copytree(tmp_path, tmp_path / "crashed")
    async with opened(tmp_path / "crashed") as journal:
        assert [known.number for known in (await journal.read_session("a")).turns] == [1]


async def test_a_database_that_is_deleted_or_replaced_can_still_be_read_but_not_written(tmp_path: Path) -> None:
    async with opened(tmp_path, recover_s=0.01) as journal:
        await journal.write(session(), turn(1))
        shutil.copy(tmp_path / "journal.db", tmp_path / "copy")
        (tmp_path / "copy").replace(tmp_path / "journal.db")
        with pytest.raises(JournalFailed, match=r"journal\.db was deleted or replaced"):
            await journal.write(turn(2))
        await until(lambda: "holdfast sessions export" in str(journal.health))
        assert await journal.read_response("a", 1) == b"answered"


async def test_a_reply_is_not_acknowledged_into_a_segment_that_was_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path, recover_s=0.01) as journal:
        await journal.write(session(), turn(1, response=b"1" * HEAVY))
        (tmp_path / "segments" / "00000001.segment").unlink()
        with pytest.raises(JournalFailed, match=r"00000001\.segment was deleted or replaced"):
            await journal.write(turn(2, response=bytes(HEAVY)))
        await until(lambda: journal.health is None)
        await journal.write(turn(2, response=b"2" * HEAVY))
        assert await journal.read_response("a", 2) == b"2" * HEAVY
        with pytest.raises(StorageUnavailable, match="response of turn 1 of session a is damaged"):
            await journal.read_response("a", 1)


# Who may read it


def modes(directory: Path) -> dict[str, str]:
    paths = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): f"{path.stat().st_mode & 0o7777:o}" for path in paths}


def loosen(directory: Path, mode: int) -> None:
    """As an earlier version, or a user, may have left it."""
    (directory / "notes.txt").touch()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    directory.chmod(mode)


async def test_only_the_owner_may_read_a_data_directory(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    before = os.umask(0)
    try:
        async with opened(directory) as journal:
            await journal.write(session(), turn(1, response=bytes(HEAVY)))
            LocalSnapshots(directory / "snapshots", budget_bytes=10_000).put("a", b"cache")
            write_file(directory / "model.json", b"{}")
            found = modes(directory)
    finally:
        os.umask(before)
    folders = {".", "segments", "snapshots"}
    assert found == dict.fromkeys(found, "600") | dict.fromkeys(folders, "700")
    assert {"journal.db", "journal.db-wal", "journal.db-shm", "lock", "model.json"} < found.keys()


@pytest.mark.parametrize(("mode", "left"), [(0o755, "600"), (0o2750, "640")])
async def test_files_that_others_may_read_are_made_private_and_a_shared_groups_are_left_to_it(
    tmp_path: Path, mode: int, left: str
) -> None:
    await written(tmp_path)
    loosen(tmp_path, mode)
    async with opened(tmp_path):
        found = modes(tmp_path)
    assert (found["journal.db"], found["segments/00000001.segment"], found["lock"]) == (left, left, left)
    assert (found["notes.txt"], found["."]) == ("644", f"{mode:o}")


# Damage


async def written(directory: Path, num_turns: int = 4) -> None:
    async with opened(directory) as journal:
        await journal.write(session())
        for number in range(1, num_turns + 1):
            body = random.Random(number).randbytes(HEAVY) if number % 2 else b"response %d" % number
            await journal.write(TokensGiven("a", array("i", [number])), turn(number, response=body))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(path.read_bytes()[:4096]),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b"not a database at all" * 1000),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096)),
        lambda path: path.write_bytes(
            path.read_bytes().replace(b"INDEX spans_of", b"INDEY spans_of").replace(b"spans_of", b"spans\xffof")
        ),
    ],
    ids=["empty", "100 bytes", "a page", "half", "text", "missing", "zeros", "schema"],
)
async def test_a_damaged_database_is_refused_by_name_with_advice(
    tmp_path: Path, break_it: Callable[[Path], None]
) -> None:
    await written(tmp_path)
    break_it(tmp_path / "journal.db")
    with pytest.raises(ConfigError, match=r"journal\.db is damaged: .*backup"):
        SqliteJournal(tmp_path)


async def many_written(directory: Path) -> dict[str, list[Any]]:
    """A directory of several pages: what is in it, step by step."""
    expected: dict[str, list[Any]] = {}
    async with opened(directory) as journal:
        for number in range(1, 13):
            session_id = f"{number:02d}"
            is_chat = number % 2 == 0
            await journal.write(session(session_id, number, kind="chat" if is_chat else "tokens"))
            steps: list[Entry] = [TokensGiven(session_id, array("i", range(200 * index))) for index in range(1, 6)]
            if is_chat:
                body = bytes(HEAVY if number == 2 else 10)
                steps = [turn(index, session_id, response=body, reward=index / 2) for index in range(1, 6)]
            for step in steps:
                await journal.write(step)
            expected[session_id] = [without_bodies(step) if isinstance(step, TurnRecorded) else step for step in steps]
        await journal.write(Rewarded("03", None, 0.5), SessionClosed("04", "closed", 9.0))
    return expected


async def salvaged(source: Path, target: Path, expected: dict[str, list[Any]]) -> int:
    """How many sessions were saved whole; what was saved is as it was written, and what was not is told."""
    found = {one.session_id: one for one in await salvage(source, target)}
    num_whole = 0
    async with opened(target) as journal:
        for session_id, steps in expected.items():
            try:
                known = await journal.read_session(session_id)
            except SessionNotFound:
                assert session_id not in found or found[session_id].problem
                continue
            assert (known.failure, list(known.steps)) == (None, steps[: len(known.steps)])
            assert found[session_id].problem or len(known.steps) == len(steps)
            assert found[session_id].num_steps == len(known.steps)
            num_whole += not found[session_id].problem
            for one in known.turns:
                assert len(await journal.read_response(session_id, one.number)) in (10, HEAVY)
    return num_whole


async def test_all_of_a_directory_that_is_not_damaged_is_salvaged(tmp_path: Path) -> None:
    expected = await many_written(tmp_path / "data")
    assert await salvaged(tmp_path / "data", tmp_path / "out", expected) == 12
    async with opened(tmp_path / "out") as journal:
        assert (await journal.read_session("03")).reward == 0.5
        assert [gone.session_id for gone in journal.closed()] == ["04"]
        assert (await journal.read_session("04")).turns[2].reward == 1.5
        with pytest.raises(ConfigError, match="in use by a server"):
            await salvage(tmp_path / "out", tmp_path / "third")
    for source, target in (("missing", "third"), ("data", "out")):
        with pytest.raises(ConfigError):
            await salvage(tmp_path / source, tmp_path / target)


async def test_a_directory_of_an_earlier_version_is_salvaged_too(tmp_path: Path) -> None:
    expected = await many_written(tmp_path / "data")
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.db")) as database:
        for index in ("sessions_by_name", "sessions_by_number", "sessions_of_owner", "sessions_rested"):
            database.execute(f"DROP INDEX {index}")
        for column in ("summary", "rested_at", "name", "member"):
            database.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        database.execute("PRAGMA user_version = 2")
        database.commit()
    assert await salvaged(tmp_path / "data", tmp_path / "out", expected) == 12


@pytest.mark.parametrize("seed", range(examples(4)))
async def test_what_is_salvaged_from_a_damaged_directory_is_as_it_was_written(tmp_path: Path, seed: int) -> None:
    expected = await many_written(tmp_path / "data")
    chance, path = random.Random(seed), tmp_path / "data" / "journal.db"
    data = bytearray(path.read_bytes())
    with contextlib.closing(sqlite3.connect(path)) as plain:
        roots = dict(plain.execute("SELECT name, rootpage FROM sqlite_master"))
    pages = set(range(2, len(data) // 4096)) - {roots["sessions"]}  # without these, nobody knows of any session
    page = 4096 * (chance.choice(sorted(pages)) - 1)
    damage = chance.choice(["zeros", "noise", "flips", "cut"])
    if damage == "cut":
        del data[-8192:]
    elif damage == "flips":
        data[page + 3] ^= 1  # the number of cells
    else:
        data[page : page + 4096] = bytes(4096) if damage == "zeros" else chance.randbytes(4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="holdfast sessions salvage"):
        SqliteJournal(tmp_path / "data")
    assert await salvaged(tmp_path / "data", tmp_path / "out", expected) >= 1
    assert path.read_bytes() == data


async def test_a_directory_whose_every_page_is_noise_has_nothing_to_salvage(tmp_path: Path) -> None:
    await written(tmp_path / "data")
    (tmp_path / "data" / "journal.db").write_bytes(random.Random(1).randbytes(50_000))
    with pytest.raises(ConfigError, match=r"nothing in .* can be read: .*; restore a backup"):
        await salvage(tmp_path / "data", tmp_path / "out")


async def test_a_segments_torn_tail_is_reported_and_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(tmp_path)
    [segment] = (tmp_path / "segments").iterdir()
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"half of a reply")
    segment.with_name("00000002.segment").write_bytes(b"another half")
    async with opened(tmp_path) as journal:
        assert "removed 15 bytes" in caplog.text
        assert "none of its 12 bytes was acknowledged" in caplog.text
        assert [path.stat().st_size for path in (tmp_path / "segments").iterdir()] == [size]
        await journal.write(turn(5, response=bytes(HEAVY)))
        assert await journal.read_response("a", 5) == bytes(HEAVY)
        assert await journal.read_response("a", 3) == random.Random(3).randbytes(HEAVY)


async def test_flipped_missing_and_short_replies_are_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(tmp_path)
    [segment] = (tmp_path / "segments").iterdir()
    flip(segment, 500)
    flip(tmp_path / "journal.db", (tmp_path / "journal.db").read_bytes().index(b"response 2"))
    async with opened(tmp_path) as journal:
        for number in (1, 2):
            with pytest.raises(StorageUnavailable, match=f"response of turn {number} of session a is damaged"):
                await journal.read_response("a", number)
        assert await journal.read_response("a", 3) == random.Random(3).randbytes(HEAVY)
        assert await journal.read_response("a", 4) == b"response 4"
        assert len((await journal.read_session("a")).turns) == 4
    os.truncate(segment, HEAVY + 10)
    async with opened(tmp_path) as journal:
        assert "cannot be read" in caplog.text
        with pytest.raises(StorageUnavailable):
            await journal.read_response("a", 3)
    segment.unlink()
    async with opened(tmp_path) as journal:
        assert "is missing" in caplog.text
        with pytest.raises(StorageUnavailable, match="turn 3 of session a"):
            await journal.read_response("a", 3)
        with pytest.raises(SessionNotFound):
            await journal.read_response("a", 9)


async def test_a_session_with_a_damaged_step_is_failed_not_altered(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.write(
            session("b", 2), session(), turn(1), turn(2, messages=({"content": "a message to be found"},)), turn(3)
        )
    flip(tmp_path / "journal.db", (tmp_path / "journal.db").read_bytes().index(b"to be found"))
    async with opened(tmp_path) as journal:
        damaged, whole = open_sessions(journal)
        assert (whole.opened.session_id, whole.failure) == ("b", None)
        assert damaged.steps == (without_bodies(turn(1)),)
        assert "damaged" in str(damaged.failure)
        with pytest.raises(StorageUnavailable, match="turn 2 of session a is damaged"):
            await journal.write(session("c", 3, forked_from=ForkedFrom("a", (1, 2))))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    asyncio.run(written(directory, num_turns=12))
    return directory


@settings(max_examples=examples(60))
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_no_flipped_bit_of_the_database_is_ever_served(whole: Path, where: float, bit: int) -> None:
    async def run(directory: Path) -> None:
        path = directory / "journal.db"
        data = bytearray(path.read_bytes())
        data[int(where * len(data))] ^= 1 << bit
        path.write_bytes(data)
        try:
            journal = SqliteJournal(directory)
        except ConfigError:
            return
        try:
            for found in open_sessions(journal):
                assert found.failure or found.opened == session()
                for step in found.steps:
                    assert step in expected
                for known in found.turns:
                    with contextlib.suppress(StorageUnavailable, SessionNotFound):
                        assert await journal.read_response("a", known.number) == bodies_of[known.number]
        except StorageUnavailable:
            pass
        finally:
            await journal.close()

    numbers = range(1, 13)
    bodies_of = {n: random.Random(n).randbytes(HEAVY) if n % 2 else b"response %d" % n for n in numbers}
    expected: list[Any] = [without_bodies(turn(n, response=bodies_of[n])) for n in numbers]
    expected += [TokensGiven("a", array("i", [n])) for n in numbers]
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(whole, directory, dirs_exist_ok=True)
        asyncio.run(run(Path(directory)))


@pytest.mark.parametrize("column", [b"checksum", b"step", b"tokens", b"number", b"created_at"])
def test_a_column_whose_name_is_damaged_is_damage(whole: Path, tmp_path: Path, column: bytes) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "journal.db"
    data = path.read_bytes()
    assert column in data
    path.write_bytes(data.replace(column, column[:-1] + bytes([column[-1] ^ 1])))
    with pytest.raises((ConfigError, StorageUnavailable)):
        open_sessions(SqliteJournal(tmp_path))


async def test_a_damaged_end_of_the_write_ahead_log_is_reported_and_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path / "running") as journal:
        await journal.write(session(), turn(1))
        await journal.write(turn(2))
        for name in ("torn", "flipped"):  # what a crash would leave
            shutil.copytree(tmp_path / "running", tmp_path / name)
    log = tmp_path / "torn" / "journal.db-wal"
    os.truncate(log, log.stat().st_size - 100)
    flip(tmp_path / "flipped" / "journal.db-wal", log.stat().st_size - 200)
    for name in ("torn", "flipped"):
        caplog.clear()
        async with opened(tmp_path / name) as journal:
            assert [known.number for known in (await journal.read_session("a")).turns] == [1]
            assert journal.num_cut_commits == 1
        assert "write-ahead log were damaged" in caplog.text
    caplog.clear()
    async with opened(tmp_path / "running"):
        assert not caplog.text


# Versions


async def test_an_older_database_is_brought_up_to_date_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    old = schema.connect(path)
    schema.migrate(old, path, schema.MIGRATIONS[:1])
    old.close()
    with contextlib.closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA user_version").fetchone() == (1,)
        before = {name for (name,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    async with opened(tmp_path / "new") as journal:
        await journal.write(session(), turn(1), TokensGiven("a", array("i", [7])))
    with contextlib.closing(sqlite3.connect(path)) as plain:
        plain.execute("ATTACH ? AS new", (str(tmp_path / "new" / "journal.db"),))
        for table in ("sessions", "bodies", "turns", "spans"):
            columns = ", ".join(row[1] for row in plain.execute(f"PRAGMA main.table_info({table})"))
            plain.execute(f"INSERT INTO main.{table} SELECT {columns} FROM new.{table}")
        plain.commit()
    async with opened(tmp_path) as journal:
        [found] = open_sessions(journal)
        assert found.steps == (without_bodies(turn(1)), TokensGiven("a", array("i", [7])))
        await journal.write(turn(2))
    with contextlib.closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)
        assert before < {name for (name,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    with contextlib.closing(schema.connect(tmp_path / "journal.db")) as database:
        with pytest.raises(sqlite3.OperationalError):
            schema.migrate(database, tmp_path, (*schema.MIGRATIONS, ("CREATE TABLE one (x)", "nonsense")))
        assert database.execute("PRAGMA user_version").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


async def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="version 99"):
        SqliteJournal(tmp_path)


async def test_no_journal_keeps_nothing_and_never_fails() -> None:
    journal: Journal = NoJournal()
    await journal.write(session(), turn(1), SessionPurged("b"))
    journal.note(TurnDelivered("a", 1))
    assert (list(journal.closed()), journal.health, journal.last_number) == ([], None, 0)
    assert await journal.purge(before=1e9) == 0
    for read in (journal.read_request, journal.read_response):
        with pytest.raises(SessionNotFound):
            await read("a", 1)
    with pytest.raises(SessionNotFound):
        await journal.read_session("a")
    await journal.close()
