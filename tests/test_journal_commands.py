"""`holdfast journal`: data directories and databases checked, migrated and copied; and the check of a large one while
it is in use."""

import asyncio
import contextlib
import random
import sqlite3
from array import array
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import ConfigError, StorageUnavailable
from holdfast.sessions.journal import damage
from holdfast.sessions.journal.base import (
    ForkedFrom,
    HistoryRewound,
    Journal,
    Pinned,
    Rewarded,
    SessionClosed,
    SessionKind,
    SessionPurged,
    SessionRested,
    SessionSummary,
    TokensGiven,
    TokensSampled,
    TurnDelivered,
    TurnRecorded,
)
from holdfast.sessions.journal.copying import compare, copy_sessions
from holdfast.sessions.journal.files import write_file
from holdfast.sessions.journal.places import existing, joined, noted_model
from holdfast.sessions.journal.sqlite import SqliteJournal
from tests.postgres import fresh_database
from tests.talking import until
from tests.test_journal import many_written, opened, session, turn


@pytest.mark.parametrize("page", [None, 3, 4, 9])
async def test_damage_in_a_large_database_is_found_while_it_is_in_use(
    tmp_path: Path, page: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "_DELAY_S", 0.0)
    await many_written(tmp_path)
    path = tmp_path / "journal.db"
    data = bytearray(path.read_bytes())
    if page is not None:
        data[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
        path.write_bytes(data)
    found: list[bool] = []
    try:
        journal = SqliteJournal(tmp_path, max_checked_bytes=0, on_damage=lambda: found.append(True))
    except ConfigError:  # opening reads that page
        assert page is not None
        return
    assert journal._later_check is not None
    thread = journal._later_check._thread
    await until(lambda: not thread.is_alive())
    assert (journal.health is not None) == bool(found) == (page is not None)
    assert "is damaged" in (journal.health or "is damaged")
    await journal.close()


async def test_a_journal_can_be_closed_while_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "_DELAY_S", 0.0)
    await many_written(tmp_path)
    for _ in range(20):
        await SqliteJournal(tmp_path, max_checked_bytes=0).close()


# Commands


async def filled(journal: Journal, *, seed: int = 1) -> None:
    """Sessions of every kind: with names, forks whose source is purged, rewards, closed ones, some at rest."""
    draw = random.Random(seed)

    def chat_turn(session_id: str, number: int, size: int = 50) -> TurnRecorded:
        bodies = {name: draw.randbytes(size) for name in ("request", "response")}
        key = {"idempotency_key": f"key {number}", "body_hash": draw.randbytes(32), "num_control": number % 3}
        reward = draw.choice([None, -0.5, 0.0])
        return turn(number, session_id, **bodies, **key, reward=reward, is_delivered=draw.random() < 0.5)

    for number in range(1, 13):
        id, name = f"{number:032x}", f"name {number % 5}" if number % 2 else ""
        kind: SessionKind = ("tokens", "chat", "forest")[number % 3]
        await journal.write(session(id, number, kind=kind, name=name, metadata={"z": "1", "a": "é"}, sink=number))
        if kind == "tokens":
            sampled = array("i", range(number)), array("d", [-0.1] * number), array("d", [-0.0] * number)
            await journal.write(TokensGiven(id, array("i", [1, 2])), TokensGiven(id, array("i", [3])))
            await journal.write(TokensSampled(id, *sampled, "eos", "v2"), HistoryRewound(id, 2))
        else:
            await journal.write(*(chat_turn(id, index, 100_000 if number == 5 else 50) for index in range(1, 6)))
            await journal.write(Rewarded(id, 2, 0.25), TurnDelivered(id, 3), Pinned(id, 100 + number))
        if number % 4 == 0:
            await journal.write(Rewarded(id, None, 1.5))
        if number % 3 == 1:
            summary = SessionSummary(history_length=number, given=(1, 2), sampled=(3, 4))
            await journal.write(SessionRested(id, 100.0 + number, summary))
        if number % 3 == 2:
            await journal.write(SessionRested(id, 50.0, None))
        if number in (1, 3, 8, 11):  # 1 and 6, 11 would have the same name otherwise
            await journal.write(SessionClosed(id, "expired", 200.0 + number))
    for number, source in ((20, 5), (21, 2), (22, 20)):
        forked = ForkedFrom(f"{source:032x}", (1, 2) if number == 22 else (2, 4))
        await journal.write(session(f"{number:032x}", number, kind="chat", forked_from=forked))
        await journal.write(chat_turn(f"{number:032x}", 3), Rewarded(f"{number:032x}", 1, 9.0))
    await journal.write(SessionClosed(f"{2:032x}", "closed", 300.0))
    await journal.write(SessionPurged(f"{2:032x}"))


