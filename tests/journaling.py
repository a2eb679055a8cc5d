"""A process that journals and says so, to be killed: `python -m tests.journaling DIRECTORY`.

What is written follows from its session and number alone, so that whoever reads it later knows what it must be.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from holdfast.sessions.journal.base import StoredSession
from holdfast.sessions.journal.entries import Entry, SessionOpened, TokensGiven, TokensSampled, TurnRecorded
from holdfast.sessions.journal.sqlite import SqliteJournal

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
    turn = TurnRecorded(
        session_id=session_id,
        number=number,
        parent=draw.randrange(number),
        messages=draw.randbytes(50),
        reply=draw.randbytes(30),
        root=b"{}",
        given=given,
        sampled=sampled,
        logprobs=logprobs(sampled),
        sampling_logprobs=logprobs(sampled),
        finish_reason="stop",
        facts=draw.randbytes(20),
        request=draw.randbytes(draw.choice([10, 5_000, 70_000])),
        response=draw.randbytes(draw.choice([100, 20_000, 65_537, 200_000])),
        ticket_key=f"key {number}",
        body_hash=draw.randbytes(32),
    )
    more = tokens()
    return (
        TokensGiven(session_id, tokens()),
        TokensSampled(session_id, more, logprobs(more), logprobs(more), draw.choice(["eos", None])),
        turn,
    )


async def serve(directory: Path) -> None:
    journal = SqliteJournal(directory, max_segment_bytes=SEGMENT_BYTES)
    known = {session.opened.session_id: session for session in journal.load()}

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
    expected_given, expected_sampled, turn = spoken(index, number)
    given, sampled, stored = session.steps[3 * (number - 1) : 3 * number]
    fields = [name for name in TurnRecorded.__dataclass_fields__ if name not in ("request", "response")]
    return (given, sampled) == (expected_given, expected_sampled) and all(
        getattr(stored, name) == getattr(turn, name) for name in fields
    )


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
