"""Rows on their way into the database, many in one statement.

Each call into SQLite lets other threads run, and has to wait until it may go on: with a call for each row, a busy
server and its journal would hand Python's lock to and fro all the time.
"""

import sqlite3

_TABLES = ("bodies", "turns", "spans")  # rows refer to those of earlier tables
_AT_ONCE = (32, 16, 8, 4, 2, 1)  # few sizes, so that few statements have to be prepared


class Pending:
    """Mutable. What is not flushed is not there for anyone who looks into the database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in _TABLES}

    def add(self, table: str, *values: object) -> None:
        self._rows[table].append(values)

    def flush(self) -> None:
        for table, rows in self._rows.items():
            start = 0
            for size in _AT_ONCE:
                while len(rows) - start >= size:
                    self._insert(table, rows[start : start + size])
                    start += size
            rows.clear()

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()

    def _insert(self, table: str, rows: list[tuple[object, ...]]) -> None:
        row = f"({', '.join('?' * len(rows[0]))})"
        values = [value for row_values in rows for value in row_values]
        self._connection.execute(f"INSERT INTO {table} VALUES {', '.join([row] * len(rows))}", values)
