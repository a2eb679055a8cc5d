"""How a data directory stands: looks, makes nothing, leaves nothing behind."""

import contextlib
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.sessions.journal.schema import MIGRATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectory:
    """`damage` says why a journal that is there cannot be used."""

    path: Path
    exists: bool = False
    is_writable: bool = False
    is_in_use: bool = False
    free_bytes: int = 0
    num_open: int = 0
    num_closed: int = 0
    damage: str = ""


def look_at_data(path: Path) -> DataDirectory:
    """Makes nothing: where `path` is missing, the directory that it would be made in is what counts."""
    base = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    is_writable = base.is_dir() and os.access(base, os.W_OK | os.X_OK)
    free_bytes = shutil.disk_usage(base).free
    if base != path or not is_writable:
        return DataDirectory(path=path, exists=base == path, is_writable=is_writable, free_bytes=free_bytes)
    num_open, num_closed, damage = 0, 0, ""
    database = path / "journal.db"
    if database.exists():
        try:
            with contextlib.closing(_read_only(database)) as connection:
                damage = _damage(connection)
                count = "SELECT count(*) - count(closed_at), count(closed_at) FROM sessions"
                num_open, num_closed = (0, 0) if damage else connection.execute(count).fetchone()
        except sqlite3.Error as exc:
            damage = str(exc)
    else:
        left_over = (name for name in ("journal.db-wal", "segments") if (path / name).exists())
        damage = next((f"journal.db is missing, but {name} is there" for name in left_over), "")
    return DataDirectory(
        path=path,
        exists=True,
        is_writable=True,
        is_in_use=_is_locked(path / "lock"),
        free_bytes=free_bytes,
        num_open=num_open,
        num_closed=num_closed,
        damage=damage,
    )


def _read_only(database: Path) -> sqlite3.Connection:
    # Without a log nobody writes, and only `immutable` leaves no new files behind.
    has_log = database.with_name("journal.db-wal").exists()
    return sqlite3.connect(f"{database.absolute().as_uri()}?{'mode=ro' if has_log else 'immutable=1'}", uri=True)


def _damage(connection: sqlite3.Connection) -> str:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        return f"it has version {version}, and this Holdfast knows {len(MIGRATIONS)}"
    problem: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return "" if problem == "ok" else " ".join(problem.split())


def _is_locked(lock: Path) -> bool:
    with _opened(lock) as file:
        if file is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)
