"""The database: its tables, its migrations, how it is opened, and how much of its log a crash has damaged. Blocks."""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.sessions.journal.damage import damage_of
from holdfast.sessions.journal.files import is_same_file, make_directory, open_private, sync, sync_directory, write_file

logger = logging.getLogger(__name__)

MODEL = "model.json"
MAGIC = b"SQLite format 3\0"

# What takes back half of a statement is needed by this process alone: it stays in memory.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "fullfsync = ON", "foreign_keys = ON", "temp_store = MEMORY")

_PREPARED_STATEMENTS = 256  # that a connection keeps: those of every table, for every number of rows

# Each step takes a database from one version to the next. A step that was released never changes.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE sessions (
            id TEXT PRIMARY KEY, number INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL,
            group_name TEXT NOT NULL, metadata TEXT NOT NULL, pin_tokens INTEGER, eos_token_ids TEXT NOT NULL,
            created_at REAL NOT NULL, forked_from TEXT, checksum INTEGER NOT NULL,
            sink INTEGER NOT NULL, reward REAL, closed_why TEXT, closed_at REAL
        ) WITHOUT ROWID""",
        """CREATE TABLE spans (
            step INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, kind TEXT NOT NULL,
            length INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, sampling_logprobs BLOB NOT NULL,
            stop_reason TEXT, checksum INTEGER NOT NULL
        )""",
        "CREATE INDEX spans_of_session ON spans (session, step)",
        """CREATE TABLE bodies (
            id INTEGER PRIMARY KEY, segment INTEGER, start INTEGER, length INTEGER NOT NULL, checksum INTEGER NOT NULL,
            content BLOB
        )""",
        """CREATE TABLE turns (
            session TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, number INTEGER NOT NULL,
            parent INTEGER NOT NULL, messages BLOB NOT NULL, reply BLOB NOT NULL, root BLOB NOT NULL,
            given BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, sampling_logprobs BLOB NOT NULL,
            finish_reason TEXT NOT NULL, facts BLOB NOT NULL, ticket_key TEXT NOT NULL, body_hash BLOB NOT NULL,
            num_control INTEGER NOT NULL, step INTEGER NOT NULL, request INTEGER NOT NULL REFERENCES bodies,
            response INTEGER NOT NULL REFERENCES bodies, checksum INTEGER NOT NULL,
            reward REAL, is_delivered INTEGER NOT NULL, UNIQUE (session, number)
        )""",
    ),
    (
        # What start-up and purging look for, without reading every row.
        "CREATE INDEX turns_by_request ON turns (request)",
        "CREATE INDEX turns_by_response ON turns (response)",
        "CREATE INDEX turns_by_step ON turns (step)",
        "CREATE INDEX bodies_by_place ON bodies (segment, start) WHERE segment IS NOT NULL",
        "CREATE INDEX sessions_closed ON sessions (closed_at) WHERE closed_at IS NOT NULL",
    ),
    (
        # What a server asks that reads a session only when it is asked for. Of the names that were in the metadata,
        # the first open session of an owner has it.
        "ALTER TABLE sessions ADD COLUMN summary BLOB",
        "ALTER TABLE sessions ADD COLUMN rested_at REAL",
        "ALTER TABLE sessions ADD COLUMN name TEXT",
        "ALTER TABLE sessions ADD COLUMN member TEXT",  # always NULL here; used where servers share a database
        """UPDATE sessions SET name = json_extract(metadata, '$."holdfast-session"')
            WHERE closed_at IS NULL AND json_valid(metadata)""",
        """UPDATE sessions SET name = NULL WHERE EXISTS (SELECT 1 FROM sessions AS other
            WHERE other.owner = sessions.owner AND other.name = sessions.name AND other.number < sessions.number)""",
        "CREATE UNIQUE INDEX sessions_by_name ON sessions (owner, name) WHERE name IS NOT NULL AND closed_at IS NULL",
        "CREATE INDEX sessions_by_number ON sessions (number)",
        "CREATE INDEX sessions_of_owner ON sessions (owner, number) WHERE closed_at IS NULL",
        "CREATE INDEX sessions_rested ON sessions (coalesce(rested_at, created_at)) WHERE closed_at IS NULL",
    ),
)


def open_database(path: Path, *, max_checked_bytes: int) -> tuple[sqlite3.Connection, int]:
    """A connection to the database at `path`, migrated, and how many commits were cut from its log. A database of up to
    `max_checked_bytes` is checked for damage; of a larger one only what opening reads is.

    The database is created where there is none. Raises ConfigError, with what to do, where the file is damaged.
    """
    try:
        if not path.exists():
            _create(path)
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise damaged(path, "it is not an SQLite database, or it was cut short")
        connection = connect(path)
        try:
            num_cut = report_cut_log(path, connection)
            if path.stat().st_size <= max_checked_bytes and (problem := damage_of(connection)) is not None:
                raise damaged(path, problem)
            migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.OperationalError as exc:
        raise ConfigError(f"cannot open the journal {path}: {exc}. {room_advice(path.parent)}") from exc
    except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:  # SQLite's own messages may quote the damage
        raise damaged(path, str(exc)) from exc
    except OSError as exc:
        raise ConfigError(f"cannot open the journal {path}: {exc.strerror}. {room_advice(path.parent)}") from exc
    return connection, num_cut


def connect(path: Path) -> sqlite3.Connection:
    """A connection to an existing database. Transactions are begun by hand."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=_PREPARED_STATEMENTS
    )
    connection.text_factory = lambda data: data.decode("utf-8", "replace")  # damage shows in the row's sum
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Take the database to the last of `migrations`, all at once or not at all."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise ConfigError(
            f"the journal {path} has version {version}, and this Holdfast supports up to {len(migrations)}; "
            "use the newer Holdfast that wrote it, or another --data-dir"
        )
    if version == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in (statement for step in migrations[version:] for statement in step):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if version:
        logger.info("migrated the journal %s from version %d to %d", path, version, len(migrations))