def holdfast(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def sizes(directory: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("turns", "bodies")}


def test_a_copy_has_all_that_the_original_has_and_shares_what_it_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prepare() -> None:
        async with opened(tmp_path / "data") as journal:
            await filled(journal)

    async def differences() -> int:
        async with opened(tmp_path / "data") as one, opened(tmp_path / "copy") as two:
            assert await two.next_number() == 23
            assert await two.find_named("me", "name 0") == await one.find_named("me", "name 0") is not None
            return await compare(one, two, lambda: None)

    asyncio.run(prepare())
    write_file(tmp_path / "data" / "model.json", b'{"name": "m", "tokenizer_hash": "h"}')
    before = digest_of(tmp_path / "data")
    assert holdfast("journal", "copy", tmp_path / "data", tmp_path / "copy") == 0
    assert "14 sessions copied and compared" in capsys.readouterr().out
    assert digest_of(tmp_path / "data") == before
    assert sizes(tmp_path / "copy") == sizes(tmp_path / "data")
    assert (tmp_path / "copy" / "model.json").read_bytes() == (tmp_path / "data" / "model.json").read_bytes()
    assert not (tmp_path / "copy" / "incomplete-copy").exists()
    assert asyncio.run(differences()) == 14
    assert holdfast("journal", "check", tmp_path / "copy") == 0
    assert "14 of 14 sessions are intact, with 44 turns" in capsys.readouterr().out
    assert holdfast("journal", "migrate", tmp_path / "copy") == 0


def digest_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.suffix in (".db", ".segment")}


@pytest.mark.parametrize("change", ["turn", "body", "name", "session"])
async def test_a_copy_that_differs_anywhere_is_found_out(tmp_path: Path, change: str) -> None:
    changes: dict[str, str] = {
        "turn": "DELETE FROM turns WHERE session LIKE '%04' AND number = 5",
        "name": "UPDATE sessions SET name = 'another' WHERE number = 9",
        "session": "DELETE FROM sessions WHERE number = 22",
        "body": "UPDATE bodies SET content = x'00' WHERE id = 3",
    }
    async with opened(tmp_path / "data") as one, opened(tmp_path / "copy") as two:
        await filled(one)
        await copy_sessions(one, two, lambda: None)
        assert await compare(one, two, lambda: None) == 14
        with contextlib.closing(sqlite3.connect(tmp_path / "copy" / "journal.db")) as db:
            db.execute("PRAGMA foreign_keys = ON")
            db.execute(changes[change])
            db.commit()
        with pytest.raises(StorageUnavailable):
            await compare(one, two, lambda: None)


def test_a_copy_is_refused_where_it_cannot_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def prepare() -> None:
        async with opened(tmp_path / "data") as journal:
            await filled(journal)
            assert await asyncio.to_thread(holdfast, "journal", "copy", tmp_path / "data", tmp_path / "copy") != 0

    asyncio.run(prepare())
    assert "in use by another Holdfast" in capsys.readouterr().err
    (tmp_path / "copy" / "incomplete-copy").mkdir(parents=True, exist_ok=True)  # as an interrupted one leaves it
    (tmp_path / "copy" / "incomplete-copy" / "journal.db").write_bytes(b"half")
    assert holdfast("journal", "copy", tmp_path / "data", tmp_path / "copy") == 0
    assert holdfast("journal", "copy", tmp_path / "data", tmp_path / "copy") != 0
    assert "is not empty" in capsys.readouterr().err
    assert holdfast("journal", "copy", tmp_path / "nothing", tmp_path / "new") != 0
    assert "has no journal" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.db")) as db:
        db.execute("UPDATE turns SET sampled = x'00' WHERE session LIKE '%04' AND number = 3")
        db.commit()
    assert holdfast("journal", "copy", tmp_path / "data", tmp_path / "new") == 1
    assert "step" in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []
    assert holdfast("journal", "check", tmp_path / "data") == 1
    told = capsys.readouterr()
    assert f"session {4:032x}: step" in told.err
    assert "13 of 14 sessions are intact" in told.out


def test_sessions_go_to_a_database_and_come_back_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prepare() -> None:
        async with opened(tmp_path / "data") as journal:
            await filled(journal)

    async def look(url: str) -> None:
        async with existing(url) as journal:
            assert await journal.next_number() == 23
            assert [listed.member for listed in await journal.list_open("me")] == [""] * 10
            async with joined(journal):  # as a server that runs
                for command in (("copy", url, tmp_path / "new"), ("copy", tmp_path / "data", url)):
                    assert await asyncio.to_thread(holdfast, "journal", *command) == 2

    asyncio.run(prepare())
    write_file(tmp_path / "data" / "model.json", b'{"name": "m", "tokenizer_hash": "h"}')
    blobs = ["--blobs", tmp_path / "blobs"]
    with fresh_database() as url:
        assert holdfast("journal", "copy", tmp_path / "data", url, *blobs) == 0
        assert "14 sessions copied and compared" in capsys.readouterr().out
        num_long = len([path for path in (tmp_path / "blobs").rglob("*") if path.is_file()])
        assert num_long == 10  # those of one session; its forks share them
        asyncio.run(look(url))
        told = capsys.readouterr().err
        assert "uses the journal in 127.0.0.1" in told
        assert "has sessions already" in told
        assert holdfast("journal", "check", url, *blobs) == 0
        assert "14 of 14 sessions are intact, with 44 turns" in capsys.readouterr().out
        assert holdfast("journal", "check", url) == 1
        assert "--blobs is not set" in capsys.readouterr().err
        assert holdfast("journal", "migrate", url) == 0
        assert holdfast("journal", "copy", url, tmp_path / "back", *blobs) == 0
    assert sizes(tmp_path / "back") == sizes(tmp_path / "data")
    assert noted_model(str(tmp_path / "back")) == {"name": "m", "tokenizer_hash": "h"}

    async def both() -> int:
        async with opened(tmp_path / "data") as one, opened(tmp_path / "back") as two:
            return await compare(one, two, lambda: None)

    assert asyncio.run(both()) == 14
