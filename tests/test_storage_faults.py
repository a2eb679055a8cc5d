"""What a server does when its disk fails it: each fault is found, named and survived."""

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.config import ServeConfig
from holdfast.engine.torch import TorchEngine
from holdfast.errors import ConfigError
from holdfast.metrics import Metrics
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.storage import open_storage
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.testing.fake_engine import FakeEngine
from tests import serving as servers
from tests.serving import SHAPE, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, eventually, open_session, refusal_of, said
from tests.test_grpc import create
from tests.test_journal import HEAVY, session
from tests.test_journal import turn as recorded
from tests.transferring import downloaded, exported, history_of, imported, told, turn


async def _talk(client: Any, session: str, *texts: str) -> list[str]:
    """One more turn: the conversation with its reply."""
    response = await client.post(chat_path(session), json=said(*texts))
    assert response.status_code == 200, response.text
    return [*texts, response.json()["choices"][0]["message"]["content"]]


async def _left_behind(directory: Path) -> tuple[str, list[str]]:
    """A data directory with one chat of one turn, whose server has ended."""
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(directory)) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        return session, await _talk(client, session, "a")


async def test_a_truncated_database_keeps_a_server_from_starting_and_is_named(tmp_path: Path) -> None:
    session, texts = await _left_behind(tmp_path)
    database = tmp_path / "journal.db"
    whole = database.read_bytes()
    database.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"journal\.db is damaged: .*backup"):
        async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)):
            pass
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--backend", "sglang", "--upstream", "http://127.0.0.1:1"]
    command += ["--data-dir", str(tmp_path), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    process = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert f"holdfast: the journal {database} is damaged" in process.stderr
    assert database.read_bytes() == whole[: len(whole) // 2]  # nothing was made worse
    database.write_bytes(whole)  # the backup
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        await _talk(client, session, *texts, "b")


async def test_a_flipped_byte_in_a_snapshot_costs_computing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = []
    async with serving(SlowEngine(), data_dir=str(tmp_path), max_parked=9) as server:
        sessions = [await create(server, [7, 8, 9]) for _ in range(2)]
        for session in sessions:
            await told(server.stub.Turn(turn(session, 1)))
        data = await exported(server, sessions[0])
        expected = await told(server.stub.Turn(turn((await imported(server, data)).session_id, 2)))
    damaged = tmp_path / "snapshots" / f"{sessions[0]}.snapshot"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    async with serving(SlowEngine(), data_dir=str(tmp_path), max_parked=9) as server:
        for session in sessions:
            assert await told(server.stub.Turn(turn(session, 2))) == expected
        assert f"the snapshot of session {sessions[0]} is damaged" in caplog.text
        assert server.metrics.session_woken.labels("recomputed")._value.get() == 1
        assert server.metrics.session_woken.labels("snapshot")._value.get() == 1


async def test_a_snapshot_of_another_model_is_not_used_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def engine(fingerprint: str) -> FakeEngine:
        return FakeEngine(num_slabs=4, shape=SHAPE, fingerprint=fingerprint)

    async with serving(engine("other"), data_dir=str(tmp_path), max_parked=9) as server:
        session = await create(server, [7, 8, 9])
        history = await history_of(server, session)
    async with serving(engine("fake"), data_dir=str(tmp_path), max_parked=9) as server:
        calm = await create(server, [7, 8, 9])
        assert await told(server.stub.Turn(turn(session, 1))) == await told(server.stub.Turn(turn(calm, 1)))
        assert (await history_of(server, session))[0][1][:3] == history[0][1]
        assert "the snapshot's model is other, this engine's is fake" in caplog.text
        assert server.metrics.session_woken.labels("recomputed")._value.get() == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def _filled(disk: Path) -> Path:
    """A file that takes all the room there is."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


async def _is_ready(client: Any) -> bool:
    return bool((await client.get("/readyz")).status_code == 200)


async def test_a_full_disk_refuses_turns_by_name_and_all_is_well_once_there_is_room(small_disk: Path) -> None:
    data = small_disk / "data"
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(data), max_parked=9) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        texts = await _talk(client, session, "a")
        file = await downloaded(client, session)
        before = (await client.get(f"/sessions/{session}")).json()
        filler = _filled(small_disk)
        for _ in range(2):
            refused = await client.post(chat_path(session), json=said(*texts, "b" * 200))
            assert refusal_of(refused) == (503, "journal_failed")
            assert str(data) in error_of(refused)["message"]
        assert not await _is_ready(client)
        assert (await client.post("/sessions/import", content=file)).status_code == 503
        after = (await client.get(f"/sessions/{session}")).json()
        assert (after["messages"], after["history_length"]) == (before["messages"], before["history_length"])
        assert len((await client.get("/sessions")).json()["data"]) == 1
        filler.unlink()
        texts = await _talk(client, session, *texts, "b")
        assert await _is_ready(client)
        assert (await client.post("/sessions/import", content=file)).status_code == 200
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(data), max_parked=9) as server,
        client_of(server) as client,
    ):
        kept = (await client.get(f"/sessions/{session}")).json()["messages"]
        assert [message["content"] for message in kept] == texts
        assert len((await client.get("/sessions")).json()["data"]) == 2


async def test_a_read_only_directory_keeps_a_server_from_starting_and_is_named(small_disk: Path) -> None:
    data = small_disk / "data"
    session, texts = await _left_behind(data)
    _remount(small_disk, "ro")
    with pytest.raises(ConfigError, match=rf"{data}.*--data-dir"):
        async with serving(wordy_engine(), default_chat(), data_dir=str(data)):
            pass
    _remount(small_disk, "rw")
    async with serving(wordy_engine(), default_chat(), data_dir=str(data)) as server, client_of(server) as client:
        await _talk(client, session, *texts, "b")


async def test_a_reply_that_is_damaged_on_disk_is_never_served_and_the_session_goes_on(tmp_path: Path) -> None:
    session, texts = await _left_behind(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        ((number, content),) = connection.execute(
            "SELECT bodies.id, content FROM turns JOIN bodies ON bodies.id = response"
        ).fetchall()
        changed = content.replace(b'"assistant"', b'"assistent"')
        assert changed != content
        connection.execute("UPDATE bodies SET content = ? WHERE id = ?", (changed, number))
        connection.commit()
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        for path in (f"/sessions/{session}", f"/sessions/{session}/export"):
            refused = await client.get(path)
            assert refusal_of(refused) == (503, "storage_unavailable")
            assert "the response of turn 1" in error_of(refused)["message"]
        await _talk(client, session, *texts, "b")
        assert (await client.post(f"/sessions/{session}/samples")).status_code == 200


@pytest.mark.parametrize("keeps_snapshots", [True, False])
async def test_the_real_model_goes_on_after_restarts_and_moves_with_an_undisturbed_sessions_tokens(
    default_engine: TorchEngine, tmp_path: Path, keeps_snapshots: bool
) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path), "max_parked": 9}
    if not keeps_snapshots:
        options |= {"snapshot_memory_mb": 0, "snapshot_disk_mb": 0}

    def asked(session: str, seed: int) -> pb.TurnRequest:
        return turn(session, seed, token_ids=[1, 9690, 504 + seed], max_tokens=4)

    prompt = [1, *range(1000, 1069)]
    expected, found = [], []
    async with serving(default_engine, **options) as server:
        calm, moved = await create(server, prompt), await create(server, prompt)
        for seed in (0, 3, 0, 4):  # 0: greedy
            expected.append(await told(server.stub.Turn(asked(calm, seed))))
        found.append(await told(server.stub.Turn(asked(moved, 0))))
    async with serving(default_engine, **options) as server:
        found.append(await told(server.stub.Turn(asked(moved, 3))))
        info = await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=moved))
        assert info.dropped_token_count > 0
        how = "snapshot" if keeps_snapshots else "recomputed"
        assert server.metrics.session_woken.labels(how)._value.get() == 1
        data = await exported(server, moved, without_snapshot=not keeps_snapshots)
    async with serving(default_engine) as elsewhere:
        answer = await imported(elsewhere, data, 1 << 20)
        length = answer.history_length
        counts = (answer.reused_tokens, answer.recomputed_tokens)
        assert counts == ((length, 0) if keeps_snapshots else (0, length))
        for seed in (0, 4):
            found.append(await told(elsewhere.stub.Turn(asked(answer.session_id, seed))))
    if keeps_snapshots:
        assert found == expected  # logprobs too, bit for bit
    assert [[token for token, _ in one] for one in found] == [[token for token, _ in one] for one in expected]


async def test_a_directory_of_another_tokenizer_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of = servers.model_of
    monkeypatch.setattr(servers, "model_of", lambda engine: replace(model_of(engine), tokenizer_hash="abcd"))
    await _left_behind(tmp_path)
    noted = tmp_path / "model.json"
    facts = json.loads(noted.read_text())
    noted.write_text(json.dumps(facts | {"name": "other", "tokenizer_hash": "0123"}))
    with pytest.raises(ConfigError, match="was used with 'other', which has another tokenizer"):
        async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)):
            pass
    noted.write_text("{")
    with pytest.raises(ConfigError, match=r"model\.json is damaged"):
        async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)):
            pass
    noted.write_text("")  # a loss of power, where an earlier version wrote it
    async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        assert len((await client.get("/sessions")).json()["data"]) == 1
    assert json.loads(noted.read_text()) == facts


# Loss of power


class Disk:
    """What of a directory would be left if the power failed now, by what was synced.

    The contents of SQLite's own files count as synced, and the name of its log: SQLite is trusted with those.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[int, dict[str, int]] = {}  # directory -> its names when it was synced
        self._contents: dict[int, bytes] = {}  # file -> its content when it was synced

    def sync(self, file: int) -> None:
        inode = os.fstat(file).st_ino
        if stat.S_ISDIR(os.fstat(file).st_mode):
            self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(file)}
        else:
            [path] = [path for path in self._root.rglob("*") if path.stat().st_ino == inode]
            self._contents[inode] = path.read_bytes()

    def left(self, folder: Path | None = None, *, has_new_names: bool) -> dict[Path, bytes | None]:
        """Files and directories after the loss. Names that were not synced may be there (`has_new_names`) or not."""
        folder = folder or self._root
        names = self._names.get(folder.stat().st_ino, {})
        found: dict[Path, bytes | None] = {}
        for path in sorted(folder.iterdir()):
            inode = path.stat().st_ino
            if not (has_new_names or names.get(path.name) == inode or path.name.endswith("-wal")):
                continue
            is_database = path.name.startswith("journal.db")
            if path.is_dir():
                found |= {path: None} | self.left(path, has_new_names=has_new_names)
            else:
                found[path] = path.read_bytes() if is_database else self._contents.get(inode, b"")
        return found

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """`on_change` is called after everything that our own code does to files."""

        def wrapped(name: str) -> Callable[..., Any]:
            plain = getattr(os, name)

            def call(*values: Any, **options: Any) -> Any:
                result = plain(*values, **options)
                if name in ("fsync", "fdatasync"):
                    self.sync(*values)
                on_change()
                return result

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "mkdir", "write", "pwrite", "ftruncate", "replace", "unlink", "fsync", "fdatasync"):
                patch.setattr(os, name, wrapped(name))
            yield


