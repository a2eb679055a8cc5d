"""The journal on PostgreSQL: whoever has a lease owns its sessions, nobody writes another's, and nothing that was
acknowledged is lost or doubled, whatever happens to servers, links and the database."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from holdfast.config import ServeConfig
from holdfast.errors import (
    ConfigError,
    Fenced,
    JournalFailed,
    RecordUncertain,
    SessionElsewhere,
    SessionNotFound,
    StorageUnavailable,
)
from holdfast.metrics import Metrics
from holdfast.serving.storage import open_storage
from holdfast.sessions.journal import postgres as postgres_journal
from holdfast.sessions.journal import postgres_schema
from holdfast.sessions.journal.base import Member, SessionClosed, SessionRested, TokensGiven, TurnDelivered
from holdfast.sessions.journal.blobs import open_blobs
from holdfast.sessions.journal.postgres import PostgresJournal
from holdfast.sessions.journal.postgres_connection import connect
from holdfast.sessions.journal.postgres_pipeline import Statements
from holdfast.sessions.ports import ModelInfo
from tests.postgres import PostgresServer, execute, on_database
from tests.talking import until
from tests.test_journal import HEAVY, session, turn
from tests.test_journal_contract import SUMMARY

QUICK_S = 0.3  # a lease that ends while a test waits


@contextlib.asynccontextmanager
async def member(url: str, name: str, *, lease_s: float = 30.0, **settings: Any) -> AsyncIterator[PostgresJournal]:
    journal = PostgresJournal(url, lease_s=lease_s, **settings)
    try:
        await journal.members.join(Member(name=name, epoch=0, http=f"{name}:80"))
        yield journal
    finally:
        await journal.close()


async def renew(journal: PostgresJournal) -> None:
    await journal.members.renew(state="serving", room=1, num_sessions=2)


async def numbers(journal: PostgresJournal, session_id: str = "a") -> list[int]:
    return [known.number for known in (await journal.read_session(session_id)).turns]


def expire(url: str, name: str) -> None:
    """As if the member had not renewed its lease for a while."""
    execute(url, f"UPDATE leases SET until = clock_timestamp() - interval '1 second' WHERE name = '{name}'")


# Owners


async def test_a_session_is_written_by_its_owner_alone_and_others_are_told_who_that_is(postgres: str) -> None:
    async with member(postgres, "one") as one, member(postgres, "two") as two:
        await one.write(session(), turn(1))
        with pytest.raises(SessionElsewhere) as caught:
            await two.acquire("a", "me")
        assert caught.value.member == "one"
        owner = await two.members.owner_of("a")
        assert owner is not None
        assert (owner.name, owner.http, owner.state) == ("one", "one:80", "serving")
        refused, written = await asyncio.gather(two.write(turn(2)), two.write(session("b", 2)), return_exceptions=True)
        assert isinstance(refused, SessionElsewhere)
        assert written is None
        await one.release(["a", "b"])  # the second is not its own to release
        assert await two.members.owner_of("a") is None
        assert [known.number for known in (await two.acquire("a", "me")).turns] == [1]
        with pytest.raises(SessionElsewhere):
            await one.write(turn(2))
        await two.write(turn(2))
        assert await numbers(one) == [1, 2]
        assert [listed.member for listed in await one.list_open("me")] == ["two", "two"]
        with pytest.raises(SessionNotFound):
            await one.members.owner_of("nobody's")


async def test_notes_about_a_session_that_went_elsewhere_are_dropped_without_a_word(
    postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with member(postgres, "one") as one, member(postgres, "two") as two:
        await one.write(session(), session("b", 2), turn(1), turn(1, "b"))
        await one.release(["a"])
        await two.acquire("a", "me")
        one.note(TurnDelivered("a", 1))
        one.note(TurnDelivered("b", 1))
        await one.write(turn(2, "b"))
        assert [known.is_delivered for known in (await two.read_session("a")).turns] == [False]
        assert (await two.read_session("b")).turns[0].is_delivered
    assert "lost" not in caplog.text


async def test_a_member_that_leaves_writes_its_notes_first_and_frees_its_sessions(postgres: str) -> None:
    async with member(postgres, "one", note_delay_s=3600) as one, member(postgres, "two") as two:
        await one.write(session(), turn(1))
        one.note(TurnDelivered("a", 1))
        await one.members.leave()
        assert [known.name for known in await two.members.all()] == ["two"]
        assert (await two.acquire("a", "me")).turns[0].is_delivered
        with pytest.raises(JournalFailed, match="left"):
            await one.write(session("b", 2))


async def test_several_servers_may_start_at_once_on_an_empty_database(postgres: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(*(asyncio.to_thread(PostgresJournal, postgres) for _ in range(4)))
        for journal in opened:
            stack.push_async_callback(journal.close)
        assert sorted([await journal.next_number() for journal in opened]) == [1, 2, 3, 4]
        with pytest.raises(JournalFailed, match="not a member"):
            await opened[0].write(session())


# Leases


async def test_a_dead_members_session_is_taken_over_and_the_zombie_can_never_write_again(postgres: str) -> None:
    async with member(postgres, "zombie", lease_s=QUICK_S) as zombie, member(postgres, "heir", lease_s=QUICK_S) as heir:
        await zombie.write(session(), turn(1))
        with pytest.raises(SessionElsewhere):  # it is alive
            await heir.acquire("a", "me")

        async def taken_over() -> bool:
            await renew(heir)
            with contextlib.suppress(SessionElsewhere):
                return [known.number for known in (await heir.acquire("a", "me")).turns] == [1]
            return False

        async with asyncio.timeout(20):
            while not await taken_over():
                await asyncio.sleep(QUICK_S / 3)
        for attempt in (zombie.write(turn(2)), renew(zombie), zombie.acquire("a", "me"), zombie.write(session("b", 2))):
            with pytest.raises(Fenced, match="took over"):
                await attempt
        await renew(heir)
        await heir.write(turn(2))
        assert await numbers(heir) == [1, 2]
        assert [(known.name, known.state) for known in await heir.members.all()] == [
            ("heir", "serving"),
            ("zombie", "dead"),
        ]


async def test_a_commit_that_is_under_way_ends_before_its_member_is_taken_for_dead(postgres: str) -> None:
    async with member(postgres, "slow", lease_s=60) as slow, member(postgres, "heir", lease_s=60) as heir:
        heir.members._may_mark_at = 0.0
        held, may_go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            may_go.wait()

        await slow.write(session())
        with before_commits(hold):
            writing = asyncio.ensure_future(slow.write(turn(1)))
            await asyncio.to_thread(held.wait)
            expire(postgres, "slow")
            taking = asyncio.ensure_future(heir.acquire("a", "me"))
            blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            await until(lambda: execute(postgres, blocked) == [(1,)])
            may_go.set()
            await writing
        assert [known.number for known in (await taking).turns] == [1]
        with pytest.raises(Fenced):
            await slow.write(turn(2))


async def test_what_a_dead_member_has_left_on_the_server_does_not_hold_up_the_takeover(
    postgres: str, cable: "Cable"
) -> None:
    async with member(through(cable, postgres), "cut") as lost, member(postgres, "heir", lease_s=2) as heir:
        await lost.write(session(), turn(1))
        heir.members._may_mark_at = 0.0

        def fall_silent() -> None:
            cable.mode = "silent"

        with before_commits(fall_silent):
            writing = asyncio.ensure_future(lost.write(turn(2)))
            await until(lambda: cable.mode == "silent")
            expire(postgres, "cut")
            assert [known.number for known in (await heir.acquire("a", "me")).turns] == [1]
            cable.mode = "open"
            cable.cut()
            with pytest.raises(JournalFailed):
                await writing
        await heir.write(turn(2))
        with pytest.raises(Fenced):
            await lost.write(turn(2))
        assert await numbers(heir) == [1, 2]


async def test_a_lease_that_expired_is_renewed_while_nobody_has_taken_over(postgres: str) -> None:
    async with member(postgres, "one", lease_s=60) as one:
        await one.write(session())
        expire(postgres, "one")
        for attempt in (one.write(turn(1)), one.acquire("a", "me")):
            with pytest.raises(JournalFailed, match=r"lease has expired.*try again") as caught:
                await attempt
            assert not isinstance(caught.value, Fenced)
        await renew(one)
        await one.write(turn(1))
        [known] = await one.members.all()
        assert (known.room, known.num_sessions) == (1, 2)
        assert 50 < known.lease_left_s <= 60


async def test_nobody_is_marked_dead_before_all_had_the_time_to_renew(postgres: str) -> None:
    async with member(postgres, "one") as one, member(postgres, "two", lease_s=60) as two:
        await one.write(session())
        expire(postgres, "one")
        with pytest.raises(SessionElsewhere):  # it has only just joined
            await two.acquire("a", "me")
        two.members._may_mark_at = 0.0
        two.members._lease_ends_at = 0.0  # as after a time without the database
        await renew(two)
        with pytest.raises(SessionElsewhere):
            await two.acquire("a", "me")
        two.members._may_mark_at = 0.0
        await renew(two)  # no gap this time
        assert (await two.acquire("a", "me")).failure is None


async def test_whoever_joins_under_the_same_name_has_its_sessions_at_once_and_the_earlier_one_is_fenced(
    postgres: str,
) -> None:
    async with member(postgres, "one") as first, member(postgres, "other") as other:
        await first.write(session(), turn(1))
        async with member(postgres, "one") as second:
            assert [known.number for known in (await second.acquire("a", "me")).turns] == [1]
            await second.write(turn(2))
            for attempt in (first.write(turn(3)), renew(first), first.release(["a"])):
                with pytest.raises(Fenced, match="another server has joined"):
                    await attempt
            await first.members.leave()  # of a fenced member: changes nothing
            owner = await other.members.owner_of("a")
            assert owner is not None
            assert owner.state == "serving"
            assert await numbers(other) == [1, 2]


async def test_sessions_of_members_that_ended_are_found_at_rest(postgres: str) -> None:
    async with member(postgres, "one") as one, member(postgres, "two") as two:
        await one.write(session(), session("b", 2), SessionRested("a", 5.0, SUMMARY))
        assert await two.rested(before=1e12) == []
        expire(postgres, "one")
        assert await two.rested(before=10.0) == []  # it was in use until a moment ago
        assert await two.rested(before=1e11) == [("b", "me"), ("a", "me")]


# Statements


def test_rows_are_those_of_psycopg_and_answers_that_nobody_reads_block_nobody(postgres: str) -> None:
    values = ["a\0b\x1bc\u00e4", 2**40, None, b"\0\xff", -1.5, True]
    query = b"SELECT $1 AS a, $2 AS b, $3::text AS c, $4 AS d, $5 AS e, $6 AS f FROM generate_series(1, 3)"
    with contextlib.closing(connect(postgres)) as connection:
        plain = connection.execute(query, values).fetchall()
        assert [plain[0][name] for name in "abcdef"] == values
        for _ in range(2):
            with connection.statements as statements:
                for _ in range(16):  # more than the buffers of both sides hold
                    statements.send(b"SELECT $1::bytea", [bytes(2**21)])
                assert statements.select(query, values) == plain
                assert statements.select(b"SELECT 1 AS a WHERE false") == []
                statements.send(b"CREATE TEMP TABLE IF NOT EXISTS few (number bigint)")
                statements.send(b"INSERT INTO few SELECT * FROM generate_series(1, $1)", [7])
            assert statements.status == b"INSERT 0 7"
        assert connection.execute("SELECT count(*) AS num FROM few").fetchall() == [{"num": 14}]


def test_the_first_statement_that_fails_is_raised_and_nothing_is_left_of_it(postgres: str) -> None:
    with contextlib.closing(connect(postgres)) as connection:
        connection.execute("CREATE TABLE few (number bigint CHECK (number < 9))")

        def use(*queries: bytes, then: Exception | None = None) -> None:
            with connection.statements as statements:
                for query in queries:
                    statements.send(query)
                if then is not None:
                    raise then

        inserts = [b"INSERT INTO few VALUES (%d)" % number for number in (1, 9, 2)]
        with pytest.raises(psycopg.errors.CheckViolation):
            use(*inserts)
        with pytest.raises(psycopg.errors.UndefinedTable):
            use(inserts[0], b"SELECT * FROM many", inserts[1])
        with pytest.raises(LookupError, match="of the caller"):
            use(b"SELECT * FROM many", then=LookupError("of the caller"))
        connection.execute("CREATE TABLE many AS SELECT 4 AS four")
        use(b"SELECT 5")
        for query in ("SELECT 1", "SELECT 1", "SELECT 1", "BEGIN", "ROLLBACK"):
            connection.execute(query)
        use(b"SELECT 5")
        with connection.statements as statements:
            assert statements.select(b"SELECT * FROM many") == [{"four": 4}]
            assert statements.select(b"SELECT * FROM few") == []


# Links that break


@contextlib.contextmanager
def before_commits(action: Callable[[], None]) -> Iterator[None]:
    """`action` runs in the writer's thread before each COMMIT is sent."""
    original = Statements.send

    def send_after(self: Statements, query: bytes, *args: Any) -> Any:
        if query == b"COMMIT" and threading.current_thread().name == "holdfast-journal":
            action()
        return original(self, query, *args)

    with patch.object(Statements, "send", send_after):
        yield


