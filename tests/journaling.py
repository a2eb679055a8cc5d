"""A process that journals and says so, to be killed: `python -m tests.journaling DIRECTORY`.

What is written follows from its session and number alone, so that whoever reads it later knows what it must be.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.sessions.journal import rows
from holdfast.sessions.journal.base import Entry, SessionOpened, StoredSession, TokensGiven, TokensSampled, TurnRecorded
from holdfast.sessions.journal.database_journal import DatabaseJournal
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.record import TurnFacts, TurnRecord

NUM_SESSIONS = 4
SEGMENT_BYTES = 1 << 20  # small, so that kills meet rotations too


def name(index: int) -> str:
    return f"{index:032x}"


def opening(index: int) -> SessionOpened:
    return SessionOpened(session_id=name(index), number=index + 1, owner="me", created_at=1.0, label=f"label {index}")


def spoken(index: int, number: int) -> tuple[TokensGiven, TokensSampled, TurnRecorded]:
    """Three entries that are one write: they are all there, or none of them is."""
    draw = random.Random(f"{index} {number}")
    session_id = name(index)

    def tokens() -> "array[int]":
        return array("i", [draw.randrange(2**31) for _ in range(draw.randrange(40))])

    def logprobs(of: Sequence[int]) -> "array[float]":
        return array("d", [-draw.random() * 30 for _ in of])

    given, sampled = tokens(), tokens()
    turn = TurnRecord(
        number=number,
        parent=draw.randrange(number),
        messages=({"content": draw.randbytes(25).hex()},),
        reply={"content": draw.randbytes(15).hex()},
        given=given,
        sampled=sampled,
        logprobs=logprobs(sampled),
        sampling_logprobs=logprobs(sampled),
        finish_reason="stop",
        facts=TurnFacts(logprob_kind=draw.randbytes(10).hex()),
        request=draw.randbytes(draw.choice([10, 5_000, 70_000])),
        response=draw.randbytes(draw.choice([100, 20_000, 65_537, 200_000])),
        idempotency_key=f"key {number}",
        body_hash=draw.randbytes(32),
    )
    more = tokens()
    return (
        TokensGiven(session_id, tokens()),
        TokensSampled(session_id, more, logprobs(more), logprobs(more), draw.choice(["eos", None])),
        TurnRecorded(session_id, turn),
    )


def open_sessions(journal: DatabaseJournal) -> list[StoredSession]:
    """All that are not closed, by number."""
    query = "SELECT id FROM sessions WHERE closed_at IS NULL ORDER BY number, id"
    ids = [row["id"] for row in journal._read(lambda db: db.select(query))]
    return [journal._read(partial(rows.session_of, session_id=session_id)) for session_id in ids]


async def serve(directory: Path) -> None:
    journal = SqliteJournal(directory, max_segment_bytes=SEGMENT_BYTES)
    known = {session.opened.session_id: session for session in open_sessions(journal)}

    async def talk(index: int) -> None:
        if name(index) not in known:
            await acknowledged(0, index, opening(index))
        number = len(known[name(index)].turns) if name(index) in known else 0
        while True:
            number += 1
            await acknowledged(number, index, *spoken(index, number))

    async def acknowledged(number: int, index: int, *entries: Entry) -> None:
        await journal.write(*entries)
        print(index, number, flush=True)

    async with asyncio.TaskGroup() as group:
        for index in range(NUM_SESSIONS):
            group.create_task(talk(index))


def same_turn(session: StoredSession, index: int, number: int) -> bool:
    """Whether the write `number` of the session is on record as it must be, its bodies aside."""
    given, sampled, recorded = spoken(index, number)
    expected = (given, sampled, msgspec.structs.replace(recorded.turn, request=None, response=None))
    return session.steps[3 * (number - 1) : 3 * number] == expected


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
