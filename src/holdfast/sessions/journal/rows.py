"""Rows of the database back to what was written. Each row is checked against its sum; a damaged one is never served."""

import json
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import (
    ClosedSession,
    ForkedFrom,
    HistoryRewound,
    ListedSession,
    SessionOpened,
    SessionSummary,
    Step,
    StoredSession,
    TokensGiven,
    TokensSampled,
)
from holdfast.sessions.journal.database import Database, Row
from holdfast.sessions.record import Stored, TurnRecord, floats_of, from_stored, tokens_of

# The columns that a row's sum covers, in its order: those that never change, and those that may.
SESSION_FIELDS = (
    *("id", "number", "owner", "kind", "label", "group_name", "metadata", "pin_tokens", "eos_token_ids"),
    *("created_at", "forked_from"),
)
SESSION_STATE = ("sink", "reward", "closed_why", "closed_at")
GIVEN, RECALLED = "given", "recalled"  # kinds of spans
SAMPLED = "sampled"  # the kind of a sampled span; then a space and the version of the weights, where there is one
SPAN_FIELDS = ("step", "session", "kind", "length", "tokens", "logprobs", "sampling_logprobs", "stop_reason")
TURN_FIELDS = (
    *("session", "number", "parent", "messages", "reply", "root", "given", "sampled", "logprobs", "sampling_logprobs"),
    *("finish_reason", "facts", "ticket_key", "body_hash", "num_control", "step", "request", "response"),
)
TURN_STATE = ("reward", "is_delivered")

_KINDS = {kind: kind.__name__.encode() for kind in (bytes, str, int, float, bool, type(None))}
_COPIED_BYTES = 16 * 1024  # longer values are summed in place instead of being copied


class BodyReader(Protocol):
    """Long bodies outside the database: segment files, or the blobs of a store."""

    def read(self, segment: Any, start: int, length: int) -> bytes:
        """Raises OSError, or gives fewer bytes, where they are no longer there."""


def checksum_of(*values: Stored) -> int:
    """CRC-32 over the values in order; where one ends and the next begins counts too."""
    checksum = 0
    parts: list[bytes] = []
    for value in values:
        kind = type(value)
        data = value if isinstance(value, bytes) else str(value).encode()
        parts.append(b"%b %d " % (_KINDS[kind], len(data)))
        if len(data) > _COPIED_BYTES:
            checksum = zlib.crc32(data, zlib.crc32(b"".join(parts), checksum))
            parts.clear()
        else:
            parts.append(data)
    return zlib.crc32(b"".join(parts), checksum)  # one call for many small values: each call releases the GIL


def row_checksum(fields: Sequence[Stored], state: Sequence[Stored] = ()) -> int:
    """The sum of a row: of what never changes and of what may, so that either can be replaced without the other."""
    return checksum_of(*fields) ^ checksum_of(*state)


def is_intact(row: Row, fields: Sequence[str], state: Sequence[str] = ()) -> bool:
    sum_now = row_checksum([row[name] for name in fields], [row[name] for name in state])
    return bool(sum_now == row["checksum"])


def session_of(db: Database, session_id: str) -> StoredSession:
    """The session with all its steps. Raises SessionNotFound; damage is reported in the result."""
    found = db.select("SELECT * FROM sessions WHERE id = ?1", session_id)
    if not found:
        raise SessionNotFound(session_id)
    (row,) = found
    opened, failure = opened_of(row)
    steps: list[tuple[int, Step | None]] = []
    if failure is None:
        spans = db.select("SELECT * FROM spans WHERE session = ?1", session_id)
        turns = db.select("SELECT * FROM turns WHERE session = ?1", session_id)
        steps = [(span["step"], span_of(span)) for span in spans] + [(turn["step"], turn_of(turn)) for turn in turns]
        steps.sort(key=lambda step: step[0])
    intact: list[Step] = []
    for number, step in steps:
        if step is None:
            failure = f"step {number} of the journal is damaged; the {len(intact)} steps before it are intact"
            break
        intact.append(step)
    return StoredSession(
        opened=opened,
        steps=tuple(intact),
        reward=row["reward"],
        failure=failure,
        closed_why=row["closed_why"],
        closed_at=row["closed_at"],
    )


