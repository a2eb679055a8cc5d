"""Journal entries to database rows, in the writer's thread and transaction; large bodies go to the segment files."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import StorageUnavailable
from holdfast.sessions.journal.base import (
    Entry,
    ForkedFrom,
    HistoryRewound,
    Pinned,
    Rewarded,
    SessionClosed,
    SessionOpened,
    SessionPurged,
    SessionRested,
    TokensGiven,
    TokensSampled,
    TurnDelivered,
    TurnRecorded,
)
from holdfast.sessions.journal.rows import (
    SAMPLED,
    SESSION_STATE,
    TURN_FIELDS,
    TURN_STATE,
    checksum_of,
    is_intact,
    row_checksum,
    select,
)
from holdfast.sessions.journal.segments import Segments
from holdfast.sessions.record import Stored, packed, to_stored

_INLINE_BYTES = 64 * 1024  # longer bodies go to the segment files
_TABLES = ("bodies", "turns", "spans")  # rows refer to those of earlier tables
_ROWS_AT_ONCE = (32, 16, 8, 4, 2, 1)  # few sizes, so that few statements have to be prepared

_DELIVERED = checksum_of(None, 0) ^ checksum_of(None, 1)  # what delivering adds to the sum of a turn without a reward


class Recorder:
    """Mutates the database and the segments; the caller begins, commits and rolls back both.

    Call `flush` before a commit and `discard` after a rollback: turns and spans are collected until then.
    """

    def __init__(self, connection: sqlite3.Connection, segments: Segments) -> None:
        self._connection = connection
        self._segments = segments
        self._rows = RowBatch(connection)
        self._delivered: list[tuple[str, int]] = []
        self._last_step: int | None = None
        self._last_body: int | None = None

    def record(self, entry: Entry) -> None:
        match entry:
            case SessionOpened():
                self._open(entry)
            case TokensGiven():
                self._span(entry.session_id, "given", tokens=packed(entry.tokens))
            case TokensSampled():
                self._span(
                    entry.session_id,
                    f"{SAMPLED} {entry.weight_version}" if entry.weight_version else SAMPLED,
                    tokens=packed(entry.tokens),
                    logprobs=packed(entry.logprobs),
                    sampling_logprobs=packed(entry.sampling_logprobs),
                    stop_reason=entry.stop_reason,
                )
            case HistoryRewound():
                self._span(entry.session_id, "rewound", length=entry.length)
            case TurnRecorded():
                bodies = {name: self._body_of(entry, name) for name in ("request", "response")}
                self._turn(entry.session_id, to_stored(entry.turn) | bodies)
            case TurnDelivered():
                self._delivered.append((entry.session_id, entry.number))
            case Rewarded(turn=None):
                self._change_session(entry.session_id, reward=entry.reward + 0.0)
            case Rewarded(turn=int(number)):
                self.flush()
                self._change_turn(entry.session_id, number, reward=entry.reward + 0.0)
            case Pinned():
                self._change_session(entry.session_id, sink=entry.sink)
            case SessionRested():
                self.flush()
                self._rest(entry)
            case SessionClosed():
                self._change_session(entry.session_id, closed_why=entry.why, closed_at=float(entry.at) + 0.0)
            case SessionPurged():
                self.flush()
                self._purge(entry.session_id)

    def flush(self) -> None:
        """Everything that was recorded is in the database."""
        self._rows.flush()
        delivered, self._delivered = self._delivered, []
        if delivered:
            self._deliver(delivered)

    def discard(self) -> None:
        """What was recorded and not committed is forgotten."""
        self._rows.clear()
        self._delivered.clear()

    def _open(self, entry: SessionOpened) -> None:
        fields = (
            entry.session_id,
            entry.number,
            entry.owner,
            entry.kind,
            entry.label,
            entry.group,
            json.dumps(dict(entry.metadata)),
            entry.pin_tokens,
            json.dumps(entry.eos_token_ids),
            float(entry.created_at) + 0.0,  # -0.0 comes back as 0.0
            json.dumps([entry.forked_from.session_id, entry.forked_from.turns]) if entry.forked_from else None,
        )
        state = (entry.sink, None, None, None)
        values = (*fields, row_checksum(fields, state), *state, None, None, entry.name or None)
        self._connection.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(values))})", values)
        if entry.forked_from and entry.copies_turns:
            self.flush()
            self._copy_turns(entry.forked_from, entry.session_id)

    def _copy_turns(self, source: ForkedFrom, session_id: str) -> None:
        query = "SELECT * FROM turns WHERE session = ? AND number = ?"
        for index, number in enumerate(source.turns):
            found = select(self._connection, query, source.session_id, number)
            if not found:
                raise LookupError(f"session {source.session_id} has no turn {number} on record")
            if not is_intact(found[0], TURN_FIELDS, TURN_STATE):
                raise StorageUnavailable(f"turn {number} of session {source.session_id} is damaged")
            own: dict[str, Stored] = {"number": index + 1, "parent": index}
            own |= {"ticket_key": "", "body_hash": b"", "num_control": 0}
            self._turn(session_id, dict(found[0]) | own)

    def _turn(self, session_id: str, values: Mapping[str, Stored]) -> None:
        """A row for a turn; `request` and `response` are the ids of its bodies."""
        values = {**values, "session": session_id, "step": self._next_step()}
        fields = [values[name] for name in TURN_FIELDS]
        reward = values["reward"]
        reward = float(reward) + 0.0 if isinstance(reward, int | float) else None  # -0.0 comes back as 0.0
        state: list[Stored] = [reward, int(bool(values["is_delivered"]))]
        self._rows.add("turns", *fields, row_checksum(fields, state), *state)

    def _span(
        self,
        session_id: str,
        kind: str,
        *,
        length: int = 0,
        tokens: bytes = b"",
        logprobs: bytes = b"",
        sampling_logprobs: bytes = b"",
        stop_reason: str | None = None,
    ) -> None:
        fields = (self._next_step(), session_id, kind, length, tokens, logprobs, sampling_logprobs, stop_reason)
        self._rows.add("spans", *fields, row_checksum(fields))

    def _body_of(self, entry: TurnRecorded, which: str) -> int:
        """The id of a turn's body, which another turn may have brought already."""
        content: bytes = getattr(entry.turn, which) or b""
        if entry.origin is not None:
            self.flush()
            query = (
                f"SELECT bodies.id FROM turns JOIN bodies ON bodies.id = turns.{which} WHERE session = ? AND number = ?"
                " AND bodies.length = ? AND bodies.checksum = ?"
            )
            for row in select(self._connection, query, *entry.origin, len(content), checksum_of(content)):
                return int(row["id"])
        return self._body(content)

    def _body(self, content: bytes) -> int:
        """The id of the row that has the bytes, or says where they are."""
        number = self._next_body()
        facts = (len(content), checksum_of(content))
        if len(content) > _INLINE_BYTES:
            self._rows.add("bodies", number, *self._segments.append(content), *facts, None)
        else:
            self._rows.add("bodies", number, None, None, *facts, content)
        return number

    def _deliver(self, turns: Sequence[tuple[str, int]]) -> None:
        """As `_change_turn`, in one call for all of which nothing else has changed: nearly always."""
        cursor = self._connection.executemany(
            f"UPDATE turns SET is_delivered = 1, checksum = (checksum | {_DELIVERED}) - (checksum & {_DELIVERED})"
            " WHERE session = ? AND number = ? AND is_delivered = 0 AND reward IS NULL",
            turns,
        )
        if cursor.rowcount != len(turns):
            for session_id, number in turns:
                self._change_turn(session_id, number, is_delivered=1)

    def _rest(self, entry: SessionRested) -> None:
        """The summary names the last step that it counts: once there is another, it does not hold any more."""
        last = self._connection.execute(
            "SELECT max(ifnull((SELECT max(step) FROM spans WHERE session = ?1), 0),"
            " ifnull((SELECT step FROM turns WHERE session = ?1 ORDER BY number DESC LIMIT 1), 0))",
            (entry.session_id,),
        ).fetchone()[0]
        summary = msgspec.msgpack.encode((last, entry.summary))
        self._connection.execute(
            "UPDATE sessions SET summary = ?, rested_at = ? WHERE id = ?", (summary, entry.at, entry.session_id)
        )

    def _purge(self, session_id: str) -> None:
        bodies = self._connection.execute(
            "SELECT request FROM turns WHERE session = ?1 UNION SELECT response FROM turns WHERE session = ?1",
            (session_id,),
        ).fetchall()
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
        self._connection.executemany(  # a fork may still need them
            "DELETE FROM bodies WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM turns WHERE request = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM turns WHERE response = ?1)",
            bodies,
        )

    def _next_step(self) -> int:
        """Spans and turns share one count, so that their order is on record. What is rolled back leaves a gap."""
        if self._last_step is None:
            self._last_step = max(self._highest("step", "spans"), self._highest("step", "turns"))
        self._last_step += 1
        return self._last_step

    def _next_body(self) -> int:
        if self._last_body is None:
            self._last_body = self._highest("id", "bodies")
        self._last_body += 1
        return self._last_body

    def _highest(self, column: str, table: str) -> int:
        return int(self._connection.execute(f"SELECT ifnull(max({column}), 0) FROM {table}").fetchone()[0])

    def _change_session(self, session_id: str, **changes: object) -> None:
        self._change("sessions", SESSION_STATE, changes, "id = ?", session_id)

    def _change_turn(self, session_id: str, number: int, **changes: object) -> None:
        self._change("turns", TURN_STATE, changes, "session = ? AND number = ?", session_id, number)

    def _change(self, table: str, columns: Sequence[str], changes: Mapping[str, Any], where: str, *key: object) -> None:
        """Set what may change of a row, and its sum with it: a row that was damaged before stays so."""
        row = self._connection.execute(
            f"SELECT checksum, {', '.join(columns)} FROM {table} WHERE {where}", key
        ).fetchone()
        if row is None:
            raise LookupError(f"not on record: {' '.join(map(str, key))}")
        checksum, *before = row
        after = [changes.get(column, value) for column, value in zip(columns, before, strict=True)]
        checksum ^= checksum_of(*before) ^ checksum_of(*after)
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._connection.execute(
            f"UPDATE {table} SET checksum = ?, {assignments} WHERE {where}", (checksum, *after, *key)
        )


class RowBatch:
    """Rows to be inserted, many in one statement. Rows that are not flushed are not in the database.

    Each call into SQLite releases the GIL and has to wait to get it back: with one call for each row, a busy server
    and its journal would pass it back and forth all the time.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in _TABLES}

    def add(self, table: str, *values: object) -> None:
        self._rows[table].append(values)

    def flush(self) -> None:
        for table, rows in self._rows.items():
            start = 0
            for size in _ROWS_AT_ONCE:
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