async def test_a_loss_of_power_at_any_moment_leaves_a_directory_that_opens_with_all_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    model = replace(servers.model_of(SlowEngine()), tokenizer_hash="abcd")
    replies: dict[int, bytes] = {}
    losses: list[tuple[dict[Path, bytes | None], dict[int, bytes]]] = []

    def lose_power() -> None:
        for has_new_names in (True, False):
            loss = (disk.left(has_new_names=has_new_names), dict(replies))
            if loss not in losses:
                losses.append(loss)

    @contextlib.asynccontextmanager
    async def opened(folder: Path) -> Any:
        with open_storage(ServeConfig(data_dir=str(folder / "a" / "data")), Metrics(), model) as storage:
            try:
                yield storage.journal
            finally:
                await storage.journal.close()

    with disk.watched(lose_power):
        for numbers in ((1, 2), (3,)):
            async with opened(root) as journal:
                if numbers[0] == 1:
                    await journal.write(session())
                for number in numbers:
                    reply = bytes([number]) * (HEAVY if number % 2 else 9)
                    await journal.write(recorded(number, response=reply))
                    replies[number] = reply
                    lose_power()
    assert len(losses) > 10
    assert len(losses[-1][1]) == 3
    for index, (files, acknowledged) in enumerate(losses):
        folder = tmp_path / str(index)
        folder.mkdir()
        for path, content in files.items():
            copy = folder / path.relative_to(root)
            copy.mkdir() if content is None else copy.write_bytes(content)
        async with opened(folder) as journal:
            for number, reply in acknowledged.items():
                assert await journal.read_response("a", number) == reply
        shutil.rmtree(folder)