def open_session_of(db: Database, session_id: str, owner: str) -> StoredSession:
    """As `session_of`, where the session is this owner's and was not closed."""
    found = db.select("SELECT closed_why FROM sessions WHERE id = ?1 AND owner = ?2", session_id, owner)
    if not found or (why := found[0]["closed_why"]):
        raise SessionNotFound(session_id, detail=why if found else "unknown")
    return session_of(db, session_id)


def named(db: Database, owner: str, name: str) -> str | None:
    query = "SELECT id FROM sessions WHERE owner = ?1 AND name = ?2 AND closed_at IS NULL"
    return next((row["id"] for row in db.select(query, owner, name)), None)


_LISTED = (
    "SELECT *, (SELECT max(step) FROM spans WHERE session = id) AS last_span,"
    " (SELECT step FROM turns WHERE session = id ORDER BY number DESC LIMIT 1) AS last_turn FROM sessions"
)


def listed(db: Database, owner: str, *, after: int, label: str | None, limit: int) -> list[ListedSession]:
    query = (
        f"{_LISTED} WHERE owner = ?1 AND number > ?2 AND closed_at IS NULL"
        " AND (CAST(?3 AS TEXT) IS NULL OR label = ?3)"
        " ORDER BY number LIMIT ?4"
    )
    return [listed_of(row) for row in db.select(query, owner, after, label, limit)]


def all_listed(db: Database, after: tuple[int, str], limit: int) -> list[ListedSession]:
    query = f"{_LISTED} WHERE number >= ?1 AND (number > ?1 OR id > ?2) ORDER BY number, id LIMIT ?3"
    return [listed_of(row) for row in db.select(query, *after, limit)]


def listed_of(row: Row) -> ListedSession:
    opened, failure = opened_of(row)
    summary = summary_of(row) if failure is None else None
    return ListedSession(opened, row["reward"], summary, row["rested_at"], row["member"] or "")


def num_sessions(db: Database) -> int:
    return int(db.select("SELECT count(*) AS num FROM sessions")[0]["num"])


def summary_of(row: Row) -> SessionSummary | None:
    """What was recorded of a session when it came to rest, if nothing was recorded since."""
    try:
        step, summary = msgspec.msgpack.decode(row["summary"] or b"", type=tuple[int, SessionSummary])
    except msgspec.DecodeError:
        return None
    return summary if step == max(row["last_span"] or 0, row["last_turn"] or 0) else None


def num_open(db: Database, owner: str) -> int:
    query = "SELECT count(*) AS num FROM sessions WHERE owner = ?1 AND closed_at IS NULL"
    return int(db.select(query, owner)[0]["num"])


def rested(
    db: Database, before: float, limit: int, free: str = "member IS NULL", *values: object
) -> list[tuple[str, str]]:
    """`free` is the condition under which no other member owns a session; `values` are its further parameters."""
    query = (
        f"SELECT id, owner FROM sessions WHERE closed_at IS NULL AND coalesce(rested_at, created_at) < ?1 AND ({free})"
        " ORDER BY coalesce(rested_at, created_at) LIMIT ?2"
    )
    return [(row["id"], row["owner"]) for row in db.select(query, before, limit, *values)]


def closed_sessions(db: Database, *, before: float | None = None) -> list[ClosedSession]:
    query = (
        "SELECT id, owner, closed_why, closed_at FROM sessions"
        " WHERE closed_at IS NOT NULL AND (CAST(?1 AS DOUBLE PRECISION) IS NULL OR closed_at < ?1)"
        " ORDER BY closed_at, number"
    )
    return [
        ClosedSession(session_id=row["id"], owner=row["owner"], why=row["closed_why"], at=row["closed_at"])
        for row in db.select(query, before)
    ]


