"""The journal in PostgreSQL, which several servers share: each writes only the sessions that it owns."""

import asyncio
import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg

from holdfast.errors import (
    HoldfastError,
    JournalFailed,
    RecordUncertain,
    SessionElsewhere,
    StorageUnavailable,
)
from holdfast.sessions.journal import rows
from holdfast.sessions.journal.base import (
    Entry,
    HistoryRewound,
    SessionOpened,
    SessionPurged,
    SessionReleased,
    StoredSession,
    TokensGiven,
    TokensSampled,
    TurnRecorded,
)
from holdfast.sessions.journal.blobs import BlobStore
from holdfast.sessions.journal.database import Database
from holdfast.sessions.journal.database_journal import DatabaseJournal
from holdfast.sessions.journal.members import PostgresMembers, lock, take
from holdfast.sessions.journal.postgres_connection import (
    PostgresDatabase,
    Texts,
    cannot_connect,
    connect,
    end_backend,
    is_lost,
    one_line,
    place_of,
)
from holdfast.sessions.journal.postgres_pipeline import Connection, DatabaseSilent
from holdfast.sessions.journal.postgres_schema import check_model, prepare
from holdfast.sessions.journal.recorder import INLINE_BYTES, Recorder
from holdfast.sessions.journal.writer import JournalWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")

Trace = tuple[str, list[object]]  # a query that finds a row, and its values

_NUM_READERS = 4
_READ_S = 60.0  # without a sign of the database, after which a read fails
_LOOK_S = 0.05  # how often it is looked whether a read that was cancelled has ended
_RESOLVE_S = 2.0  # for finding out what became of a commit whose answer was lost
_CHECK = "m.epoch, m.state, l.until > clock_timestamp() AS is_valid"
_OWN_ROW = f"SELECT {_CHECK} FROM members m JOIN leases l USING (name) WHERE m.name = $1 FOR SHARE OF m".encode()
_OWNERS = "s.id, s.member, s.closed_at IS NOT NULL AS is_closed"
_BEGIN = (
    f"SELECT {_CHECK}, {_OWNERS}, pg_current_xact_id()::text AS xid, (SELECT nextval('steps')) AS base FROM members m"
    " JOIN leases l USING (name) LEFT JOIN sessions s ON s.id = ANY ($2::text[]) WHERE m.name = $1 FOR SHARE OF m"
).encode()
_LOCK = f"SELECT {_OWNERS} FROM sessions s WHERE s.id = ANY ($1::text[]) ORDER BY s.id FOR UPDATE".encode()
# No other member owns a session that is free, ours, or of a member that ended: it rests since then at the latest.
_FREE = (
    "member IS NULL OR member = ?3 OR NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = member"
    " AND until >= least(to_timestamp(?1), clock_timestamp()))"
)


@dataclass(frozen=True, slots=True)
class StoredTurn(TurnRecorded):
    """A turn whose long bodies are in the store already; `keys` by the identity of the bytes."""

    keys: dict[int, str] = field(default_factory=dict)


class BlobReader:
    """Long bodies in a store of blobs, each under a key of its own."""

    def __init__(self, blobs: BlobStore | None) -> None:
        self._blobs = blobs

    def read(self, segment: Any, start: int, length: int) -> bytes:
        if self._blobs is None:
            raise FileNotFoundError("it is in a store of blobs, and --blobs is not set")
        return self._blobs.get(segment)