def _create(path: Path) -> None:
    """Under another name first: a database that has its name is whole, so an empty one is a damaged one."""
    left_over = [other for other in (path.with_name(f"{path.name}-wal"), path.parent / "segments") if other.exists()]
    if left_over:
        raise damaged(path, f"it is missing, but {left_over[0].name} is there")
    new = path.with_name(f"{path.name}.new")
    for name in (new.name, f"{new.name}-wal", f"{new.name}-shm", f"{new.name}-journal"):
        path.with_name(name).unlink(missing_ok=True)
    file = open_private(new, os.O_RDWR | os.O_CREAT)  # SQLite gives its log the mode of the database
    try:
        connection = connect(new)
        try:
            migrate(connection, path)
        finally:
            connection.close()  # the last one out takes everything over from the write-ahead log
        sync(file)
    finally:
        os.close(file)
    os.replace(new, path)
    sync_directory(path.parent)


def note_model(directory: Path, facts: Mapping[str, str]) -> None:
    """Note the `name` and `tokenizer_hash` of the model that a data directory is first used with."""
    write_file(directory / MODEL, json.dumps(dict(facts)).encode())


def noted_model(directory: Path) -> dict[str, str] | None:
    """The model that the directory was first used with; None where none is noted."""
    try:
        content = (directory / MODEL).read_bytes()
        if not content.strip(b"\0"):  # the power failed before it was on disk
            return None
        facts = json.loads(content)
        return {name: str(facts[name]) for name in ("name", "tokenizer_hash")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"cannot use the data directory {directory}: {MODEL} is damaged ({exc}); delete this file if you are sure "
            "that the directory was used with the same model"
        ) from exc


def damaged(path: Path, why: str) -> ConfigError:
    """Says that the database is, and what to do."""
    return ConfigError(f"the journal {path} is damaged: {why}. {salvage_advice(path.parent)}")