async def test_a_disk_that_is_full_at_start_loses_nothing_and_it_says_how_to_make_room(
    small_disk: Path,
) -> None:
    data = small_disk / "data"
    session_id, texts = await _left_behind(data)
    filler = _filled(small_disk)
    with pytest.raises(ConfigError, match=r"No session is lost: .*free some space .*snapshots are caches"):
        async with serving(wordy_engine(), default_chat(), data_dir=str(data)):
            pass
    filler.unlink()
    async with serving(wordy_engine(), default_chat(), data_dir=str(data)) as server, client_of(server) as client:
        await _talk(client, session_id, *texts, "b")


async def test_a_deleted_log_makes_a_server_unready_and_refuses_turns_until_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repair = SqliteJournal._repair
    may_repair = threading.Event()

    def repair_later(journal: SqliteJournal) -> None:
        if not may_repair.is_set():
            raise OSError("journal.db-wal was deleted or replaced while the server runs")
        repair(journal)

    monkeypatch.setattr(SqliteJournal, "_repair", repair_later)
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        session_id = await open_session(client)
        texts = await _talk(client, session_id, "a")
        (tmp_path / "journal.db-wal").unlink()
        refused = await client.post(chat_path(session_id), json=said(*texts, "b"))
        assert refusal_of(refused) == (503, "journal_failed")
        assert "journal.db-wal was deleted" in error_of(refused)["message"]
        unready = await client.get("/readyz")
        assert unready.status_code == 503
        assert "journal.db-wal was deleted" in unready.text
        may_repair.set()
        await eventually(lambda: client.get("/readyz"), lambda answer: answer.status_code == 200)
        texts = await _talk(client, session_id, *texts, "b")
        shutil.copytree(tmp_path, tmp_path / "crashed")
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path / "crashed")) as server,
        client_of(server) as client,
    ):
        kept = (await client.get(f"/sessions/{session_id}")).json()["messages"]
        assert [message["content"] for message in kept] == texts


async def test_what_the_salvage_command_saves_goes_on_in_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, saved = tmp_path / "data", tmp_path / "saved"
    async with serving(wordy_engine(), default_chat(), data_dir=str(data)) as server, client_of(server) as client:
        whole, damaged = await open_session(client), await open_session(client)
        texts = await _talk(client, whole, "a")
        await _talk(client, damaged, *await _talk(client, damaged, "a"), "text to be found")
    database = data / "journal.db"
    database.write_bytes(database.read_bytes().replace(b"text to be found", b"text to be f0und"))
    command = ["sessions", "salvage", str(data), "--out", str(saved)]
    assert await asyncio.to_thread(main, command) == 1
    said_so = capsys.readouterr()
    assert said_so.out == f"{saved}: 1 session saved whole, 1 damaged\n"
    assert f"session {damaged}: the first 1 turns were saved" in said_so.err
    async with serving(wordy_engine(), default_chat(), data_dir=str(saved)) as server, client_of(server) as client:
        await _talk(client, whole, *texts, "b")
        assert (await client.get(f"/sessions/{damaged}")).json()["turns"] == 1