class PostgresJournal(DatabaseJournal):
    """Opening blocks; nothing can be written before `members.join`. Where several servers use one database, each is a
    member with a name of its own. `model` is the `name` and `tokenizer_hash` of the model that is served: a journal
    belongs to the tokenizer that it was first used with.

    `on_commit` learns in the writer's thread how long a commit took and how many writes it held.
    """

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = 10.0,
        blobs: BlobStore | None = None,
        model: Mapping[str, str] | None = None,
        max_queued_bytes: int = 64 * 2**20,
        note_delay_s: float = 0.5,
        recover_s: float = 1.0,
        on_commit: Callable[[float, int], None] = lambda seconds, num_writes: None,
        on_renewed: Callable[[float], None] = lambda seconds: None,
        on_takeover: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place_of(url)
        self._url = url
        self._lease_s = lease_s
        self._blobs = blobs
        self._bodies = BlobReader(blobs)
        self._on_commit = on_commit
        try:
            connection = connect(url)
        except psycopg.Error as exc:
            raise cannot_connect(self.place, exc) from exc
        with contextlib.closing(connection):
            prepare(connection, self.place)
            if model is not None:
                check_model(connection, self.place, model)
        self._link: _Link | None = None
        self._lost: tuple[int, str] | None = None  # a connection that may still have a transaction on the server
        self._num_uncertain = self._num_settled = 0
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="holdfast-journal-reader")
        self._reader = threading.local()
        self._open_readers: list[Connection] = []
        self._long_reads: list[Connection] = []
        self._on_takeover = on_takeover
        self._members = PostgresMembers(self._connect, lease_s=lease_s, flush=self._flush, on_renewed=on_renewed)
        self._writer = JournalWriter(
            self._commit,
            check=self._check,
            max_queued_bytes=max_queued_bytes,
            note_delay_s=note_delay_s,
            check_s=recover_s,
        )

    @property
    def members(self) -> PostgresMembers:
        return self._members

    async def write(self, *entries: Entry) -> None:
        if self._blobs is None:
            return await super().write(*entries)
        stored = [
            await asyncio.to_thread(self._store_bodies, entry)
            if isinstance(entry, TurnRecorded) and entry.origin is None  # otherwise they are mostly on record already
            else entry
            for entry in entries
        ]
        try:
            await super().write(*stored)
        except RecordUncertain:
            raise  # they may be on record, and then they are needed
        except (StorageUnavailable, SessionElsewhere):
            keys = [key for entry in stored if isinstance(entry, StoredTurn) for key in entry.keys.values()]
            await asyncio.to_thread(self._delete_blobs, keys)
            raise

    async def next_number(self) -> int:
        return await self._in_reader(_next_number)

    async def acquire(self, session_id: str, owner: str) -> StoredSession:
        return await self._in_reader(lambda connection: self._acquire(connection, session_id, owner))

    async def release(self, session_ids: Sequence[str]) -> None:
        await self.write(*map(SessionReleased, session_ids))

    async def rested(self, before: float, limit: int = 1000) -> list[tuple[str, str]]:
        return await self._look(lambda db: rows.rested(db, before, limit, _FREE, self._members.name))

    async def close(self) -> None:
        if await self._writer.close():
            await asyncio.to_thread(self._close)

    async def _flush(self) -> None:
        """Notes too: they go along with the next write."""
        await self._writer.write(())

    # Reading, in a few threads that have a connection each

    def _connect(self) -> Connection:
        return connect(self._url, name=self._members.name, lease_s=self._lease_s)

    def _read(self, look: Callable[[Database], T]) -> T:
        return self._on_reader(lambda connection: self._look_at(connection, look))

    def _read_long(self, look: Callable[[Database], T]) -> T:
        def work(connection: Connection) -> T:
            connection.silence_s = math.inf  # a link that is cut is noticed by its keepalives
            self._long_reads.append(connection)
            try:
                return self._look_at(connection, look)
            finally:
                self._long_reads.remove(connection)

        try:
            return self._with_reader(work)
        finally:
            self._drop_reader()

    async def _look(self, look: Callable[[Database], T]) -> T:
        return await self._in_reader(lambda connection: self._look_at(connection, look))

    def _look_at(self, connection: Connection, look: Callable[[Database], T]) -> T:
        with connection.statements as statements:
            statements.send(b"BEGIN ISOLATION LEVEL REPEATABLE READ")
            try:
                return look(PostgresDatabase(statements))
            finally:
                with contextlib.suppress(psycopg.Error):  # where the connection is lost, leaving the context says so
                    statements.send(b"COMMIT")

    def _on_reader(self, work: Callable[[Connection], T]) -> T:
        return self._readers.submit(self._with_reader, work).result()

    async def _in_reader(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(self._with_reader, work))

    def _with_reader(self, work: Callable[[Connection], T]) -> T:
        """In a thread that has a connection of its own. Once more on a new connection where the old one was lost: all
        work here may be done twice."""
        for _ in range(2):
            connection: Connection | None = getattr(self._reader, "connection", None)
            is_new = connection is None
            try:
                if connection is None:
                    connection = self._reader.connection = self._connect()
                    connection.silence_s = _READ_S
                    self._open_readers.append(connection)
                return work(connection)
            except psycopg.Error as exc:
                was_lost = connection is not None and is_lost(connection) and not isinstance(exc, DatabaseSilent)
                self._drop_reader()
                if is_new or not was_lost:
                    raise StorageUnavailable(f"the journal in {self.place} cannot be read: {one_line(exc)}") from exc
            except KeyError as exc:
                raise StorageUnavailable(f"the journal in {self.place} is damaged: it has no column {exc}") from exc
            except BaseException:
                if connection is not None and connection.info.transaction_status:
                    self._drop_reader()
                raise
        raise AssertionError("unreachable")

    def _drop_reader(self) -> None:
        connection = getattr(self._reader, "connection", None)
        self._reader.connection = None
        if connection is not None:
            self._open_readers.remove(connection)
            connection.close()

    def _acquire(self, connection: Connection, session_id: str, owner: str) -> StoredSession:
        num_uncertain = self._num_uncertain
        with connection.transaction():
            if num_uncertain != self._num_settled:  # a commit of ours that is still under way has a lock on our row
                lock(connection, self._members.name)
                self._num_settled = num_uncertain
            self._check_lease(connection.execute(_OWN_ROW, [self._members.name]).fetchall())
            was_taken_over = take(connection, self._members, session_id, owner)
        if was_taken_over:
            self._on_takeover()
        return self._look_at(connection, lambda db: rows.open_session_of(db, session_id, owner))

    def _check_lease(self, own: list[dict[str, Any]]) -> None:
        self._members.check(own)
        if not own[0]["is_valid"]:
            raise JournalFailed("this server's lease has expired because the database was away; try again")

    # In the writer's thread

    def _commit(self, writes: Sequence[Sequence[Entry]]) -> list[Exception | None]:
        """All writes in one transaction; where that fails each in its own, so that it fails alone."""
        started = time.monotonic()
        outcomes: list[Exception | None] = [None] * len(writes)
        xid = ""  # of a transaction that may have been committed
        freed: list[str] = []
        was_connected = self._link is not None
        try:
            link = self._writing()
            with link.connection.statements as statements:
                begun = self._begin(link, writes, outcomes)
                for entries, outcome in zip(writes, outcomes, strict=True):
                    for entry in entries if outcome is None else ():
                        link.recorder.record(entry)
                link.recorder.flush()
                freed = [str(key) for key in link.recorder.freed]
                xid = begun
                statements.send(b"COMMIT")
            if statements.status != b"COMMIT":
                raise psycopg.DatabaseError(f"the database answered {statements.status.decode()} to COMMIT")
        except Exception as exc:  # noqa: BLE001 - every writer is told
            has_lost = self._roll_back()
            if has_lost and was_connected and not xid and not isinstance(exc, DatabaseSilent):
                # Nothing is written, and a new connection may work.
                return self._commit(writes)
            is_everyones = has_lost or isinstance(exc, (JournalFailed, psycopg.errors.LockNotAvailable))
            if len(writes) > 1 and not is_everyones:
                return [outcome for write in writes for outcome in self._commit([write])]
            failed: JournalFailed | None = self._failed(exc)
            if has_lost and xid:
                failed = self._resolved(xid, _trace(writes, outcomes, link.database.first_step), self._failed(exc))
            if failed is not None:
                return _told(outcomes, failed)
        self._health = None
        self._on_commit(time.monotonic() - started, len(writes))
        self._delete_blobs(freed)
        link.recorder.discard()
        return outcomes

    def _begin(self, link: "_Link", writes: Sequence[Sequence[Entry]], outcomes: list[Exception | None]) -> str:
        """Begin a transaction that holds this member's row, and say in `outcomes` which writes are not ours to make.

        Gives the transaction's id.
        """
        ids = sorted({entry.session_id for entries in writes for entry in entries} | _sources(writes))
        statements = link.connection.statements
        statements.send(b"BEGIN")
        found = statements.select(_BEGIN, [self._members.name, Texts(ids)])
        self._check_lease(found)
        link.database.begin_commit(found[0]["base"])
        known = {row["id"]: row for row in found}
        gone = sorted(session_id for session_id, row in known.items() if row["is_closed"] and session_id is not None)
        if gone:  # others may purge them
            locked = statements.select(_LOCK, [Texts(gone)])
            known = {session_id: row for session_id, row in known.items() if not row["is_closed"]}
            known |= {row["id"]: row for row in locked}
        opened: set[str] = set()
        for index, entries in enumerate(writes):
            outcomes[index] = self._refusal(entries, known, opened)
        return str(found[0]["xid"])

    def _refusal(
        self, entries: Sequence[Entry], known: dict[str, dict[str, Any]], opened: set[str]
    ) -> Exception | None:
        """Why this member may not make this write. Adds to `opened` the sessions that it opens."""
        for entry in entries:
            needed = {entry.session_id}
            if isinstance(entry, SessionOpened):
                opened.add(entry.session_id)
                needed = _sources([[entry]])
            for session_id in needed - opened:
                row = known.get(session_id)
                if isinstance(entry, SessionReleased) or (row is None and isinstance(entry, SessionPurged)):
                    continue
                if row is None:
                    return JournalFailed(f"the turn was not recorded: session {session_id} is not on record")
                if not row["is_closed"] and row["member"] != self._members.name:
                    return SessionElsewhere(session_id, row["member"] or "no member")
        return None

    def _writing(self) -> "_Link":
        if self._link is not None and self._link.recorder.member != self._members.name:  # it has joined since
            self._link.connection.close()
            self._link = None
        if self._link is None:
            self._link = _Link(self._connect(), self._members.name)
        if self._lost is not None:
            end_backend(self._link.connection, self._lost)
            self._lost = None
        return self._link

    def _roll_back(self) -> bool:
        """Whether the connection is lost."""
        link = self._link
        if link is None:
            return True
        link.recorder.discard()
        try:
            if not is_lost(link.connection):
                link.connection.execute("ROLLBACK")
                return False
        except psycopg.Error as exc:
            logger.warning("the journal could not roll back and connects again: %s", one_line(exc))
        link.connection.close()
        self._link, self._lost = None, link.connection.identity
        return True

    def _resolved(
        self, xid: str, trace: tuple[str, list[object]] | None, failed: JournalFailed
    ) -> JournalFailed | None:
        """What became of a commit whose answer did not come; None: it is on record.

        A database that crashed may have given the id to another transaction, which is then the one that was committed:
        what the commit has written, its `trace`, is looked for too.
        """
        deadline = time.monotonic() + _RESOLVE_S
        while time.monotonic() < deadline:
            try:
                connection = self._writing().connection
                [row] = connection.execute("SELECT pg_xact_status($1::text::xid8) AS status", [xid]).fetchall()
                if row["status"] == "aborted":
                    return failed
                if row["status"] == "committed":
                    if trace is None:
                        break
                    return None if connection.execute(*trace).fetchall() else failed
            except psycopg.Error:
                self._roll_back()
            time.sleep(0.05)
        self._num_uncertain += 1
        return RecordUncertain(
            f"the connection to {self.place} was lost while the turn was being recorded, so it may be on record or "
            "not: that shows when the session is used next"
        )

    def _failed(self, exc: Exception) -> JournalFailed:
        """The error for the caller. Only a failure that would affect other writes too makes the journal unhealthy."""
        if isinstance(exc, HoldfastError):
            return exc  # type: ignore[return-value]
        if isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError):
            self._health = f"cannot write to the database {self.place}: {one_line(exc)}"
            logger.error("the journal %s", self._health)
            failed = JournalFailed(
                f"the turn was not recorded: {self._health}; repeat the request once the database answers"
            )
        else:
            failed = JournalFailed(f"the turn was not recorded: {type(exc).__name__}: {one_line(exc)}")
        failed.__cause__ = exc
        return failed

    def _check(self) -> None:
        """Find out whether the database answers."""
        was_failing = self._health is not None
        try:
            self._writing().connection.execute("SELECT 1")
        except psycopg.Error as exc:
            self._roll_back()
            self._health = f"cannot reach the database {self.place}: {one_line(exc)}"
            if not was_failing:
                logger.error("the journal %s", self._health)
        else:
            self._health = None
            if was_failing:
                logger.info("the journal in %s can be written again", self.place)

    def _close(self) -> None:
        if self._link is not None:
            self._link.connection.close()
        self._readers.shutdown()
        while self._long_reads:
            for connection in tuple(self._long_reads):
                with contextlib.suppress(psycopg.Error):
                    connection.cancel_safe(timeout=_RESOLVE_S)
            time.sleep(_LOOK_S)
        for connection in tuple(self._open_readers):
            connection.close()
        self._members.close()

    # Long bodies outside the database

    def _store_bodies(self, entry: TurnRecorded) -> TurnRecorded:
        assert self._blobs is not None
        keys = {}
        for content in (entry.turn.request, entry.turn.response):
            if content is not None and len(content) > INLINE_BYTES and id(content) not in keys:
                keys[id(content)] = key = secrets.token_hex(16)
                try:
                    self._blobs.put(key, content)
                except OSError as exc:
                    self._delete_blobs(list(keys.values()))
                    raise JournalFailed(f"the turn was not recorded: cannot write to the blobs: {exc}") from exc
        return StoredTurn(entry.session_id, entry.turn, entry.origin, keys) if keys else entry

    def _delete_blobs(self, keys: Sequence[str]) -> None:
        if keys and self._blobs is not None:
            try:
                self._blobs.delete(keys)
            except OSError as exc:
                logger.warning("%d blobs that nothing refers to could not be deleted: %s", len(keys), exc)


