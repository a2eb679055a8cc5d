"""Many rows in one statement are the rows that one statement each would have made."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from holdfast.sessions.journal.base import Rewarded, TurnDelivered
from holdfast.sessions.journal.database import SqliteDatabase
from holdfast.sessions.journal.recorder import RowBatch
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.record import TurnRecord, to_stored
from tests.journaling import name, open_sessions, opening, same_turn, spoken

NUM_TURNS = 45  # statements of 32, 8, 4 and 1


async def _written(directory: Path, *, together: bool) -> None:
    journal = SqliteJournal(directory)
    await journal.write(opening(0))
    writes = [spoken(0, number) for number in range(1, NUM_TURNS + 1)]
    if together:
        await journal.write(*(entry for write in writes for entry in write))
    else:
        for write in writes:
            await journal.write(*write)
    await journal.close()


@pytest.mark.parametrize("together", [True, False])
async def test_one_commit_of_many_turns_holds_what_many_commits_hold(tmp_path: Path, together: bool) -> None:
    await _written(tmp_path, together=together)
    journal = SqliteJournal(tmp_path)
    (session,) = open_sessions(journal)
    assert all(same_turn(session, 0, number) for number in range(1, NUM_TURNS + 1))
    assert await journal.read_response(name(0), NUM_TURNS) == spoken(0, NUM_TURNS)[2].turn.response
    await journal.close()


async def test_turns_are_delivered_whether_or_not_they_have_a_reward(tmp_path: Path) -> None:
    await _written(tmp_path, together=True)
    journal = SqliteJournal(tmp_path)
    await journal.write(Rewarded(name(0), 2, 0.5))
    entries = [TurnDelivered(name(0), number) for number in (1, 2, 3, 1)]
    await asyncio.gather(journal.write(*entries), journal.write(Rewarded(name(0), 3, 1.5)))
    await journal.close()
    journal = SqliteJournal(tmp_path)
    (session,) = open_sessions(journal)  # every sum is right: a wrong one would be a failure
    assert session.failure is None
    told = [(turn.is_delivered, turn.reward) for turn in session.turns[:4]]
    assert told == [(True, None), (True, 0.5), (True, 1.5), (False, None)]
    await journal.close()


def test_every_field_of_a_turn_is_stored_in_the_order_of_the_structure() -> None:
    assert tuple(to_stored(TurnRecord(number=1))) == TurnRecord.__struct_encode_fields__


def test_rows_that_were_cleared_never_come() -> None:
    connection = sqlite3.connect(":memory:")
    for table in ("bodies", "turns", "spans"):
        connection.execute(f"CREATE TABLE {table} (a, b)")
    pending = RowBatch(SqliteDatabase(connection))
    pending.add("turns", 1, 2)
    pending.clear()
    for number in range(NUM_TURNS):
        pending.add("spans", number, None)
    pending.flush()
    pending.flush()
    assert connection.execute("SELECT count(*) FROM turns").fetchone() == (0,)
    assert [row[0] for row in connection.execute("SELECT a FROM spans")] == list(range(NUM_TURNS))
    connection.close()
