"""All that can still be read of a damaged data directory, written to a new one. The old one is not changed. Blocks."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal import rows
from holdfast.sessions.journal.base import (
    Entry,
    ForkedFrom,
    Rewarded,
    SessionClosed,
    SessionKind,
    TurnRecorded,
)
from holdfast.sessions.journal.database import Row, SqliteDatabase
from holdfast.sessions.journal.files import write_file
from holdfast.sessions.journal.schema import MAGIC, lock
from holdfast.sessions.journal.segments import SegmentReader
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.record import TurnRecord

_DAMAGE = (sqlite3.Error, UnicodeDecodeError, ValueError, IndexError, StorageUnavailable, SessionNotFound)
_INDEXES = {"spans": "spans_of_session", "turns": "sqlite_autoindex_turns_1"}
_TABLES: dict[SessionKind, str] = {"tokens": "spans", "chat": "turns", "forest": "turns"}


@dataclass(frozen=True, slots=True)
class Salvaged:
    """`num_steps` (turns of a chat, spans of tokens) were saved, from the first on; `problem` says what was not."""

    session_id: str
    num_steps: int = 0
    problem: str = ""


async def salvage(source: Path, target: Path) -> list[Salvaged]:
    """Write to `target`, which must be new or empty, what is intact of each session: all of it, or its beginning."""
    _check(source, target)
    locked: list[int] = []
    try:
        lock(source, locked)
        journal = SqliteJournal(target)
        try:
            return await _saved(source, journal)
        finally:
            await journal.close()
    except BlockingIOError as exc:
        raise ConfigError(f"{source} is in use by a server; stop it first") from exc
    except sqlite3.Error as exc:
        raise ConfigError(f"nothing in {source / 'journal.db'} can be read: {exc}; restore a backup") from exc
    finally:
        for file in locked:
            os.close(file)


def _check(source: Path, target: Path) -> None:
    if not (source / "journal.db").exists():
        raise ConfigError(f"{source} is not the data directory of a server: it has no journal")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose a new directory")


async def _saved(source: Path, journal: SqliteJournal) -> list[Salvaged]:
    if (source / "model.json").exists():
        write_file(journal.directory / "model.json", (source / "model.json").read_bytes())
    found = []
    with (
        tempfile.TemporaryDirectory(dir=journal.directory) as folder,
        closing(_copied(source, Path(folder))) as connection,
    ):
        reader = DamagedDatabase(connection, SegmentReader(source / "segments"))
        for session_id in reader.session_ids():
            entries, salvaged = reader.read(session_id)
            await journal.write(*entries)
            found.append(salvaged)
    return found


def _copied(source: Path, folder: Path) -> sqlite3.Connection:
    """A connection to a copy: SQLite changes what it opens."""
    for name in ("journal.db", "journal.db-wal"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    with (folder / "journal.db").open("r+b") as file:
        file.write(MAGIC)
    connection = sqlite3.connect(folder / "journal.db", isolation_level=None)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute("PRAGMA writable_schema = ON")  # which also opens a database that was cut short
    connection.execute("SELECT id FROM sessions LIMIT 0")  # without its schema nothing can be read
    return connection


class DamagedDatabase:
    """Reads sessions from a database whose pages may be damaged.

    Which rows a session has is asked of the table and of its index: where either is damaged the other knows, and what
    neither can vouch for is left out.
    """

    def __init__(self, connection: sqlite3.Connection, segments: SegmentReader) -> None:
        self._connection = connection
        self._db = SqliteDatabase(connection)
        has_name = any(column[1] == "name" for column in connection.execute("PRAGMA table_info (sessions)"))
        self._missing = "" if has_name else ", NULL AS name"  # a version before sessions had names
        self._segments = segments
        self._rowids: dict[str, dict[str, set[int]]] = {}  # table -> session -> its rows
        self._end: dict[str, int | None] = {}  # table -> the last row that was found, where reading ended there
        self._indexed: dict[str, str | None] = {}  # the same for the index, which is ordered by session
        for table, index in _INDEXES.items():
            sessions: dict[str, set[int]] = {}
            self._rowids[table] = sessions
            last_row, self._end[table] = 0, None
            try:
                for last_row, session_id in self._select(f"SELECT rowid, session FROM {table} NOT INDEXED"):
                    sessions.setdefault(session_id, set()).add(last_row)
            except _DAMAGE:
                self._end[table] = last_row
            session_id, self._indexed[table] = "", None
            try:
                for rowid, session_id in self._select(f"SELECT rowid, session FROM {table} INDEXED BY {index}"):
                    sessions.setdefault(session_id, set()).add(rowid)
            except _DAMAGE:
                self._indexed[table] = session_id

    def session_ids(self) -> list[str]:
        """Those of all sessions of which anything was found."""
        found = {session_id for sessions in self._rowids.values() for session_id in sessions}
        for order in ("ASC", "DESC"):
            with suppress(*_DAMAGE):
                for _, session_id in self._select(f"SELECT number, id FROM sessions ORDER BY id {order}"):
                    found.add(session_id)
        return sorted(found)

    def read(self, session_id: str) -> tuple[list[Entry], Salvaged]:
        """The entries to write, and what was saved."""
        try:
            [row] = self._db.select(f"SELECT *{self._missing} FROM sessions WHERE id = ?1", session_id)
            opened, problem = rows.opened_of(row)
        except _DAMAGE as exc:
            return [], Salvaged(session_id, problem=f"how it was opened cannot be read ({exc})")
        if problem is not None:
            return [], Salvaged(session_id, problem=problem)
        if opened.forked_from:
            opened = replace(opened, forked_from=ForkedFrom(opened.forked_from.session_id))
        steps, problem = self._steps(session_id, _TABLES[opened.kind])
        entries: list[Entry] = [opened, *steps]
        if row["reward"] is not None:
            entries.append(Rewarded(session_id, None, row["reward"]))
        if row["closed_at"] is not None:
            entries.append(SessionClosed(session_id, row["closed_why"], row["closed_at"]))
        return entries, Salvaged(session_id, len(steps), problem)

    def _steps(self, session_id: str, table: str) -> tuple[list[Entry], str]:
        steps: list[Entry] = []
        end, indexed = self._end[table], self._indexed[table]
        is_sure = end is None or indexed is None or session_id < indexed
        for rowid in sorted(self._rowids[table].get(session_id, ())):
            try:
                if not is_sure and end is not None and rowid > end:
                    raise ValueError("the table and its index are damaged here")
                [row] = self._db.select(f"SELECT * FROM {table} WHERE rowid = ?1", rowid)
                steps.append(self._turn(row, len(steps) + 1) if table == "turns" else self._span(row))
            except _DAMAGE as exc:
                return steps, f"the first {len(steps)} {table} were saved; the next one cannot be read ({exc})"
        return steps, "" if is_sure else f"{len(steps)} {table} were saved; whether there were more cannot be known"

    def _turn(self, row: Row, number: int) -> Entry:
        turn = rows.turn_of(row)
        if turn is None or turn.number != number:
            raise ValueError(f"turn {number} is damaged")
        return TurnRecorded(row["session"], self._with_bodies(row["session"], turn))

    def _span(self, row: Row) -> Entry:
        span = rows.span_of(row)
        if span is None or isinstance(span, TurnRecord):
            raise ValueError("its checksum does not match")
        return span

    def _with_bodies(self, session_id: str, turn: TurnRecord) -> TurnRecord:
        bodies = {}
        for which in ("request", "response"):
            body = rows.body_row(self._db, session_id, turn.number, which)
            bodies[which] = rows.body_of(body, self._segments, f"the {which} of turn {turn.number}")
        return msgspec.structs.replace(turn, **bodies)

    def _select(self, query: str) -> Iterator[tuple[int, str]]:
        for number, session_id in self._connection.execute(query):
            if isinstance(number, int) and isinstance(session_id, str):  # others are not rows of ours
                yield number, session_id