class _Link:
    """The writer's connection, and what goes with it."""

    def __init__(self, connection: Connection, member: str) -> None:
        self.connection = connection
        self.database = PostgresDatabase(connection.statements)
        self.recorder = Recorder(self.database, _place, member)


def _next_number(connection: Connection) -> int:
    with connection.statements as statements:
        [row] = statements.select(b"SELECT nextval('numbers') AS number")
    return int(row["number"])


def _trace(writes: Sequence[Sequence[Entry]], outcomes: Sequence[Exception | None], first_step: int) -> Trace | None:
    """What to look for if these writes, which are committed together, are on record; None where they leave no row."""
    made = [entry for entries, outcome in zip(writes, outcomes, strict=True) if outcome is None for entry in entries]
    for entry in made:
        match entry:
            case TurnRecorded():
                query = "SELECT 1 FROM turns WHERE session = $1 AND number = $2"
                return query, [entry.session_id, entry.turn.number]
            case SessionOpened():
                return "SELECT 1 FROM sessions WHERE id = $1", [entry.session_id]
            case TokensGiven() | TokensSampled() | HistoryRewound():
                return "SELECT 1 FROM spans WHERE session = $1 AND step >= $2 LIMIT 1", [entry.session_id, first_step]
    return None


def _told(outcomes: Sequence[Exception | None], failed: Exception | None) -> list[Exception | None]:
    """What each caller is told: why its write was refused, or what became of the others."""
    return [failed if outcome is None else outcome for outcome in outcomes]


def _place(entry: TurnRecorded, content: bytes) -> tuple[str, int] | None:
    key = entry.keys.get(id(content)) if isinstance(entry, StoredTurn) else None
    return (key, 0) if key is not None else None


def _sources(writes: Sequence[Sequence[Entry]]) -> set[str]:
    """The sessions whose turns are copied."""
    return {
        entry.forked_from.session_id
        for entries in writes
        for entry in entries
        if isinstance(entry, SessionOpened) and entry.forked_from and entry.forked_from.turns and entry.copies_turns
    }