class Cable:
    """A port in front of the database. `mode`: open; mute: what clients send is lost, and their connections with it;
    deaf: the same of what the database answers; silent: nothing comes through; down: nobody is let in."""

    def __init__(self, port: int) -> None:
        self.mode = "open"
        self._target = port
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Every connection breaks."""
        while self._sockets:
            _close(self._sockets.pop())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self.mode == "down":
                    client.close()
                    continue
                database = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, database]
                for source, target, lost in ((client, database, "mute"), (database, client, "deaf")):
                    threading.Thread(target=self._pump, args=(source, target, client, lost), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, client: socket.socket, lost: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.mode == lost:
                    return _close(client)  # the database does not learn of it
                if self.mode != "silent":
                    target.sendall(data)
            _close(target)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@pytest.fixture
def cable(postgres: str) -> Iterator[Cable]:
    port = int(psycopg.conninfo.conninfo_to_dict(postgres)["port"])
    cable = Cable(port)
    yield cable
    cable.close()


def through(cable: Cable, url: str) -> str:
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    return f"postgresql://postgres@127.0.0.1:{cable.port}/{name}"


@pytest.mark.parametrize(("mode", "is_on_record"), [("deaf", True), ("mute", False)])
async def test_a_commit_whose_answer_is_lost_is_looked_up(
    postgres: str, cable: Cable, mode: str, is_on_record: bool
) -> None:
    async with member(through(cable, postgres), "one") as one:
        await one.write(session(), turn(1))
        lost = threading.Event()

        def lose_once() -> None:
            cable.mode = "open" if lost.is_set() else mode
            lost.set()

        with before_commits(lose_once), patch.object(one, "_resolved", opening(cable, one._resolved)):
            writing = one.write(turn(2, response=bytes(HEAVY)))
            if is_on_record:
                await writing
            else:
                with pytest.raises(JournalFailed) as caught:
                    await writing
                assert not isinstance(caught.value, RecordUncertain)
            assert await numbers(one) == ([1, 2] if is_on_record else [1])
            if not is_on_record:
                await one.write(turn(2))
        await one.write(turn(3))
        assert await numbers(one) == [1, 2, 3]


def opening(cable: Cable, resolved: Callable[..., Any]) -> Callable[..., Any]:
    def open_and_resolve(*args: Any) -> Any:
        cable.mode = "open"
        return resolved(*args)

    return open_and_resolve


async def test_an_id_that_a_crashed_database_gave_to_another_transaction_proves_nothing(postgres: str) -> None:
    """A transaction that never reached the disk: after the crash its id may be that of one that was committed."""
    async with member(postgres, "a") as journal:
        await journal.write(session(), turn(1), TokensGiven("a", array("i", [7])))
        xid = str(execute(postgres, "SELECT pg_current_xact_id()::text")[0][0])
        failed, trace = JournalFailed("lost"), postgres_journal._trace
        last = journal._link.database.first_step if journal._link else 0
        for entry, first_step, is_there in (
            (turn(1), last, True),
            (turn(2), last, False),
            (session(), last, True),
            (session("b", 2), last, False),
            (TokensGiven("a", array("i", [7])), last, True),
            (TokensGiven("a", array("i", [7])), last + 2**16, False),
        ):
            found = journal._resolved(xid, trace([[entry]], [None], first_step), failed)
            assert found is (None if is_there else failed)
        assert isinstance(
            journal._resolved(xid, trace([[TurnDelivered("a", 1)]], [None], last), failed), RecordUncertain
        )


@pytest.mark.parametrize(("mode", "is_on_record"), [("deaf", True), ("mute", False)])
async def test_where_nobody_can_tell_the_write_is_uncertain_and_the_session_tells_later(
    postgres: str, cable: Cable, mode: str, is_on_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_journal, "_RESOLVE_S", 0.2)

    def lose() -> None:
        cable.mode = mode

    def go_down(*args: Any) -> Any:
        cable.mode = "down"
        return resolved(*args)

    async with member(through(cable, postgres), "one", recover_s=0.05) as one:
        await one.write(session(), turn(1))
        resolved = one._resolved
        with before_commits(lose), patch.object(one, "_resolved", go_down), pytest.raises(RecordUncertain):
            await one.write(turn(2))
        assert one.health
        with pytest.raises(JournalFailed):
            await one.write(turn(2))
        cable.mode = "open"
        await until(lambda: one.health is None)
        found = [known.number for known in (await one.acquire("a", "me")).turns]
        assert found == ([1, 2] if is_on_record else [1])
        await one.write(turn(len(found) + 1))


async def test_a_backend_that_is_terminated_at_the_commit_loses_nothing(postgres: str) -> None:
    async with member(postgres, "one") as one:
        await one.write(session())

        def terminate() -> None:
            execute(
                postgres, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE backend_xid IS NOT NULL"
            )

        number = 1
        with before_commits(terminate):
            for _ in range(3):
                with contextlib.suppress(JournalFailed):
                    await one.write(turn(number))
                    number += 1
        assert number == 1
        await one.write(turn(number))
        assert await numbers(one) == [1]


async def test_a_connection_that_broke_while_nothing_was_written_costs_no_write(postgres: str, cable: Cable) -> None:
    async with member(through(cable, postgres), "one") as one:
        await one.write(session(), turn(1))
        assert await numbers(one) == [1]
        cable.cut()
        await one.write(turn(2))
        cable.cut()
        assert await numbers(one) == [1, 2]
        cable.cut()
        await renew(one)


async def test_a_link_that_falls_silent_fails_writes_reads_and_renewals_in_time(
    postgres: str, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_journal, "_READ_S", 0.3)
    monkeypatch.setattr(postgres_journal, "_NUM_READERS", 1)
    async with member(through(cable, postgres), "one", lease_s=0.3, recover_s=0.5) as one:
        await one.write(session())
        assert await numbers(one) == []
        cable.mode = "silent"
        results = await asyncio.gather(one.write(turn(1)), numbers(one), renew(one), return_exceptions=True)
        assert [isinstance(result, StorageUnavailable) for result in results] == [True] * 3
        assert "did not answer for 0.3 seconds; repeat the request once the database answers" in str(results[0])
        cable.cut()
        cable.mode = "open"
        await until(lambda: one.health is None)
        await renew(one)
        await one.write(turn(1))
        assert await numbers(one) == [1]


# The database goes away


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.remove()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
async def test_a_database_that_ends_in_the_middle_of_commits_loses_nothing_and_doubles_nothing(
    own_server: PostgresServer, how: signal.Signals
) -> None:
    execute(own_server.url, f"CREATE DATABASE run_{how}")
    async with member(on_database(own_server.url, f"run_{how}"), "one", recover_s=0.05) as one:
        acknowledged: dict[str, int] = {}
        ending = asyncio.Event()

        async def talk(session_id: str, number: int) -> None:
            await one.write(session(session_id, number))
            while not ending.is_set():
                upcoming = acknowledged.get(session_id, 0) + 1
                try:
                    await one.write(TokensGiven(session_id, array("i", [upcoming])), turn(upcoming, session_id))
                except RecordUncertain:
                    with contextlib.suppress(StorageUnavailable):  # as a server does: what is on record counts
                        found = await one.acquire(session_id, "me")
                        acknowledged[session_id] = len(found.turns)
                except JournalFailed:
                    await asyncio.sleep(0.01)
                else:
                    acknowledged[session_id] = upcoming

        talking = [asyncio.ensure_future(talk(f"s{number}", number)) for number in range(4)]
        await until(lambda: sum(acknowledged.values()) > 40)
        await asyncio.to_thread(own_server.stop, how)
        await until(lambda: one.health is not None)
        with pytest.raises(StorageUnavailable, match="does not answer"):
            await renew(one)
        await asyncio.to_thread(own_server.start)
        await until(lambda: one.health is None)
        before = sum(acknowledged.values())
        await until(lambda: sum(acknowledged.values()) > before + 40)
        ending.set()
        await asyncio.gather(*talking)
        for session_id, num_turns in acknowledged.items():
            found = await one.read_session(session_id)
            assert [known.number for known in found.turns] == list(range(1, num_turns + 1))
            assert found.failure is None
            assert len(found.steps) == 2 * num_turns


# Long bodies in a store


async def test_long_bodies_are_in_the_store_until_nothing_needs_them(postgres: str, tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path))

    def stored() -> int:
        return sum(path.is_file() for path in tmp_path.rglob("*"))

    async with member(postgres, "one", blobs=blobs) as one:
        await one.write(session(), turn(1, request=b"q" * HEAVY, response=b"r" * HEAVY), turn(2))
        assert stored() == 2
        assert await one.read_request("a", 1) == b"q" * HEAVY
        assert await one.read_response("a", 1) == b"r" * HEAVY
        assert await one.read_response("a", 2) == b"answered"
        with pytest.raises(JournalFailed):
            await one.write(turn(2, response=bytes(HEAVY)))  # a number that is taken
        assert stored() == 2
        await one.write(SessionClosed("a", "closed", 1.0))
        assert await one.purge(before=2.0) == 1
        assert stored() == 0
        await one.write(session("b", 2), turn(1, "b", response=bytes(HEAVY)))
    async with member(postgres, "one") as one:
        with pytest.raises(StorageUnavailable, match="--blobs is not set"):
            await one.read_response("b", 1)


async def test_a_store_that_refuses_fails_the_write_alone(postgres: str) -> None:
    class Full:
        def put(self, key: str, content: bytes) -> None:
            raise OSError("no room")

        def delete(self, keys: object) -> None:
            raise OSError("no room")

    blobs: Any = Full()
    async with member(postgres, "one", blobs=blobs) as one:
        results = await asyncio.gather(
            one.write(session()), one.write(turn(1, response=bytes(HEAVY))), return_exceptions=True
        )
        assert results[0] is None
        assert "cannot write to the blobs: no room" in str(results[1])
        assert await numbers(one) == []


# What a person may get wrong


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        PostgresJournal(url)
    return str(caught.value)


def test_a_url_that_leads_nowhere_says_what_to_do(postgres: str) -> None:
    port = psycopg.conninfo.conninfo_to_dict(postgres)["port"]
    assert "write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in refusal("postgresql://host:1/a?b=c")
    assert "the port in --journal must be a number, got 'port'" in refusal("postgresql://host:port/name")
    assert "check that the database runs" in refusal("postgresql://postgres@127.0.0.1:1/name")
    assert "check that the database runs" in refusal(f"postgresql://postgres@no-such-host.invalid:{port}/name")
    missing = refusal(f"postgresql://postgres@127.0.0.1:{port}/nothing")
    assert 'database "nothing" does not exist; create it (CREATE DATABASE)' in missing
    assert f"127.0.0.1:{port}/nothing" in missing
    assert 'role "nobody" does not exist; create this role' in refusal(f"postgresql://nobody@127.0.0.1:{port}/x")


def test_a_wrong_or_expired_password_and_missing_permissions_say_what_to_do(own_server: PostgresServer) -> None:
    rules = own_server.data / "pg_hba.conf"
    rules.write_text(
        "host all guest 127.0.0.1/32 scram-sha-256\nhost all late 127.0.0.1/32 scram-sha-256\n"
        "host all outcast 127.0.0.1/32 reject\nhost all all 127.0.0.1/32 trust\n"
    )
    for statement in (
        "SELECT pg_reload_conf()",
        "CREATE ROLE guest LOGIN PASSWORD 'secret'",
        "CREATE ROLE late LOGIN PASSWORD 'secret' VALID UNTIL '2001-01-01'",
        "CREATE ROLE outcast LOGIN",
        "CREATE DATABASE private",
        "CREATE DATABASE closed",
        "REVOKE CONNECT ON DATABASE closed FROM PUBLIC",
        "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0",
    ):
        execute(own_server.url, statement)

    def refused(user: str, database: str = "private") -> str:
        said = refusal(f"postgresql://{user}@127.0.0.1:{own_server.port}/{database}")
        assert "secret" not in said
        assert "\n" not in said
        return said

    for user in ("guest:secret2", "late:secret", "guest"):
        assert refused(user).endswith("; check the user and the password in the URL")
    assert refused("outcast").endswith("; allow this user to connect to this database")
    assert refused("guest:secret", "closed").endswith("; allow this user to connect to this database")
    assert "permission denied for schema public; let its user own the database" in refused("guest:secret")
    assert "create it with ENCODING 'UTF8'" in refused("postgres", "latin")
    execute(own_server.url, "ALTER DATABASE private SET default_transaction_read_only = on")
    assert "is read-only; name the primary server" in refused("postgres")


def test_tables_of_others_and_of_another_version_are_not_touched(postgres: str) -> None:
    execute(postgres, "CREATE TABLE sessions (id int)")
    assert "has a table 'sessions' that Holdfast did not make" in refusal(postgres)
    execute(postgres, "DROP TABLE sessions; CREATE TABLE facts (what int)")
    assert "has a table 'facts' that Holdfast did not make" in refusal(postgres)
    execute(postgres, "DROP TABLE facts")
    asyncio.run(PostgresJournal(postgres).close())
    execute(postgres, "UPDATE facts SET value = '99' WHERE name = 'version'")
    assert "has version 99" in refusal(postgres)
    assert "use the newer Holdfast that wrote it" in refusal(postgres)


async def test_an_older_schema_is_migrated_at_the_start_or_where_servers_must_stop_by_command(postgres: str) -> None:
    def prepare(*further: postgres_schema.Migration, may_stop: bool = False) -> None:
        with contextlib.closing(connect(postgres)) as connection:
            migrations = (*postgres_schema.MIGRATIONS, *further)
            postgres_schema.prepare(connection, "here", may_stop=may_stop, migrations=migrations)

    online = postgres_schema.Migration(("ALTER TABLE sessions ADD COLUMN further INT",), is_online=True)
    offline = postgres_schema.Migration(("ALTER TABLE sessions DROP COLUMN further",))
    async with member(postgres, "one") as one:
        await one.write(session(), turn(1))
        prepare(online)
        with pytest.raises(ConfigError, match="holdfast journal migrate"):
            prepare(online, offline)
        with pytest.raises(ConfigError, match="one uses the journal in here"):
            prepare(online, offline, may_stop=True)
        expire(postgres, "one")
        with pytest.raises(ConfigError, match="nonsense"):
            prepare(online, offline, postgres_schema.Migration(("nonsense",)), may_stop=True)
        prepare(online, offline, may_stop=True)
        assert await numbers(one) == [1]
    assert execute(postgres, "SELECT value FROM facts WHERE name = 'version'") == [("3",)]


def test_a_journal_belongs_to_the_tokenizer_that_it_was_first_used_with(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(name: str, tokenizer: str) -> None:
        sizes = dict.fromkeys(("vocab_size", "sink", "recent", "max_pin", "context"), 8)
        model = ModelInfo(
            name=name,
            tokenizer_hash=tokenizer,
            fingerprint="",
            chat_template_hash="",
            eos_token_ids=frozenset(),
            **sizes,
        )
        with open_storage(ServeConfig(journal=postgres), Metrics(), model) as storage:
            asyncio.run(storage.journal.close())

    opened("first", "x")
    opened("another name", "x")
    with pytest.raises(ConfigError, match=r"was used with 'first', which has another tokenizer than 'second'"):
        opened("second", "y")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in [name for name in sys.modules if name.startswith("holdfast.sessions.journal.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"--journal needs the package psycopg; to install it, run: .*\[postgres\]"):
        opened("first", "x")


def test_a_server_that_is_too_old_is_refused_by_name(postgres: str) -> None:
    with patch.object(postgres_schema, "LEAST_VERSION", 99):
        assert "use PostgreSQL 99 or newer" in refusal(postgres)
