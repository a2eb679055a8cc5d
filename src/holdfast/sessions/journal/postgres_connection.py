"""Connections to PostgreSQL: how they are opened, what they raise, and the journal's queries on them. Blocks."""

import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg.rows import dict_row
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper, TextLoader

from holdfast.errors import ConfigError
from holdfast.sessions.journal.database import Row
from holdfast.sessions.journal.postgres_pipeline import Connection, Statements
from holdfast.sessions.record import Stored

logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of what it also raises

LEAST_VERSION = 14
_BLOCK = 2**16  # steps and bodies that a commit may number with one value of the sequence
_ADVICE = (  # what to do about a connection that is refused, by what the message says
    (r"password authentication failed|no password supplied", "check the user and the password in the URL"),
    (r"role .* does not exist", "create this role, or name another user in the URL"),
    (r"database .* does not exist", "create it (CREATE DATABASE), or name another one in the URL"),
    (r"permission denied|pg_hba\.conf", "allow this user to connect to this database"),
    (r"too many (clients|connections)|connection slots", "raise max_connections, or stop other clients"),
    (r"starting up|shutting down|recovery", "wait until the database accepts connections, and start again"),
    (r"SSL|certificate", "check sslmode and the certificates in the URL"),
    ("", "check that the database runs and that host and port in the URL are right"),
)


class TextDumper(StrBinaryDumper):
    """PostgreSQL's text holds any character but NUL: that one is written as escape and 0, and escape twice."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(escaped(obj))


class UnescapingLoader(TextLoader):
    def load(self, data: Buffer) -> bytes | str:
        text = super().load(data)
        assert isinstance(text, str)
        if "\x1b" not in text:
            return text
        return re.sub("\x1b(.)", lambda found: "\0" if found[1] == "0" else found[1], text, flags=re.DOTALL)


class Integers(list[int | None]):
    pass


class Floats(list[float | None]):
    pass


class Texts(list[str | None]):
    pass


class Binaries(list[bytes | None]):
    pass


class ArrayDumper(Dumper):
    """One column of many rows as an array in PostgreSQL's binary format: a single parameter of a fixed type, so that
    one prepared statement inserts any number of rows."""

    format = Format.BINARY
    element: int
    encode: Callable[[Any], bytes]

    def dump(self, obj: Sequence[Any]) -> Buffer | None:
        encode, parts = type(self).encode, [b""]
        for value in obj:
            if value is None:
                parts.append(b"\xff\xff\xff\xff")
            else:
                data = encode(value)
                parts.append(len(data).to_bytes(4, "big"))
                parts.append(data)
        parts[0] = struct.pack("!iiIii", 1, 1, self.element, len(obj), 1)
        return b"".join(parts)


def escaped(text: str) -> str:
    if "\0" in text or "\x1b" in text:
        return text.replace("\x1b", "\x1b\x1b").replace("\0", "\x1b0")
    return text


def _dumper(name: str, element: int, array_oid: int, encode: Callable[[Any], bytes]) -> type[ArrayDumper]:
    return type(name, (ArrayDumper,), {"element": element, "oid": array_oid, "encode": staticmethod(encode)})


_DUMPERS: dict[type, type[Dumper]] = {
    str: TextDumper,
    int: Int8BinaryDumper,
    Integers: _dumper("IntegersDumper", 20, 1016, struct.Struct("!q").pack),
    Floats: _dumper("FloatsDumper", 701, 1022, struct.Struct("!d").pack),
    Texts: _dumper("TextsDumper", 25, 1009, lambda text: escaped(text).encode()),
    Binaries: _dumper("BinariesDumper", 17, 1001, bytes),
}
# The types of the columns of each table, in their order.
_COLUMNS: dict[str, tuple[type[list[Any]], ...]] = {
    "sessions": (
        *(Texts, Integers, Texts, Texts, Texts, Texts, Texts, Integers, Texts, Floats, Texts, Integers),
        *(Integers, Floats, Texts, Floats, Binaries, Floats, Texts, Texts),
    ),
    "spans": (Integers, Texts, Texts, Integers, Binaries, Binaries, Binaries, Texts, Integers),
    "bodies": (Integers, Texts, Integers, Integers, Integers, Binaries),
    "turns": (
        *(Texts, Integers, Integers, Binaries, Binaries, Binaries, Binaries, Binaries, Binaries, Binaries),
        *(Texts, Binaries, Texts, Binaries, Integers, Integers, Integers, Integers, Integers, Floats, Integers),
    ),
}
_TYPES = {Integers: "bigint[]", Floats: "float8[]", Texts: "text[]", Binaries: "bytea[]"}


class PostgresDatabase:
    """The journal's queries among the statements of a connection. `begin_commit` must be called before rows are
    numbered."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._next_step = self._next_body = self.first_step = 0  # of the commit

    def begin_commit(self, base: int) -> None:
        """`base`: a value of the sequence, for this commit alone."""
        self._next_step = self._next_body = self.first_step = base * _BLOCK

    def select(self, query: str, *values: object) -> Sequence[Row]:
        return self._statements.select(numbered(query), values)

    def execute(self, query: str, *values: object) -> None:
        self._statements.send(numbered(query), values)

    def deliver(self, turns: Sequence[tuple[str, int]], mask: int) -> None:
        self._statements.send(
            b"UPDATE turns SET is_delivered = 1, checksum = checksum # $3"
            b" FROM unnest($1::text[], $2::bigint[]) AS delivered (in_session, turn)"
            b" WHERE session = in_session AND number = turn AND is_delivered = 0",
            [Texts(session for session, _ in turns), Integers(number for _, number in turns), mask],
        )

    def insert(self, rows: Mapping[str, Sequence[Sequence[Stored]]]) -> None:
        columns = [
            kind(values)
            for table, of_table in rows.items()
            for kind, values in zip(_COLUMNS[table], zip(*of_table, strict=True), strict=True)
        ]
        self._statements.send(_insertion(*rows), columns)

    def next_step(self) -> int:
        self._next_step = self._after(self._next_step)
        return self._next_step

    def next_body(self) -> int:
        self._next_body = self._after(self._next_body)
        return self._next_body

    def _after(self, number: int) -> int:
        if (number + 1) % _BLOCK:
            return number + 1
        return int(self.select("SELECT nextval('steps') AS base")[0]["base"]) * _BLOCK