def salvage_advice(directory: Path) -> str:
    """What to do about a directory that cannot be opened."""
    return (
        f"Restore {directory} from a backup, or save all sessions that can still be read with "
        f"`holdfast sessions salvage {directory} --out NEW_DIRECTORY`, which changes nothing in {directory}"
    )


def room_advice(directory: Path) -> str:
    """What to do about a directory that cannot be written: nothing in it is lost."""
    free_mb = shutil.disk_usage(directory).free // 2**20
    return (
        f"No session is lost: make {directory} writable, free some space ({free_mb} MB are free), and start again. "
        f"The files in {directory / 'snapshots'} are caches, and may be deleted to make room"
    )


def report_cut_log(path: Path, connection: sqlite3.Connection) -> int:
    """How many commits SQLite has cut from the end of its write-ahead log when `connection` was opened; logged too.

    SQLite does so silently. A log is a header of 32 bytes and frames, each 24 bytes and one page. A frame belongs to
    the current log if its salt is the header's, and ends a transaction if its second word is not 0
    (https://www.sqlite.org/fileformat2.html).
    """
    frames = _frames(path.with_name(f"{path.name}-wal"))  # before the checkpoint, which may begin a new log
    num_kept = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
    if num_kept < 0 or len(frames) <= num_kept:
        return 0
    num_ends = sum(frames[num_kept:])
    logger.log(
        logging.ERROR if num_ends else logging.WARNING,
        "%s: the last %d pages of the write-ahead log were damaged and were cut; %s",
        path,
        len(frames) - num_kept,
        f"{num_ends} commits ended there, acknowledged ones may be lost"
        if num_ends
        else "nothing acknowledged is lost",
    )
    return num_ends


def _frames(path: Path) -> list[bool]:
    """For each frame of the log as it lies there: does it end a transaction?"""
    frames: list[bool] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return frames
    with file:
        header = file.read(32)
        if len(header) < 32:
            return frames
        page_bytes, salt = struct.unpack(">I", header[8:12])[0], header[16:24]
        while len(frame := file.read(24)) == 24 and frame[8:16] == salt:
            frames.append(frame[4:8] != bytes(4))
            file.seek(page_bytes, 1)
    return frames


class DirectoryLock:
    """A data directory for one process. The system frees it however the process ends.

    The directory itself is locked, which cannot be deleted while it is in use and made again; and a file in it, which
    names the holder. Network file systems, and earlier versions of Holdfast, lock only the file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locked: list[int] = []
        try:
            make_directory(directory)
            lock(directory, self._locked)
            self.renew()
        except BlockingIOError as exc:
            self.release()
            raise ConfigError(
                f"the data directory {directory} is in use by another Holdfast, process {_holder(directory)}; "
                "stop that process, or choose another --data-dir"
            ) from exc
        except OSError as exc:
            self.release()
            raise ConfigError(
                f"cannot write to the data directory {directory}: {exc.strerror}; "
                "make it writable, or choose another --data-dir"
            ) from exc

    @property
    def is_in_place(self) -> bool:
        return is_same_file(self._directory / "lock", os.fstat(self._locked[-1]))

    def renew(self) -> None:
        """Make and lock the file. Raises OSError where that cannot be, BlockingIOError where another process has it."""
        file = open_private(self._directory / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        self._locked.append(file)
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # only a courtesy to whoever reads the message above; a full disk must not stop a start

    def release(self) -> None:
        while self._locked:
            os.close(self._locked.pop())


def lock(directory: Path, locked: list[int]) -> None:
    """Lock a directory and add its descriptor to `locked`. Raises BlockingIOError where another process has it."""
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    locked.append(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a network file system that locks only files
        pass


def _holder(directory: Path) -> str:
    try:
        return (directory / "lock").read_text(encoding="ascii", errors="replace")[:32].strip() or "unknown"
    except OSError:
        return "unknown"
