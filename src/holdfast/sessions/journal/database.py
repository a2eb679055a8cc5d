"""What the journal needs of a database, and SQLite as one. Blocks.

Queries are the same for every database: SQL that all of them understand, with numbered parameters (`?1`).
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.sessions.record import Stored

_ROWS_AT_ONCE = 32  # each number of rows is a statement of its own, which the connection keeps prepared


class Row(Protocol):
    """Columns by name."""

    def __getitem__(self, name: str, /) -> Any: ...


class Database(Protocol):
    """One connection, in one thread at a time. Whoever has it begins and ends transactions."""

    def select(self, query: str, *values: object) -> Sequence[Row]: ...

    def execute(self, query: str, *values: object) -> None: ...

    def deliver(self, turns: Sequence[tuple[str, int]], mask: int) -> None:
        """Note of turns, each by session and number, that they were delivered, and flip the bits of `mask` in the sums
        of those of which it was not noted before."""

    def insert(self, rows: Mapping[str, Sequence[Sequence[Stored]]]) -> None:
        """Rows by table, with all columns of the table in their order."""

    def next_step(self) -> int:
        """Spans and turns share one count, so that their order is on record. What is rolled back leaves a gap."""

    def next_body(self) -> int:
        """The id of a row of `bodies`."""


class SqliteDatabase:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._last_step: int | None = None
        self._last_body: int | None = None

    def select(self, query: str, *values: object) -> Sequence[Row]:
        cursor = self._connection.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, values).fetchall()

    def execute(self, query: str, *values: object) -> None:
        self._connection.execute(query, values)

    def deliver(self, turns: Sequence[tuple[str, int]], mask: int) -> None:
        for start in range(0, len(turns), _ROWS_AT_ONCE):
            some = turns[start : start + _ROWS_AT_ONCE]
            self._connection.execute(
                f"UPDATE turns SET is_delivered = 1, checksum = (checksum | {mask}) - (checksum & {mask})"
                " WHERE is_delivered = 0 AND rowid IN (SELECT turns.rowid FROM"
                f" (VALUES {', '.join(['(?, ?)'] * len(some))}) JOIN turns ON session = column1 AND number = column2)",
                [value for turn in some for value in turn],
            )

    def insert(self, rows: Mapping[str, Sequence[Sequence[Stored]]]) -> None:
        """Many rows in one statement: each call into SQLite releases the GIL and has to wait to get it back. With one
        call for each row, a busy server and its journal would pass it back and forth all the time."""
        for table, of_table in rows.items():
            self._insert(table, of_table)

    def _insert(self, table: str, rows: Sequence[Sequence[Stored]]) -> None:
        row = f"({', '.join('?' * len(rows[0]))})"
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            values = [value for row_values in some for value in row_values]
            self._connection.execute(f"INSERT INTO {table} VALUES {', '.join([row] * len(some))}", values)

    def next_step(self) -> int:
        if self._last_step is None:
            self._last_step = max(self._highest("step", "spans"), self._highest("step", "turns"))
        self._last_step += 1
        return self._last_step

    def next_body(self) -> int:
        if self._last_body is None:
            self._last_body = self._highest("id", "bodies")
        self._last_body += 1
        return self._last_body

    def _highest(self, column: str, table: str) -> int:
        return int(self._connection.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").fetchone()[0])
