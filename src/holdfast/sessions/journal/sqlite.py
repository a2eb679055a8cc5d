"""The journal in a directory: SQLite, and segment files for large bodies."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.errors import ConfigError, HoldfastError, JournalFailed, StorageUnavailable
from holdfast.sessions.journal import rows
from holdfast.sessions.journal.base import Entry, Members, StoredSession, TurnRecorded
from holdfast.sessions.journal.damage import LaterCheck
from holdfast.sessions.journal.database import Database, SqliteDatabase
from holdfast.sessions.journal.database_journal import DatabaseJournal
from holdfast.sessions.journal.files import is_same_file, make_private
from holdfast.sessions.journal.recorder import INLINE_BYTES, Recorder
from holdfast.sessions.journal.schema import DirectoryLock, connect, damaged, open_database
from holdfast.sessions.journal.segments import SegmentPosition, Segments
from holdfast.sessions.journal.writer import JournalWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOCK_NS = 10 * 10**9  # by which a file system's clock may be ahead: changes within one tick of it have one time
_LOOK_S = 0.05  # how often it is looked whether a read that was interrupted has ended


class SqliteJournal(DatabaseJournal):
    """`directory` is made where it is missing, and ours alone until `close`. Opening blocks.

    A database of up to `max_checked_bytes` is checked for damage when it is opened; a larger one while it is in use, so
    that its size does not delay the opening. `on_damage` learns in a thread that there is some, `health` says what.
    `on_commit` learns in the writer's thread how long a commit took and how many writes it held.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_segment_bytes: int = 256 * 2**20,
        max_queued_bytes: int = 64 * 2**20,
        note_delay_s: float = 0.5,
        recover_s: float = 1.0,
        max_checked_bytes: int = 64 * 2**20,
        on_commit: Callable[[float, int], None] = lambda seconds, num_writes: None,
        on_damage: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._path = directory / "journal.db"
        self._on_commit = on_commit
        self._on_damage = on_damage
        self._damage: str | None = None
        self._later_check: LaterCheck | None = None
        self._last_number: int | None = None
        self._must_reconnect = False
        self._names_checked: tuple[int, int, int] | None = None  # the directory when its files were last looked at
        with contextlib.ExitStack() as undo:
            self._lock = DirectoryLock(directory)
            undo.callback(self._lock.release)
            make_private(directory)
            self._connection, self.num_cut_commits = open_database(self._path, max_checked_bytes=max_checked_bytes)
            undo.callback(self._connection.close)
            # As long as a second connection is open, SQLite never takes up again what a failed commit left in the log.
            self._reader = connect(self._path)
            undo.callback(self._reader.close)
            self._reading = threading.Lock()
            self._long_reads: list[sqlite3.Connection] = []
            self._bodies = self._segments = self._open_segments(max_segment_bytes)
            self._held = self._files_now()
            if self._path.stat().st_size > max_checked_bytes:
                self._later_check = LaterCheck(self._path, self._found_damage)
            undo.pop_all()
        self._recorder = self._new_recorder()
        self._writer = JournalWriter(
            self._commit,
            check=self._check,
            max_queued_bytes=max_queued_bytes,
            note_delay_s=note_delay_s,
            check_s=recover_s,
        )

    @property
    def health(self) -> str | None:
        return self._health or self._damage

    @property
    def members(self) -> Members | None:
        return None

    async def next_number(self) -> int:
        if self._last_number is None:
            self._last_number = await asyncio.to_thread(lambda: self.last_number)
        self._last_number += 1
        return self._last_number

    async def acquire(self, session_id: str, owner: str) -> StoredSession:
        return await self._look(lambda db: rows.open_session_of(db, session_id, owner))

    async def release(self, session_ids: Sequence[str]) -> None:
        pass

    async def rested(self, before: float, limit: int = 1000) -> list[tuple[str, str]]:
        return await self._look(lambda db: rows.rested(db, before, limit))

    async def close(self) -> None:
        if await self._writer.close():
            await asyncio.to_thread(self._close)

    # In any thread

    def _read(self, look: Callable[[Database], T]) -> T:
        with self._reading:
            return self._look_at(self._reader, look)

    def _read_long(self, look: Callable[[Database], T]) -> T:
        with contextlib.closing(connect(self._path)) as connection:
            self._long_reads.append(connection)
            try:
                return self._look_at(connection, look)
            finally:
                self._long_reads.remove(connection)

    def _look_at(self, connection: sqlite3.Connection, look: Callable[[Database], T]) -> T:
        try:
            connection.execute("BEGIN")
            try:
                return look(SqliteDatabase(connection))
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except IndexError as exc:
            raise StorageUnavailable(f"the journal {self._path} is damaged: a column has another name") from exc
        except (sqlite3.Error, UnicodeDecodeError) as exc:
            raise StorageUnavailable(f"the journal {self._path} cannot be read: {exc}") from exc

    def _open_segments(self, max_segment_bytes: int) -> Segments:
        last = (
            "SELECT CAST(start + length AS INTEGER) FROM bodies"
            " WHERE segment = ? AND typeof(start) = 'integer' ORDER BY start DESC LIMIT 1"
        )
        try:
            ends = {
                segment: end
                for segment in self._used_segments()
                for (end,) in self._connection.execute(last, (segment,))
            }
            return Segments(self.directory / "segments", ends=ends, max_segment_bytes=max_segment_bytes)
        except sqlite3.DatabaseError as exc:
            raise damaged(self._path, str(exc)) from exc
        except OSError as exc:
            raise ConfigError(f"cannot use the data directory {self.directory}: {exc}") from exc

    def _used_segments(self) -> Iterator[int]:
        """By the index on them: one look-up for each segment, however many bodies it holds."""
        query = "SELECT min(segment) FROM bodies WHERE segment > ? AND typeof(segment) = 'integer'"
        segment = -1
        while (segment := self._connection.execute(query, (segment,)).fetchone()[0]) is not None:
            yield segment

    def _found_damage(self, what: str) -> None:
        self._damage = str(damaged(self._path, what))
        logger.error("%s", self._damage)
        self._on_damage()

    def _close(self) -> None:
        if self._later_check is not None:
            self._later_check.stop()
        while self._long_reads:
            for connection in tuple(self._long_reads):
                connection.interrupt()
            time.sleep(_LOOK_S)
        self._segments.close()
        with self._reading:
            self._reader.close()
        self._connection.close()
        self._lock.release()

    # In the writer's thread

    def _commit(self, writes: Sequence[Sequence[Entry]]) -> list[Exception | None]:
        """All writes in one transaction; where that fails each in its own, so that it fails alone."""
        started = time.monotonic()
        try:
            self._reconnect()
            self._check_files()
            self._connection.execute("BEGIN IMMEDIATE")
            for entry in (entry for entries in writes for entry in entries):
                self._recorder.record(entry)
            self._recorder.flush()
            self._segments.sync()
            self._connection.execute("COMMIT")
        except Exception as exc:  # noqa: BLE001 - every writer is told
            self._roll_back()
            if len(writes) > 1:
                return [outcome for write in writes for outcome in self._commit([write])]
            return [self._failed(exc)]
        self._segments.keep()
        self._health = None
        self._check()
        if self._health is not None:  # the log was deleted during the commit, which is now saved in the database
            self._check()
        if self._health is not None:
            return [JournalFailed(f"the turn may not have been recorded: {self._health}")] * len(writes)
        self._on_commit(time.monotonic() - started, len(writes))
        if self._recorder.freed:
            self._remove_segments()
            self._recorder.freed.clear()
        return [None] * len(writes)

    def _new_recorder(self) -> Recorder:
        def place(entry: TurnRecorded, content: bytes) -> SegmentPosition | None:
            return self._segments.append(content) if len(content) > INLINE_BYTES else None

        return Recorder(SqliteDatabase(self._connection), place)

    def _failed(self, exc: Exception) -> HoldfastError:
        """The error for the caller. Only a failure that would affect other writes too makes the journal unhealthy."""
        if isinstance(exc, HoldfastError):
            return exc
        if isinstance(exc, OSError | sqlite3.OperationalError) or type(exc) is sqlite3.DatabaseError:
            self._health = f"cannot write to {self.directory}: {exc}"
            logger.error("the journal %s", self._health)
            failed = JournalFailed(f"the turn was not recorded: {self._health}")
        else:
            failed = JournalFailed(f"the turn was not recorded: {type(exc).__name__}: {exc}")
        failed.__cause__ = exc
        return failed

    def _roll_back(self) -> None:
        self._segments.discard()
        self._recorder.discard()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as exc:
            logger.error("the journal could not roll back and is reopened: %s", exc)
            self._must_reconnect = True

    def _reconnect(self) -> None:
        """A connection that could not even roll back is given up; closing it does."""
        if self._must_reconnect:
            self._connection.close()
            self._connection = connect(self._path)
            self._recorder = self._new_recorder()
            self._must_reconnect = False

    def _check(self) -> None:
        """Find out whether writing works, and where it did not whether it does again."""
        was_failing = self._health is not None
        try:
            if not was_failing:
                self._check_files()
                return
            self._repair()
            self._segments.probe()
            self._reconnect()
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            self._connection.execute(f"PRAGMA user_version = {version}")  # a commit that changes nothing
        except (OSError, sqlite3.Error) as exc:
            self._roll_back()
            self._health = f"cannot write to {self.directory}: {exc}"
            if not was_failing:
                logger.error("the journal %s", self._health)
        else:
            logger.info("the journal in %s can be written again", self.directory)
            self._health = None

    def _files_now(self) -> dict[Path, os.stat_result]:
        return {path: path.stat() for path in (self._path, self._log_path)}

    @property
    def _log_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}-wal")

    def _check_files(self) -> None:
        """Raises OSError where a file was deleted or replaced: what is written to it would end with this process."""
        directory = os.stat(self.directory)
        now = directory.st_dev, directory.st_ino, directory.st_mtime_ns
        if now == self._names_checked:  # nothing in the directory has got or lost its name
            return
        for path, held in self._held.items():
            if not is_same_file(path, held):
                raise OSError(f"{path.name} was deleted or replaced while the server runs")
        if not self._lock.is_in_place:
            raise OSError("lock was deleted or replaced while the server runs")
        if time.time_ns() - directory.st_mtime_ns > _CLOCK_NS:
            self._names_checked = now

    def _repair(self) -> None:
        """Replace what was deleted. The database itself cannot be: what was in it can only be read while we run."""
        if not is_same_file(self._path, self._held[self._path]):
            raise OSError(
                f"{self._path.name} was deleted or replaced while the server runs; "
                "save its sessions with `holdfast sessions export` before you stop the server"
            )
        if not self._lock.is_in_place:
            self._lock.renew()
        if not is_same_file(self._log_path, self._held[self._log_path]):
            with self._reading:
                with contextlib.suppress(sqlite3.ProgrammingError):  # closed by an attempt that then failed
                    if self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                        raise OSError(f"{self._log_path.name} was deleted and the database is busy")
                self._reader.close()
                self._connection.close()
                self._connection, self._reader = connect(self._path), connect(self._path)
            self._recorder = self._new_recorder()
            self._held = self._files_now()
            logger.error("%s was deleted; its content was saved in %s", self._log_path, self._path.name)

    def _remove_segments(self) -> None:
        try:
            self._segments.remove_unused(set(self._used_segments()))
        except OSError as exc:
            logger.warning("unused segment files could not be removed, and stay until the next start: %s", exc)
