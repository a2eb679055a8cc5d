"""`holdfast journal`: data directories and databases checked, migrated and copied; and the check of a large one while
it is in use."""

import random
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.sessions.journal.sqlite import SqliteJournal
from tests.talking import until
from tests.test_journal import many_written


@pytest.mark.parametrize("page", [None, 3, 4, 9])
async def test_damage_in_a_large_database_is_found_while_it_is_in_use(tmp_path: Path, page: int | None) -> None:
    await many_written(tmp_path)
    path = tmp_path / "journal.db"
    data = bytearray(path.read_bytes())
    if page is not None:
        data[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
        path.write_bytes(data)
    found: list[bool] = []
    try:
        journal = SqliteJournal(tmp_path, max_checked_bytes=0, on_damage=lambda: found.append(True))
    except ConfigError as exc:  # opening reads that page
        assert page is not None
        assert "is damaged" in str(exc)
        return
    assert journal._later_check is not None
    thread = journal._later_check._thread
    await until(lambda: not thread.is_alive())
    assert (journal.health is not None) == bool(found) == (page is not None)
    assert "is damaged" in (journal.health or "is damaged")
    await journal.close()


async def test_a_journal_can_be_closed_while_it_is_checked(tmp_path: Path) -> None:
    await many_written(tmp_path)
    for _ in range(20):
        await SqliteJournal(tmp_path, max_checked_bytes=0).close()
