"""Rows to what was written. Every row is checked against its sum; one that does not fit is never given out."""

import json
import sqlite3
from typing import Any

from holdfast.errors import SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import ClosedSession, Step, StoredSession, StoredTurn
from holdfast.sessions.journal.encoding import checksum_of, floats_of, row_checksum, tokens_of
from holdfast.sessions.journal.entries import ForkedFrom, HistoryRewound, SessionOpened, TokensGiven, TokensSampled
from holdfast.sessions.journal.segments import Segments

SESSION_STATE = ("sink", "reward", "closed_why", "closed_at")  # the columns that change, the last ones of their tables
TURN_STATE = ("reward", "is_delivered")

TURNS = """SELECT turns.*, asked.length, answered.length FROM turns
    JOIN bodies AS asked ON asked.id = request JOIN bodies AS answered ON answered.id = response WHERE session = ?"""


def session_of(connection: sqlite3.Connection, session_id: str) -> StoredSession:
    """The session with all its steps. Raises SessionNotFound; damage is told in the result."""
    row = connection.execute("SELECT * FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    opened, failure = _opened(row)
    steps: list[tuple[int, Step | None]] = []
    if failure is None:
        for span in connection.execute("SELECT * FROM spans WHERE session = ? ORDER BY step", (session_id,)):
            steps.append((span[0], _span_of(span)))
        for turn in connection.execute(f"{TURNS} ORDER BY number", (session_id,)):
            steps.append((turn[15], turn_of(turn)[0]))
        steps.sort(key=lambda step: step[0])
    whole: list[Step] = []
    for number, step in steps:
        if step is None:
            failure = (
                f"step {number} of the journal is damaged; the {len(whole)} steps of this session before it are whole"
            )
            break
        whole.append(step)
    reward, closed_why, closed_at = row[13:16]
    return StoredSession(
        opened=opened, steps=tuple(whole), reward=reward, failure=failure, closed_why=closed_why, closed_at=closed_at
    )


def open_ids(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT id FROM sessions WHERE closed_at IS NULL ORDER BY number, id")
    return [row[0] for row in rows]


def closed_sessions(connection: sqlite3.Connection, *, before: float | None = None) -> list[ClosedSession]:
    rows = connection.execute(
        "SELECT id, owner, closed_why, closed_at FROM sessions"
        " WHERE closed_at IS NOT NULL AND (?1 IS NULL OR closed_at < ?1) ORDER BY closed_at, number",
        (before,),
    )
    return [ClosedSession(*row) for row in rows]


def turn_of(row: tuple[Any, ...]) -> tuple[StoredTurn | None, int, int]:
    """A row of `TURNS` as a turn, None where it is damaged, and the ids of its bodies."""
    request, response, checksum, reward, is_delivered, request_bytes, response_bytes = row[16:]
    if row_checksum(row[:18], row[19:21]) != checksum:
        return None, request, response
    turn = StoredTurn(
        session_id=row[0],
        number=row[1],
        parent=row[2],
        messages=row[3],
        reply=row[4],
        root=row[5],
        given=tokens_of(row[6]),
        sampled=tokens_of(row[7]),
        logprobs=floats_of(row[8]),
        sampling_logprobs=floats_of(row[9]),
        finish_reason=row[10],
        facts=row[11],
        ticket_key=row[12],
        body_hash=row[13],
        num_control=row[14],
        request_bytes=request_bytes,
        response_bytes=response_bytes,
        reward=reward,
        is_delivered=bool(is_delivered),
    )
    return turn, request, response


def body_row(connection: sqlite3.Connection, session_id: str, turn: int, which: str) -> tuple[Any, ...]:
    """What is on record about the `request` or the `response` of a turn."""
    row: tuple[Any, ...] | None = connection.execute(
        "SELECT segment, start, length, bodies.checksum, content FROM turns"
        f" JOIN bodies ON bodies.id = turns.{which} WHERE session = ? AND number = ?",
        (session_id, turn),
    ).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    return row


def body_of(row: tuple[Any, ...], segments: Segments, name: str) -> bytes:
    """The bytes that a `body_row` is about, as they were written, or StorageUnavailable. Needs no connection."""
    segment, start, length, checksum, content = row
    if content is None:
        try:
            content = segments.read(segment, start, length)
        except OSError as exc:
            raise StorageUnavailable(f"{name} cannot be read: {exc.strerror}") from exc
    if len(content) != length or checksum_of(content) != checksum:
        raise StorageUnavailable(f"{name} is damaged on disk")
    return bytes(content)


def _opened(row: tuple[Any, ...]) -> tuple[SessionOpened, str | None]:
    if row_checksum(row[:11], row[12:]) != row[11]:
        opened = SessionOpened(session_id=row[0], number=row[1], owner=str(row[2]), created_at=0.0)
        return opened, "the record of how this session was opened is damaged"
    source, turns = json.loads(row[10]) if row[10] else ("", ())
    opened = SessionOpened(
        session_id=row[0],
        number=row[1],
        owner=row[2],
        kind=row[3],
        label=row[4],
        group=row[5],
        metadata=json.loads(row[6]),
        pin_tokens=row[7],
        eos_token_ids=tuple(json.loads(row[8])),
        created_at=row[9],
        forked_from=ForkedFrom(source, tuple(turns)) if source else None,
        sink=row[12],
    )
    return opened, None


def _span_of(row: tuple[Any, ...]) -> Step | None:
    _, session_id, kind, length, tokens, logprobs, sampling_logprobs, stop_reason, checksum = row
    if row_checksum(row[:8]) != checksum:
        return None
    if kind == "given":
        return TokensGiven(session_id, tokens_of(tokens))
    if kind == "rewound":
        return HistoryRewound(session_id, length)
    return TokensSampled(
        session_id,
        tokens_of(tokens),
        floats_of(logprobs),
        floats_of(sampling_logprobs),
        stop_reason,
        continues=kind == "continued",
    )