def num_bytes_by_owner(db: Database) -> dict[str, int]:
    """Tokens, logprobs and bodies. A body that several turns share is counted once for each owner."""
    query = """
        SELECT owner, sum(num) AS num FROM (
            SELECT owner, length(tokens) + length(logprobs) + length(sampling_logprobs) AS num
            FROM spans JOIN sessions ON id = session
            UNION ALL SELECT owner, length(given) + length(sampled) + length(logprobs) + length(sampling_logprobs)
            FROM turns JOIN sessions ON id = session
            UNION ALL SELECT owner, length FROM (
                SELECT DISTINCT owner, bodies.id, length FROM turns JOIN sessions ON sessions.id = session
                JOIN bodies ON bodies.id IN (request, response)
            ) AS shared
        ) AS parts GROUP BY owner
    """
    return {row["owner"]: int(row["num"]) for row in db.select(query)}


def turn_of(row: Row) -> TurnRecord | None:
    """A row of `turns` as a turn without its bodies; None where it is damaged."""
    if not is_intact(row, TURN_FIELDS, TURN_STATE):
        return None
    kept = [name for name in (*TURN_FIELDS, "reward") if name not in ("session", "step", "request", "response")]
    try:
        return from_stored({name: row[name] for name in kept} | {"is_delivered": bool(row["is_delivered"])})
    except ValueError:
        return None


def body_row(db: Database, session_id: str, turn: int, which: str) -> Row:
    """What is on record about the `request` or the `response` of a turn."""
    query = f"SELECT bodies.* FROM turns JOIN bodies ON bodies.id = turns.{which} WHERE session = ?1 AND number = ?2"
    found = db.select(query, session_id, turn)
    if not found:
        raise SessionNotFound(session_id)
    return found[0]


def body_of(row: Row, bodies: BodyReader, name: str) -> bytes:
    """The bytes that a `body_row` is about, as they were written, or StorageUnavailable. Needs no connection."""
    content = row["content"]
    if content is None:
        try:
            content = bodies.read(row["segment"], row["start"], row["length"])
        except OSError as exc:
            raise StorageUnavailable(f"{name} cannot be read: {exc.strerror or exc}") from exc
    if len(content) != row["length"] or checksum_of(content) != row["checksum"]:
        raise StorageUnavailable(f"{name} is damaged on disk")
    return bytes(content)


def opened_of(row: Row) -> tuple[SessionOpened, str | None]:
    if not is_intact(row, SESSION_FIELDS, SESSION_STATE):
        opened = SessionOpened(session_id=row["id"], number=row["number"], owner=str(row["owner"]), created_at=0.0)
        return opened, "the record of how this session was opened is damaged"
    source, turns = json.loads(row["forked_from"]) if row["forked_from"] else ("", ())
    opened = SessionOpened(
        session_id=row["id"],
        number=row["number"],
        owner=row["owner"],
        kind=row["kind"],
        label=row["label"],
        group=row["group_name"],
        metadata=json.loads(row["metadata"]),
        pin_tokens=row["pin_tokens"],
        eos_token_ids=tuple(json.loads(row["eos_token_ids"])),
        created_at=row["created_at"],
        forked_from=ForkedFrom(source, tuple(turns)) if source else None,
        sink=row["sink"],
        name=row["name"] or "",
    )
    return opened, None


def span_of(row: Row) -> Step | None:
    if not is_intact(row, SPAN_FIELDS):
        return None
    session_id, tokens = row["session"], tokens_of(row["tokens"])
    if row["kind"] in (GIVEN, RECALLED):
        return TokensGiven(session_id, tokens, is_recalled=row["kind"] == RECALLED)
    if row["kind"] == "rewound":
        return HistoryRewound(session_id, row["length"])
    logprobs = floats_of(row["logprobs"]), floats_of(row["sampling_logprobs"])
    weight_version = row["kind"].removeprefix(SAMPLED).removeprefix(" ")
    return TokensSampled(session_id, tokens, *logprobs, row["stop_reason"], weight_version)
