"""The members of a cluster, and this server among them: rows in PostgreSQL, leases by its clock.

A member's row is locked by everyone who relies on it: `FOR SHARE` by its own commits and renewals, exclusively by
whoever marks it dead or takes its name. So the one who marks it waits for commits in flight, and none follows.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg

from holdfast.errors import Fenced, HoldfastError, JournalFailed, SessionElsewhere, SessionNotFound, StorageUnavailable
from holdfast.sessions.journal.base import Member, MemberState
from holdfast.sessions.journal.postgres_connection import application_name, is_lost, one_line
from holdfast.sessions.journal.postgres_pipeline import Connection, DatabaseSilent

T = TypeVar("T")

_FORGET_S = 86_400  # members that ended this long ago and own nothing are forgotten
_MEMBER = (
    "m.name, m.epoch, m.http, m.grpc, m.has_tls, m.version, m.joined_at, l.room, l.num_sessions,"
    " CASE WHEN m.state = 'serving' AND l.is_draining THEN 'draining' ELSE m.state END AS state,"
    " extract(epoch FROM l.until - clock_timestamp())::float8 AS lease_left_s"
)


class PostgresMembers:
    """`connect` makes a connection of this object's own; `flush` writes what the journal still has."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        lease_s: float,
        flush: Callable[[], Awaitable[None]],
        on_renewed: Callable[[float], None],
    ) -> None:
        self._name = ""  # until it joins
        self._connect = connect
        self._flush = flush
        self._on_renewed = on_renewed
        self._connection: Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-members")
        self.lease_s = lease_s
        self.epoch: int | None = None  # None: it has not joined, or it has left
        self._lease_ends_at = 0.0
        self._may_mark_at = 0.0

    @property
    def name(self) -> str:
        return self._name

    @property
    def lease_ends_at(self) -> float:
        return self._lease_ends_at

    @property
    def may_mark_dead(self) -> bool:
        """Whether others had the time to renew their leases since this member joined, or came back itself."""
        return time.monotonic() >= self._may_mark_at

    async def join(self, member: Member) -> None:
        started = time.monotonic()
        self.epoch = await self._run(lambda connection: _join(connection, member, self.lease_s))
        self._name = member.name
        self._lease_ends_at = started + self.lease_s
        self._may_mark_at = self._lease_ends_at

    async def renew(self, *, state: MemberState, room: int, num_sessions: int) -> None:
        started = time.monotonic()

        def renew(connection: Connection) -> None:
            with connection.pipeline():
                connection.execute("BEGIN")
                found = connection.execute("SELECT epoch, state FROM members WHERE name = $1 FOR SHARE", [self._name])
                connection.execute(
                    "UPDATE leases SET until = clock_timestamp() + make_interval(secs => $2), is_draining = $3,"
                    " room = $4, num_sessions = $5 WHERE name = $1"
                    " AND EXISTS (SELECT 1 FROM members WHERE name = $1 AND epoch = $6 AND state = 'serving')",
                    [self._name, self.lease_s, state == "draining", room, num_sessions, self.epoch],
                )
                self.check(found.fetchall())
                connection.execute("COMMIT")

        await self._run(renew)
        now = time.monotonic()
        if started > self._lease_ends_at:  # others may have waited for the database as long as we did
            self._may_mark_at = now + self.lease_s
        self._lease_ends_at = started + self.lease_s
        self._on_renewed(now - started)

    async def all(self) -> list[Member]:
        query = f"SELECT {_MEMBER} FROM members m JOIN leases l USING (name) WHERE m.state <> 'left' ORDER BY m.name"
        rows = await self._run(lambda connection: connection.execute(query.encode()).fetchall())
        return [Member(**row) for row in rows]

    async def owner_of(self, session_id: str) -> Member | None:
        query = (
            f"SELECT {_MEMBER} FROM sessions s LEFT JOIN members m ON m.name = s.member"
            " LEFT JOIN leases l ON l.name = s.member WHERE s.id = $1"
        )
        rows = await self._run(lambda connection: connection.execute(query.encode(), [session_id]).fetchall())
        if not rows:
            raise SessionNotFound(session_id)
        return Member(**rows[0]) if rows[0]["name"] is not None else None

    async def leave(self) -> None:
        with contextlib.suppress(JournalFailed):  # notes may be lost
            await self._flush()

        def leave(connection: Connection) -> None:
            with connection.pipeline():
                connection.execute("BEGIN")
                ours = connection.execute(
                    "UPDATE members SET state = 'left' WHERE name = $1 AND epoch = $2 AND state = 'serving'"
                    " RETURNING name",
                    [self._name, self.epoch],
                )
                if ours.fetchall():
                    connection.execute("UPDATE sessions SET member = NULL WHERE member = $1", [self._name])
                connection.execute("COMMIT")

        if self.epoch is not None:
            await self._run(leave)
        self.epoch = None
        self._lease_ends_at = 0.0

    def check(self, rows: list[dict[str, Any]]) -> None:
        """Raises where the row of this member, read under a lock, says that it may not write."""
        if self.epoch is None:
            raise JournalFailed("this server is not a member of the cluster, or has left it: nothing can be written")
        if not rows or rows[0]["epoch"] != self.epoch:
            raise Fenced(f"another server has joined the cluster as {self._name!r}: this one must stop")
        if rows[0]["state"] == "dead":
            raise Fenced(
                f"the lease of {self._name!r} expired and another member took over its sessions: this server must stop"
            )
        if rows[0]["state"] != "serving":
            raise JournalFailed("this server has left the cluster: nothing can be written")

    def close(self) -> None:
        """Blocks for as long as a request to the database takes."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()

    async def _run(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._on_connection, work)

    def _on_connection(self, work: Callable[[Connection], T]) -> T:
        """Once more on a new connection where the old one is lost: all work here may be done twice."""
        for is_last in (self._connection is None, True):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return work(self._connection)
            except psycopg.Error as exc:
                connection, self._connection = self._connection, None
                was_lost = connection is not None and is_lost(connection) and not isinstance(exc, DatabaseSilent)
                if connection is not None:
                    connection.close()
                if is_last or not was_lost:
                    raise StorageUnavailable(f"the database does not answer: {one_line(exc)}") from exc
            except HoldfastError:
                if self._connection is not None:
                    self._connection.close()  # which rolls back
                self._connection = None
                raise
        raise AssertionError("unreachable")


def lock(connection: Connection, name: str) -> None:
    """Wait, in a transaction, until nothing that the member has begun is under way, and nothing can begin.

    What takes too long is ended: its link may be cut.
    """
    query = "SELECT 1 FROM members WHERE name = $1 FOR UPDATE"
    try:
        with connection.transaction():
            connection.execute(query, [name])
    except psycopg.errors.LockNotAvailable:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity"
            " WHERE application_name = $1 AND backend_xid IS NOT NULL AND pid <> pg_backend_pid()",
            [application_name(name)],
        )
        connection.execute(query, [name])


def _join(connection: Connection, member: Member, lease_s: float) -> int:
    with connection.transaction():
        lock(connection, member.name)
        joined = connection.execute(
            "INSERT INTO members VALUES"
            " ($1, nextval('epochs'), 'serving', $2, $3, $4, $5, extract(epoch FROM clock_timestamp()))"
            " ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch, state = 'serving', http = excluded.http,"
            " grpc = excluded.grpc, has_tls = excluded.has_tls, version = excluded.version,"
            " joined_at = excluded.joined_at RETURNING epoch",
            [member.name, member.http, member.grpc, member.has_tls, member.version],
        )
        connection.execute(
            "INSERT INTO leases VALUES ($1, clock_timestamp() + make_interval(secs => $2), false, $3, $4)"
            " ON CONFLICT (name) DO UPDATE SET until = excluded.until, is_draining = false, room = excluded.room,"
            " num_sessions = excluded.num_sessions",
            [member.name, lease_s, member.room, member.num_sessions],
        )
        connection.execute(
            "WITH gone AS (DELETE FROM members USING leases WHERE leases.name = members.name"
            " AND members.state IN ('dead', 'left') AND leases.until < clock_timestamp() - make_interval(secs => $1)"
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE member = members.name) RETURNING members.name)"
            " DELETE FROM leases WHERE name IN (SELECT name FROM gone)",
            [float(_FORGET_S)],
        )
        [row] = joined.fetchall()
    return int(row["epoch"])


def take(connection: Connection, members: PostgresMembers, session_id: str, owner: str) -> bool:
    """Make this member the one that has the owner's open session, in a transaction that holds this member's row.
    Whether a dead member had it.

    Raises SessionElsewhere where another member that is alive has it, and SessionNotFound.
    """
    while True:
        rows = connection.execute(
            "SELECT member, closed_why FROM sessions WHERE id = $1 AND owner = $2", [session_id, owner]
        ).fetchall()
        if not rows or rows[0]["closed_why"]:
            raise SessionNotFound(session_id, detail=rows[0]["closed_why"] if rows else "unknown")
        holder = rows[0]["member"]
        if holder == members.name:
            return False
        if holder is not None and _is_alive(connection, holder, members.may_mark_dead):
            raise SessionElsewhere(session_id, holder)
        taken = connection.execute(
            "UPDATE sessions SET member = $1 WHERE id = $2 AND member IS NOT DISTINCT FROM $3 AND closed_at IS NULL"
            " RETURNING id",
            [members.name, session_id, holder],
        ).fetchall()
        if taken:
            return holder is not None


def _is_alive(connection: Connection, name: str, may_mark_dead: bool) -> bool:
    """Whether the member may still write. One whose lease has expired is marked dead, if that may be done already.

    The row is locked before the lease is read: whoever renews it holds a lock on the row too.
    """
    if may_mark_dead:
        [lease] = connection.execute(
            "SELECT coalesce(bool_or(until > clock_timestamp()), false) AS is_valid FROM leases WHERE name = $1", [name]
        ).fetchall()
        if not lease["is_valid"]:
            lock(connection, name)
            connection.execute(
                "UPDATE members SET state = 'dead' WHERE name = $1 AND state = 'serving'"
                " AND NOT EXISTS (SELECT 1 FROM leases WHERE name = $1 AND until > clock_timestamp())",
                [name],
            )
    return bool(
        connection.execute("SELECT 1 FROM members WHERE name = $1 AND state = 'serving' FOR SHARE", [name]).fetchall()
    )
