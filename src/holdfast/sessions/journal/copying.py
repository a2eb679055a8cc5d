"""Every session of a journal: written to another one, compared with another one, or read to see whether it is whole.

One session at a time, and of its bodies one at a time. Knows nothing of databases.
"""

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.sessions.journal.base import (
    Entry,
    HistoryRewound,
    Journal,
    ListedSession,
    Rewarded,
    SessionClosed,
    SessionOpened,
    SessionRested,
    StoredSession,
    TokensGiven,
    TokensSampled,
    TurnRecorded,
    num_bytes,
    with_bodies,
)
from holdfast.sessions.record import TurnRecord, packed, to_stored

_PAGE = 500
_WRITE_BYTES = 8 * 2**20  # in one commit

Advance = Callable[[], object]  # called after each session


class Found(NamedTuple):
    """What a journal holds."""

    num_sessions: int
    num_turns: int
    problems: list[str]


async def every_session(journal: Journal) -> AsyncIterator[ListedSession]:
    """All of them, open and closed, in the order in which they were made."""
    after = (0, "")
    while page := await journal.list_all(after=after, limit=_PAGE):
        for session in page:
            yield session
        after = (page[-1].opened.number, page[-1].opened.session_id)


async def copy_sessions(source: Journal, target: Journal, advance: Advance) -> None:
    """Write every session of `source` to `target`, which has none. Raises StorageUnavailable where one is damaged."""
    batch: list[Entry] = []
    size = 0
    async for listed in every_session(source):
        async for entry in _entries(source, listed):
            batch.append(entry)
            size += num_bytes(entry)
            if size > _WRITE_BYTES:
                await target.write(*batch)
                batch, size = [], 0
        advance()
    await target.write(*batch)


async def compare(source: Journal, target: Journal, advance: Advance) -> int:
    """Read both and compare a digest of each session; how many there are. Raises StorageUnavailable if they differ."""
    num_sessions = 0
    others = every_session(target)
    async for listed in every_session(source):
        session_id = listed.opened.session_id
        other = await anext(others, None)
        if other is None or other.opened.session_id != session_id:
            raise StorageUnavailable(f"session {session_id} was not copied")
        if await _digest(source, listed) != await _digest(target, other):
            raise StorageUnavailable(f"session {session_id} is not the same in both")
        num_sessions += 1
        advance()
    if (more := await anext(others, None)) is not None:
        raise StorageUnavailable(f"session {more.opened.session_id} is only in the copy")
    return num_sessions


async def examine(journal: Journal, advance: Advance) -> Found:
    """Read everything; what is damaged is named."""
    num_sessions = num_turns = 0
    problems = []
    async for listed in every_session(journal):
        session_id = listed.opened.session_id
        num_sessions += 1
        try:
            stored = await _whole(journal, session_id)
            for turn in stored.turns:
                await with_bodies(turn, session_id, journal)
                num_turns += 1
        except HoldfastError as exc:
            problems.append(str(exc))
        advance()
    return Found(num_sessions, num_turns, problems)


async def _entries(journal: Journal, listed: ListedSession) -> AsyncIterator[Entry]:
    """What makes the session what it is on record."""
    session_id = listed.opened.session_id
    stored = await _whole(journal, session_id)
    yield replace(stored.opened, copies_turns=False)
    for step in stored.steps:
        if isinstance(step, TurnRecord):
            turn = await with_bodies(step, session_id, journal)
            yield TurnRecorded(session_id, turn, _origin(stored.opened, step.number))
        else:
            yield step
    if stored.reward is not None:
        yield Rewarded(session_id, None, stored.reward)
    if listed.rested_at is not None:
        yield SessionRested(session_id, listed.rested_at, listed.summary)
    if stored.closed_why is not None and stored.closed_at is not None:
        yield SessionClosed(session_id, stored.closed_why, stored.closed_at)


def _origin(opened: SessionOpened, turn: int) -> tuple[str, int] | None:
    """The turn of another session from which a fork has this one."""
    source = opened.forked_from
    return (source.session_id, source.turns[turn - 1]) if source and turn <= len(source.turns) else None


async def _whole(journal: Journal, session_id: str) -> StoredSession:
    stored = await journal.read_session(session_id)
    if stored.failure:
        raise StorageUnavailable(f"session {session_id}: {stored.failure}")
    return stored


async def _digest(journal: Journal, listed: ListedSession) -> bytes:
    """Of all that is on record of the session: what a client, a trainer or the next start would see."""
    stored = await _whole(journal, listed.opened.session_id)
    digest = hashlib.sha256()
    state = (stored.reward, stored.closed_why, stored.closed_at, listed.rested_at, listed.summary)
    digest.update(msgspec.msgpack.encode((stored.opened, listed.opened, state), order="deterministic"))
    for step in stored.steps:
        if isinstance(step, TurnRecord):
            turn = await with_bodies(step, stored.opened.session_id, journal)
            digest.update(msgspec.msgpack.encode(list(to_stored(turn).items())))
        else:
            digest.update(msgspec.msgpack.encode(_plain(step)))
    return digest.digest()


def _plain(step: TokensGiven | TokensSampled | HistoryRewound) -> list[object]:
    if isinstance(step, HistoryRewound):
        return [type(step).__name__, step.length]
    plain: list[object] = [type(step).__name__, packed(step.tokens)]
    if isinstance(step, TokensGiven):
        plain += ["recalled"] if step.is_recalled else []
    else:
        plain += [packed(step.logprobs), packed(step.sampling_logprobs), step.stop_reason, step.weight_version]
    return plain