@cache
def numbered(query: str) -> bytes:
    """The query with parameters as PostgreSQL writes them."""
    return query.replace("?", "$").encode()


@cache
def _insertion(*tables: str) -> bytes:
    """One statement for all of the tables."""
    parts, number = [], 0
    for table in tables:
        arrays = []
        for kind in _COLUMNS[table]:
            number += 1
            arrays.append(f"${number}::{_TYPES[kind]}")
        parts.append(f"INSERT INTO {table} SELECT * FROM unnest({', '.join(arrays)})")
    *first, last = parts
    others = ", ".join(f"to_{table} AS ({part})" for table, part in zip(tables, first, strict=False))
    return f"WITH {others} {last}".encode() if others else last.encode()


def connect(url: str, *, name: str = "", lease_s: float = 600.0) -> Connection:
    """A connection for the member of that name, if any. Raises psycopg.OperationalError.

    The server rolls back its transactions where nothing comes from us for half a lease, and a lock that it has to wait
    for longer than a tenth is an error.
    """
    defaults = {
        "connect_timeout": max(2, min(5, int(lease_s / 3))),
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": int(1000 * lease_s),
    }
    given = conninfo_to_dict(url)
    connection = Connection.connect(
        url,
        autocommit=True,
        cursor_factory=psycopg.RawCursor,
        prepare_threshold=None,  # psycopg deallocates all statements after a rollback, those of `Statements` too
        row_factory=dict_row,
        application_name=application_name(name),
        **{name: value for name, value in defaults.items() if name not in given},  # type: ignore[arg-type]
    )
    try:
        connection.silence_s = lease_s
        for kind, dumper in _DUMPERS.items():
            connection.adapters.register_dumper(kind, dumper)
        connection.adapters.register_loader("text", UnescapingLoader)
        [about] = connection.execute(
            "SELECT set_config('idle_in_transaction_session_timeout', $1, false),"
            " set_config('lock_timeout', $2, false),"
            " CASE WHEN current_setting('synchronous_commit') = 'off'"
            " THEN set_config('synchronous_commit', 'on', false) END,"
            " (SELECT set_config(name, 'lz4', false) FROM pg_settings"
            " WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)),"
            " (SELECT backend_start::text AS started FROM pg_stat_activity WHERE pid = pg_backend_pid())",
            [str(int(500 * lease_s)), str(int(100 * lease_s))],
        ).fetchall()
        connection.identity = (connection.info.backend_pid, about["started"])
        connection.statements = Statements(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def application_name(member: str) -> str:
    return f"holdfast {member}".strip()[:63]


def end_backend(connection: Connection, identity: tuple[int, str]) -> None:
    """End what another connection of ours that is lost may have left on the server: its transaction holds locks."""
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start::text = $2",
        list(identity),
    )


def place_of(url: str) -> str:
    """The database that a URL names, without the password. Raises ConfigError where it is none."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as exc:
        raise ConfigError(
            f"--journal is not a URL of a PostgreSQL database ({one_line(exc)}); "
            "write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from exc
    if not str(given.get("port") or "0").replace(",", "").isdecimal():
        raise ConfigError(f"the port in --journal must be a number, got {given['port']!r}")
    port = f":{given['port']}" if given.get("port") else ""
    return f"{given.get('host') or 'localhost'}{port}/{given.get('dbname') or given.get('user') or ''}"


def cannot_connect(place: str, exc: psycopg.Error) -> ConfigError:
    """The error for someone who starts a server: what is wrong, and what to do."""
    message = one_line(exc)
    advice = next(advice for pattern, advice in _ADVICE if re.search(pattern, message))
    return ConfigError(f"cannot connect to the database {place}: {message}; {advice}")


def one_line(exc: BaseException) -> str:
    """The message of the server or the client, without where it was seen."""
    first = (str(exc) or type(exc).__name__).strip().splitlines()[-1 if "Multiple connection" in str(exc) else 0]
    return re.sub(r"^(connection failed: )?(connection to server at .*? failed: )?(FATAL:\s+)?", "", first).rstrip(".")


def is_lost(connection: Connection) -> bool:
    return connection.closed or connection.broken
