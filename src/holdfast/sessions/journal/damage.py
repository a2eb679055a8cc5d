"""Looks for damaged pages in a database of SQLite: at once, or in a thread of its own while the database is used."""

import contextlib
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_TABLES = ("sessions", "spans", "bodies", "turns")
_DELAY_S = 5.0  # in which whoever opened the database can start


def damage_of(connection: sqlite3.Connection, table: str = "1", *, with_indexes: bool = False) -> str | None:
    """What SQLite finds wrong with the pages of a table, or of the whole database; None where nothing is. Reads it all.
    `with_indexes` also compares the indexes with the rows, which takes longer.

    Whether the rows on them are what was written is told by their sums.
    """
    try:
        pragma = "integrity_check" if with_indexes else "quick_check"
        first = connection.execute(f"PRAGMA {pragma}({table})").fetchone()[0]
    except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:
        if isinstance(exc, sqlite3.OperationalError):
            raise
        return str(exc)
    return None if first == "ok" else " ".join(str(first).split())


class LaterCheck:
    """Checks a database in a thread, after a while, one table after the other, so that no long transaction holds up its
    log.

    `on_damage` learns in that thread what was found.
    """

    def __init__(self, path: Path, on_damage: Callable[[str], None]) -> None:
        self._path = path
        self._on_damage = on_damage
        self._connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-journal-check", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        while self._thread.is_alive():
            self._connection.interrupt()
            self._thread.join(0.05)
        self._connection.close()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere a priority is the whole process's
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # requests come first
        self._stopping.wait(_DELAY_S)
        for table in _TABLES:
            if self._stopping.is_set():
                return
            try:
                problem = damage_of(self._connection, table)
            except sqlite3.OperationalError as exc:
                if not self._stopping.is_set():
                    logger.warning("%s could not be checked for damage: %s", self._path, exc)
                return
            if problem is not None:
                self._on_damage(problem)
                return
        logger.info("%s was checked: its pages are intact", self._path)
