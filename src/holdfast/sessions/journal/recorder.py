"""Journal entries to database rows, in the writer's thread and transaction."""

import json
from collections.abc import Callable, Mapping, Sequence
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
    SessionReleased,
    SessionRested,
    TokensGiven,
    TokensSampled,
    TurnDelivered,
    TurnRecorded,
)
from holdfast.sessions.journal.database import Database
from holdfast.sessions.journal.rows import (
    GIVEN,
    RECALLED,
    SAMPLED,
    SESSION_STATE,
    TURN_FIELDS,
    TURN_STATE,
    checksum_of,
    is_intact,
    row_checksum,
)
from holdfast.sessions.record import Stored, packed, to_stored

INLINE_BYTES = 64 * 1024  # longer bodies may lie outside the database
_TABLES = ("bodies", "turns", "spans")  # rows refer to those of earlier tables

PlaceBody = Callable[[TurnRecorded, bytes], tuple[Stored, int] | None]

# What delivering flips in the sum of a turn, whatever its reward: CRC-32 is linear, and only the last digit changes.
_DELIVERED = checksum_of(None, 0) ^ checksum_of(None, 1)


class Recorder:
    """Mutates the database; the caller begins, commits and rolls back.

    Call `flush` before a commit and `discard` after a rollback: turns and spans are collected until then. `place` says
    in which segment and where in it a body of a turn lies; None: in the database. `member` owns the sessions that are
    opened.
    """

    def __init__(self, db: Database, place: PlaceBody, member: str | None = None) -> None:
        self._db = db
        self._place = place
        self.member = member
        self._rows = RowBatch(db)
        self._delivered: list[tuple[str, int]] = []
        self.freed: list[Stored] = []  # segments of bodies that were purged since the last `discard`

    def record(self, entry: Entry) -> None:
        match entry:
            case SessionOpened():
                self._open(entry)
            case TokensGiven():
                self._span(entry.session_id, RECALLED if entry.is_recalled else GIVEN, tokens=packed(entry.tokens))
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
            case Rewarded():
                self._reward(entry)
            case Pinned():
                self._change_session(entry.session_id, sink=entry.sink)
            case SessionRested():
                self.flush()
                self._rest(entry)
            case SessionReleased():
                self._release(entry.session_id)
            case SessionClosed():
                self._change_session(entry.session_id, closed_why=entry.why, closed_at=float(entry.at) + 0.0)
                self._release(entry.session_id)
            case SessionPurged():
                self.flush()
                self._purge(entry.session_id)

    def flush(self) -> None:
        """Everything that was recorded is in the database."""
        self._rows.flush()
        delivered, self._delivered = self._delivered, []
        if delivered:
            self._db.deliver(delivered, _DELIVERED)

    def discard(self) -> None:
        """What was recorded and not committed is forgotten."""
        self._rows.clear()
        self._delivered.clear()
        self.freed.clear()

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
        values = (*fields, row_checksum(fields, state), *state, None, None, entry.name or None, self.member)
        self._db.insert({"sessions": [values]})
        if entry.forked_from and entry.copies_turns:
            self.flush()
            self._copy_turns(entry.forked_from, entry.session_id)

    def _copy_turns(self, source: ForkedFrom, session_id: str) -> None:
        query = "SELECT * FROM turns WHERE session = ?1 AND number = ?2"
        for index, number in enumerate(source.turns):
            found = self._db.select(query, source.session_id, number)
            if not found:
                raise LookupError(f"session {source.session_id} has no turn {number} on record")
            if not is_intact(found[0], TURN_FIELDS, TURN_STATE):
                raise StorageUnavailable(f"turn {number} of session {source.session_id} is damaged")
            own: dict[str, Stored] = {"number": index + 1, "parent": index}
            own |= {"ticket_key": "", "body_hash": b"", "num_control": 0}
            self._turn(session_id, {name: found[0][name] for name in (*TURN_FIELDS, *TURN_STATE)} | own)

    def _turn(self, session_id: str, values: Mapping[str, Stored]) -> None:
        """A row for a turn; `request` and `response` are the ids of its bodies."""
        values = {**values, "session": session_id, "step": self._db.next_step()}
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
        fields = (self._db.next_step(), session_id, kind, length, tokens, logprobs, sampling_logprobs, stop_reason)
        self._rows.add("spans", *fields, row_checksum(fields))

    def _body_of(self, entry: TurnRecorded, which: str) -> int:
        """The id of a turn's body, which another turn may have brought already."""
        content: bytes = getattr(entry.turn, which) or b""
        if entry.origin is not None:
            self.flush()
            query = (
                f"SELECT bodies.id FROM turns JOIN bodies ON bodies.id = turns.{which}"
                " WHERE session = ?1 AND number = ?2 AND bodies.length = ?3 AND bodies.checksum = ?4"
            )
            for row in self._db.select(query, *entry.origin, len(content), checksum_of(content)):
                return int(row["id"])
        return self._body(entry, content)

    def _body(self, entry: TurnRecorded, content: bytes) -> int:
        """The id of the row that has the bytes, or says where they are."""
        number = self._db.next_body()
        facts = (len(content), checksum_of(content))
        place = self._place(entry, content)
        if place is None:
            self._rows.add("bodies", number, None, None, *facts, content)
        else:
            self._rows.add("bodies", number, *place, *facts, None)
        return number

    def _reward(self, entry: Rewarded) -> None:
        if entry.turn is None:
            self._change_session(entry.session_id, reward=entry.reward + 0.0)
        else:
            self.flush()
            self._change_turn(entry.session_id, entry.turn, reward=entry.reward + 0.0)

    def _release(self, session_id: str) -> None:
        if self.member is not None:
            query = "UPDATE sessions SET member = NULL WHERE id = ?1 AND member = ?2"
            self._db.execute(query, session_id, self.member)

    def _rest(self, entry: SessionRested) -> None:
        """The summary names the last step that it counts: once there is another, it does not hold any more."""
        [last] = self._db.select(
            "SELECT (SELECT max(step) FROM spans WHERE session = ?1) AS span,"
            " (SELECT step FROM turns WHERE session = ?1 ORDER BY number DESC LIMIT 1) AS turn",
            entry.session_id,
        )
        summary = msgspec.msgpack.encode((max(last["span"] or 0, last["turn"] or 0), entry.summary))
        query = "UPDATE sessions SET summary = ?1, rested_at = ?2 WHERE id = ?3"
        self._db.execute(query, summary, float(entry.at), entry.session_id)

    def _purge(self, session_id: str) -> None:
        """The session and all of its bodies that no fork needs."""
        unshared = self._db.select(
            "SELECT id, segment FROM bodies WHERE"
            " id IN (SELECT request FROM turns WHERE session = ?1 UNION SELECT response FROM turns WHERE session = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM turns WHERE request = bodies.id AND session <> ?1)"
            " AND NOT EXISTS (SELECT 1 FROM turns WHERE response = bodies.id AND session <> ?1)",
            session_id,
        )
        for table, column in (("turns", "session"), ("spans", "session"), ("sessions", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?1", session_id)
        for row in unshared:
            self._db.execute("DELETE FROM bodies WHERE id = ?1", row["id"])
        self.freed += [row["segment"] for row in unshared if row["segment"] is not None]

    def _change_session(self, session_id: str, **changes: object) -> None:
        self._change("sessions", SESSION_STATE, changes, "id = ?1", session_id)

    def _change_turn(self, session_id: str, number: int, **changes: object) -> None:
        self._change("turns", TURN_STATE, changes, "session = ?1 AND number = ?2", session_id, number)

    def _change(self, table: str, columns: Sequence[str], changes: Mapping[str, Any], where: str, *key: object) -> None:
        """Set what may change of a row, and its sum with it: a row that was damaged before stays so."""
        found = self._db.select(f"SELECT checksum, {', '.join(columns)} FROM {table} WHERE {where}", *key)
        if not found:
            raise LookupError(f"not on record: {' '.join(map(str, key))}")
        before = [found[0][column] for column in columns]
        after = [changes.get(column, value) for column, value in zip(columns, before, strict=True)]
        checksum = found[0]["checksum"] ^ checksum_of(*before) ^ checksum_of(*after)
        first = len(key) + 1
        assignments = ", ".join(f"{column} = ?{first + 1 + index}" for index, column in enumerate(columns))
        self._db.execute(f"UPDATE {table} SET checksum = ?{first}, {assignments} WHERE {where}", *key, checksum, *after)


class RowBatch:
    """Rows to be inserted, many in one statement. Rows that are not flushed are not in the database."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._rows: dict[str, list[tuple[Stored, ...]]] = {table: [] for table in _TABLES}

    def add(self, table: str, *values: Stored) -> None:
        self._rows[table].append(values)

    def flush(self) -> None:
        if any(self._rows.values()):
            self._db.insert({table: rows for table, rows in self._rows.items() if rows})
            self.clear()

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()
