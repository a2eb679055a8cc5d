"""What every journal does, on SQLite and on a real PostgreSQL."""

import asyncio
import contextlib
import dataclasses
import functools
import random
import sqlite3
import tempfile
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidArgument, JournalFailed, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import (
    ClosedSession,
    Entry,
    ForkedFrom,
    HistoryRewound,
    Journal,
    Member,
    Pinned,
    Rewarded,
    SessionClosed,
    SessionOpened,
    SessionRested,
    SessionSummary,
    StoredSession,
    TokensGiven,
    TokensSampled,
    TurnDelivered,
    TurnRecorded,
)
from holdfast.sessions.journal.postgres import PostgresJournal
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.record import TemplateInputs, TurnFacts, TurnRecord
from tests.effort import examples
from tests.journaling import open_sessions
from tests.postgres import execute, fresh_database
from tests.test_journal import HEAVY, session, turn, without_bodies

SUMMARY = SessionSummary(history_length=3, given=(1, 2), sampled=(1, 1))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a journal lies: it can be opened again and again, and be damaged."""

    open: Callable[..., Journal]
    execute: Callable[[str], object]

    @contextlib.asynccontextmanager
    async def opened(self, **settings: Any) -> AsyncIterator[Journal]:
        journal = self.open(**settings)
        try:
            if journal.members is not None:
                await journal.members.join(Member(name="me", epoch=0))
            yield journal
        finally:
            await journal.close()


@contextlib.contextmanager
def place_of(kind: str) -> Iterator[Place]:
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:

            def change(statement: str) -> None:
                with contextlib.closing(sqlite3.connect(Path(folder) / "journal.db")) as database:
                    database.execute(statement)
                    database.commit()

            yield Place(functools.partial(SqliteJournal, Path(folder), max_segment_bytes=2 * HEAVY), change)
    else:
        url = database()
        with contextlib.suppress(Exception):  # there are no tables yet
            execute(url, "TRUNCATE sessions, spans, bodies, turns, members, leases")
        yield Place(functools.partial(PostgresJournal, url), functools.partial(execute, url))


@functools.cache
def database() -> str:
    """One for all tests of this process: emptying it is quicker than making another."""
    return _databases.enter_context(fresh_database())


_databases = contextlib.ExitStack()
KINDS = pytest.mark.parametrize("kind", ["sqlite", "postgres"])


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with place_of(request.param) as place:
        yield place


@pytest.fixture(scope="module", autouse=True)
def _dropped() -> Iterator[None]:
    yield
    _databases.close()
    database.cache_clear()


def bits(value: object) -> object:
    """`value` so that floats are equal only if their bits are: NaN is itself, 0.0 is not -0.0."""
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, TurnRecord):
        return type(value), [bits(getattr(value, name)) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [bits(item) for item in value] if isinstance(value, tuple | list) else value


# What comes back

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda values: array("i", values))
floats = st.lists(st.floats(width=64), max_size=20).map(lambda values: array("d", values))
names = st.text(max_size=20)
seconds = st.floats(0, 2**40)
bodies = st.one_of(
    st.binary(max_size=50),
    st.builds(lambda seed, size: random.Random(seed).randbytes(size), st.integers(), st.integers(65_530, 70_000)),
)
messages = st.dictionaries(names, names | st.integers(-(2**40), 2**40) | st.none(), max_size=3)
steps = st.one_of(
    st.builds(TokensGiven, st.just("a"), tokens, st.booleans()),
    st.builds(TokensSampled, st.just("a"), tokens, floats, floats, st.none() | names),
    st.builds(HistoryRewound, st.just("a"), st.integers(0, 2**40)),
    st.builds(
        TurnRecorded,
        st.just("a"),
        st.builds(
            TurnRecord,
            number=st.just(0),
            parent=st.integers(0, 2**40),
            messages=st.lists(messages, max_size=2).map(tuple),
            reply=messages,
            root=st.builds(TemplateInputs, names, names),
            given=tokens,
            sampled=tokens,
            logprobs=floats,
            sampling_logprobs=floats,
            finish_reason=names,
            facts=st.builds(TurnFacts, sampling=messages, started_at=seconds, routed_experts=st.none() | names),
            idempotency_key=names,
            body_hash=st.binary(max_size=32),
            num_control=st.integers(0, 9),
            request=bodies,
            response=bodies,
        ),
    ),
)
sessions = st.builds(
    SessionOpened,
    session_id=st.just("a"),
    number=st.integers(1, 2**40),
    owner=names,
    created_at=seconds,
    kind=st.sampled_from(["tokens", "chat"]),
    label=names,
    group=names,
    metadata=st.dictionaries(names, names, max_size=3),
    sink=st.integers(0, 2**20),
    pin_tokens=st.none() | st.integers(0, 2**20),
    eos_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
)
changes = st.lists(
    st.one_of(
        st.builds(Rewarded, st.just("a"), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(Pinned, st.just("a"), st.integers(0, 2**20)),
        st.builds(SessionClosed, st.just("a"), st.sampled_from(["closed", "expired", "evicted"]), seconds),
    ),
    max_size=4,
)


@KINDS
def test_every_entry_comes_back_bit_for_bit_after_a_restart(kind: str) -> None:
    @settings(max_examples=examples(25 if kind == "sqlite" else 8))
    @given(sessions, st.lists(steps, max_size=6), changes)
    def check(first: SessionOpened, written: list[Entry], changed: list[Rewarded | Pinned | SessionClosed]) -> None:
        with place_of(kind) as place:
            asyncio.run(comes_back(place, first, written, changed))

    check()


async def comes_back(
    place: Place, first: SessionOpened, written: list[Entry], changed: list[Rewarded | Pinned | SessionClosed]
) -> None:
    numbers = iter(range(1, 100))
    written = [
        TurnRecorded("a", msgspec.structs.replace(entry.turn, number=next(numbers)))
        if isinstance(entry, TurnRecorded)
        else entry
        for entry in written
    ]
    expected: dict[str, Any] = {"reward": None, "closed_why": None, "closed_at": None}
    for change in changed:
        match change:
            case Rewarded():
                expected["reward"] = change.reward
            case Pinned():
                expected["opened"] = dataclasses.replace(first, sink=change.sink)
            case SessionClosed():
                expected |= {"closed_why": change.why, "closed_at": change.at}
    async with place.opened() as journal:
        await journal.write(first, *written, *changed)
    async with place.opened() as journal:
        found = await journal.read_session("a")
        assert bits(found.steps) == bits(
            [without_bodies(entry) if isinstance(entry, TurnRecorded) else entry for entry in written]
        )
        assert found == StoredSession(**({"opened": first} | expected), steps=found.steps)
        assert [known.opened.session_id for known in open_sessions(journal)] == (
            [] if expected["closed_why"] else ["a"]
        )
        for entry in written:
            if isinstance(entry, TurnRecorded):
                assert await journal.read_request("a", entry.turn.number) == entry.turn.request
                assert await journal.read_response("a", entry.turn.number) == entry.turn.response


class Model:
    """What must be on record, as plain as can be."""

    def __init__(self) -> None:
        self.opened: dict[str, SessionOpened] = {}
        self.steps: dict[str, list[Any]] = {}
        self.bodies: dict[tuple[str, int], bytes] = {}
        self.rewards: dict[str, float] = {}
        self.closed: dict[str, ClosedSession] = {}

    def turns(self, session_id: str) -> list[TurnRecord]:
        return [step for step in self.steps[session_id] if isinstance(step, TurnRecord)]

    def change_turn(self, session_id: str, number: int, **fields: Any) -> None:
        of = self.steps[session_id]
        of[:] = [
            msgspec.structs.replace(step, **fields) if isinstance(step, TurnRecord) and step.number == number else step
            for step in of
        ]

    async def check(self, journal: Journal) -> None:
        alive = [session_id for session_id in self.opened if session_id not in self.closed]
        assert [found.opened.session_id for found in open_sessions(journal)] == alive
        assert {gone.session_id: gone for gone in journal.closed()} == self.closed
        assert journal.last_number == max((known.number for known in self.opened.values()), default=0)
        for session_id, expected in self.opened.items():
            found = await journal.read_session(session_id)
            assert (found.opened, found.failure) == (expected, None)
            assert found.steps == tuple(self.steps[session_id])
            assert found.reward == self.rewards.get(session_id)
        for (session_id, number), body in self.bodies.items():
            assert await journal.read_response(session_id, number) == body


async def act(draw: random.Random, journal: Journal, model: Model) -> None:
    """One random thing that may happen to sessions, done to both."""
    alive = [session_id for session_id in model.opened if session_id not in model.closed]
    what = draw.choice(["open", "tokens", "turn", "turn", "change", "fork", "close", "purge"]) if alive else "open"
    number = journal.last_number + 1
    if what == "open":
        model.opened[f"s{number}"] = session(f"s{number}", number)
        model.steps[f"s{number}"] = []
        return await journal.write(model.opened[f"s{number}"])
    source = draw.choice(alive)
    turns = model.turns(source)
    if what == "tokens":
        spans: list[Any] = [
            TokensGiven(source, array("i", [draw.randrange(9)])),
            TokensSampled(source, array("i", [1]), array("d", [-draw.random()]), array("d", [-1.0]), "eos"),
            HistoryRewound(source, draw.randrange(9)),
        ]
        model.steps[source] += spans
        await journal.write(*spans)
    elif what == "turn":
        body = draw.randbytes(draw.choice([10, HEAVY]))
        recorded = turn(len(turns) + 1, source, parent=draw.randrange(len(turns) + 1), response=body, body_hash=b"h")
        model.steps[source].append(without_bodies(recorded))
        model.bodies[source, recorded.turn.number] = body
        await journal.write(recorded)
    elif what == "change" and turns:
        reward, chosen = draw.random(), draw.choice(turns).number
        model.change_turn(source, chosen, reward=reward, is_delivered=True)
        model.rewards[source] = reward
        model.opened[source] = dataclasses.replace(model.opened[source], sink=number)
        changed = (Rewarded(source, chosen, reward), TurnDelivered(source, chosen), Rewarded(source, None, reward))
        await journal.write(*changed, Pinned(source, number))
    elif what == "fork":
        path = tuple(sorted(draw.sample([known.number for known in turns], draw.randrange(len(turns) + 1))))
        fork = model.opened[f"s{number}"] = session(f"s{number}", number, forked_from=ForkedFrom(source, path))
        same: dict[str, Any] = {"idempotency_key": "", "body_hash": b"", "num_control": 0}
        model.steps[f"s{number}"] = [
            msgspec.structs.replace(turns[old - 1], number=new + 1, parent=new, **same) for new, old in enumerate(path)
        ]
        for new, old in enumerate(path):
            model.bodies[f"s{number}", new + 1] = model.bodies[source, old]
        await journal.write(fork)
    elif what == "close":
        model.closed[source] = ClosedSession(source, "me", "closed", float(number))
        await journal.write(SessionClosed(source, "closed", float(number)))
    elif what == "purge":
        before = float(number)
        gone = [session_id for session_id, known in model.closed.items() if known.at < before]
        for session_id in gone:
            del model.opened[session_id], model.closed[session_id], model.steps[session_id]
            model.bodies = {key: body for key, body in model.bodies.items() if key[0] != session_id}
        assert await journal.purge(before) == len(gone)
    return None


@KINDS
def test_the_journal_holds_what_a_plain_model_holds(kind: str) -> None:
    @settings(max_examples=examples(25 if kind == "sqlite" else 8))
    @given(st.integers(), st.lists(st.integers(0, 12), min_size=1, max_size=4))
    def check(seed: int, runs: list[int]) -> None:
        draw, model = random.Random(seed), Model()

        async def run(place: Place) -> None:
            for num_acts in runs:
                async with place.opened() as journal:
                    await model.check(journal)
                    for _ in range(num_acts):
                        await act(draw, journal, model)
                    await model.check(journal)

        with place_of(kind) as place:
            asyncio.run(run(place))

    check()


async def test_a_write_is_all_or_nothing_and_a_bad_one_fails_alone(place: Place) -> None:
    async with place.opened() as journal:
        await journal.write(session(), turn(1))
        results = await asyncio.gather(
            journal.write(turn(2)),
            journal.write(turn(3, response=bytes(HEAVY)), turn(1)),  # a number that is taken
            journal.write(TokensGiven("nobody", array("i", [1]))),
            journal.write(session("b", 2, label="\ud800")),
            journal.write(session("c", 2**70)),
            journal.write(session("d", 4, forked_from=ForkedFrom("a", (7,)))),
            journal.write(turn(4)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), *[JournalFailed] * 5, type(None)]
        await journal.write(TurnDelivered("a", 9))  # there is no such turn: nothing is noted, and nothing fails
        assert journal.health is None
        assert [known.number for known in (await journal.read_session("a")).turns] == [1, 2, 4]
    with pytest.raises(InvalidArgument):
        Rewarded("a", None, float("nan"))


# When it is written


class Held:
    """Commits that stop, once begun, until they are let go; and what each of them held."""

    def __init__(self) -> None:
        self.num_writes: list[int] = []
        self.has_begun, self.may_go = threading.Event(), threading.Event()

    def __call__(self, seconds: float, num_writes: int) -> None:
        self.num_writes.append(num_writes)
        self.has_begun.set()
        self.may_go.wait()


async def held_journal(place: Place, held: Held, **settings: Any) -> "tuple[Journal, asyncio.Task[None]]":
    journal = place.open(on_commit=held, **settings)
    if journal.members is not None:
        await journal.members.join(Member(name="me", epoch=0))
    first = asyncio.ensure_future(journal.write(session()))
    await asyncio.to_thread(held.has_begun.wait)
    return journal, first


async def turn_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_idle_writes_are_committed_at_once_and_queued_ones_together(place: Place) -> None:
    held = Held()
    journal, first = await held_journal(place, held)
    queued = [asyncio.ensure_future(journal.write(turn(number))) for number in range(1, 51)]
    await turn_the_loop()
    held.may_go.set()
    await asyncio.gather(first, *queued)
    for number in range(51, 54):
        await journal.write(turn(number))
    assert held.num_writes == [1, 50, 1, 1, 1]
    await journal.close()


async def test_notes_go_along_with_the_next_write_or_at_the_end(place: Place) -> None:
    commits: list[int] = []
    async with place.opened(note_delay_s=3600, on_commit=lambda seconds, num: commits.append(num)) as journal:
        await journal.write(session(), turn(1), turn(2))
        journal.note(TurnDelivered("a", 1))
        await journal.write(turn(3))
        journal.note(TurnDelivered("a", 2))
    assert commits == [1, 2, 1]
    async with place.opened() as journal:
        assert [known.is_delivered for known in (await journal.read_session("a")).turns] == [True, True, False]


async def test_a_note_is_written_soon_even_if_nothing_else_is(place: Place) -> None:
    written = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with place.opened(
        note_delay_s=0.01, on_commit=lambda seconds, num: loop.call_soon_threadsafe(written.set)
    ) as journal:
        journal.note(session())
        await asyncio.wait_for(written.wait(), 60)


async def test_writers_wait_while_too_much_is_queued(place: Place) -> None:
    held = Held()
    journal, first = await held_journal(place, held, max_queued_bytes=3 * HEAVY)
    queued = [
        asyncio.ensure_future(journal.write(turn(number, response=bytes(size))))
        for number, size in enumerate([HEAVY - 2000] * 6 + [9 * HEAVY, 10], start=1)
    ]
    await turn_the_loop()
    held.may_go.set()
    await asyncio.gather(first, *queued)
    assert max(held.num_writes) <= 3
    assert sum(held.num_writes) == 9
    await journal.close()


async def test_a_cancelled_writer_leaves_all_of_its_entries_or_none(place: Place) -> None:
    held = Held()
    journal, first = await held_journal(place, held, max_queued_bytes=HEAVY + 2000)
    queued = asyncio.ensure_future(journal.write(turn(1, response=bytes(HEAVY)), turn(2)))
    await turn_the_loop()
    waiting = asyncio.ensure_future(journal.write(turn(3, response=bytes(HEAVY)), turn(4)))
    shielded = asyncio.ensure_future(journal.write(turn(5, response=bytes(HEAVY)), turn(6)))
    outer = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(shielded), 3600))
    await turn_the_loop()
    for task in (queued, waiting, outer):
        task.cancel()
    await asyncio.gather(queued, waiting, outer, return_exceptions=True)
    held.may_go.set()
    await asyncio.gather(first, shielded)
    assert [known.number for known in (await journal.read_session("a")).turns] == [1, 2, 5, 6]
    await journal.close()


async def test_closing_writes_what_was_handed_over_and_takes_nothing_after(place: Place) -> None:
    held = Held()
    journal, first = await held_journal(place, held, max_queued_bytes=HEAVY + 2000)
    queued = asyncio.ensure_future(journal.write(turn(1, response=bytes(HEAVY))))
    await turn_the_loop()
    waiting = asyncio.ensure_future(journal.write(turn(2, response=bytes(HEAVY))))
    await turn_the_loop()
    closing = asyncio.ensure_future(journal.close())
    await turn_the_loop()
    held.may_go.set()
    await asyncio.gather(first, queued, closing)
    with pytest.raises(StorageUnavailable):
        await waiting
    with pytest.raises(StorageUnavailable):
        journal.note(turn(3))
    await journal.close()
    async with place.opened() as journal:
        assert [known.number for known in (await journal.read_session("a")).turns] == [1]


# What is asked of it


async def test_two_open_sessions_of_an_owner_never_have_the_same_name(place: Place) -> None:
    async with place.opened() as journal:
        await journal.write(session(name="mine\0"))
        results = await asyncio.gather(
            journal.write(session("b", 2, name="mine\0")), journal.write(session("c", 3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [JournalFailed, type(None)]
        assert await journal.find_named("me", "mine\0") == "a"
        assert await journal.find_named("me", "other") is None
        assert await journal.find_named("another owner", "mine\0") is None
        await journal.write(SessionClosed("a", "closed", 2.0))
        assert await journal.find_named("me", "mine\0") is None
        await journal.write(session("b", 2, name="mine\0"))
        assert await journal.find_named("me", "mine\0") == "b"
        assert await journal.count_open("me") == 2
        assert await journal.count_open("another owner") == 0


async def test_a_list_goes_on_after_a_number_and_a_summary_holds_until_something_is_recorded(place: Place) -> None:
    async with place.opened() as journal:
        ids = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]
        await journal.write(*(session(name, number, label=label) for number, (name, label) in enumerate(ids, start=1)))
        await journal.write(turn(1), SessionRested("a", 7.0, SUMMARY), SessionRested("b", 8.0, SUMMARY))
        await journal.write(TokensGiven("b", array("i", [1])), SessionClosed("d", "closed", 9.0))
        listed = await journal.list_open("me")
        assert [(one.opened.session_id, one.summary, one.rested_at) for one in listed] == [
            ("a", SUMMARY, 7.0),
            ("b", None, 8.0),
            ("c", None, None),
        ]
        assert [one.opened.session_id for one in await journal.list_open("me", after=1, limit=1)] == ["b"]
        assert [one.opened.session_id for one in await journal.list_open("me", label="x")] == ["a", "c"]
        assert await journal.rested(before=7.5) == [("c", "me"), ("a", "me")]
        assert await journal.rested(before=8.5, limit=2) == [("c", "me"), ("a", "me")]
        await journal.write(turn(2))
        assert (await journal.list_open("me"))[0].summary is None


async def test_a_released_session_can_be_acquired_and_written_again(place: Place) -> None:
    async with place.opened() as journal:
        number = await journal.next_number()
        await journal.write(session("a", number), turn(1))
        await journal.release(["a"])
        assert (await journal.acquire("a", "me")).turns == (without_bodies(turn(1)),)
        await journal.write(turn(2), SessionClosed("a", "expired", 2.0))
        for session_id, owner, detail in (("a", "me", "expired"), ("a", "another", "unknown"), ("b", "me", "unknown")):
            with pytest.raises(SessionNotFound) as caught:
                await journal.acquire(session_id, owner)
            assert caught.value.detail == detail
        assert await journal.next_number() > journal.last_number == number


async def test_a_body_goes_with_the_last_session_that_needs_it(place: Place) -> None:
    heavy = [random.Random(number).randbytes(HEAVY) for number in range(3)]
    async with place.opened() as journal:
        await journal.write(session(), *(turn(number + 1, response=body) for number, body in enumerate(heavy)))
        await journal.write(session("b", 2, forked_from=ForkedFrom("a", (2,))), SessionClosed("a", "closed", 1.0))
        assert journal.num_bytes_by_owner() == {"me": 3 * (HEAVY + len(b"asked") + 28) + 28}
        assert await journal.purge(before=2.0) == 1
        assert journal.num_bytes_by_owner() == {"me": HEAVY + len(b"asked") + 28}
        assert await journal.read_response("b", 1) == heavy[1]
        with pytest.raises(SessionNotFound):
            await journal.read_response("a", 1)


# Damage


async def test_a_damaged_row_is_refused_and_what_is_before_it_is_not(place: Place) -> None:
    async with place.opened() as journal:
        await journal.write(session("b", 2), session(), turn(1), turn(2), turn(3), turn(4))
    place.execute("UPDATE turns SET parent = 3 WHERE number = 3")
    place.execute("UPDATE bodies SET checksum = checksum + 1 WHERE id = (SELECT response FROM turns WHERE number = 1)")
    place.execute("UPDATE sessions SET label = 'another' WHERE id = 'b'")
    async with place.opened() as journal:
        damaged, other = open_sessions(journal)
        assert damaged.steps == (without_bodies(turn(1)), without_bodies(turn(2)))
        assert "damaged; the 2 steps before it are intact" in str(damaged.failure)
        assert "how this session was opened is damaged" in str(other.failure)
        with pytest.raises(StorageUnavailable, match="turn 3 of session a is damaged"):
            await journal.write(session("c", 3, forked_from=ForkedFrom("a", (1, 2, 3))))
        with pytest.raises(StorageUnavailable, match="the response of turn 1 of session a is damaged"):
            await journal.read_response("a", 1)
        assert await journal.read_response("a", 2) == b"answered"
