"""Journals by the name of their place, for commands: a data directory, or the URL of a PostgreSQL database."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.sessions.journal.base import Journal
from holdfast.sessions.journal.files import make_directory, sync_directory
from holdfast.sessions.journal.sqlite import SqliteJournal

_PARTIAL = "incomplete-copy"  # in the directory that is copied to, until all is there
_KEPT = ("segments", "model.json", "journal.db")  # the database at the end: without it there is nothing to start on


@contextlib.asynccontextmanager
async def existing(place: str, blobs: str = "", *, alone: bool = False) -> AsyncIterator[Journal]:
    """A journal that is there. With `alone`, no server may use it; a data directory never has two users."""
    directory = Path(place).expanduser()  # noqa: ASYNC240 - of a command that does nothing else
    if not (directory / "journal.db").exists():
        raise ConfigError(f"{directory} is not the data directory of a server: it has no journal")
    journal = await asyncio.to_thread(SqliteJournal, directory)
    try:
        yield journal
    finally:
        await journal.close()


@contextlib.asynccontextmanager
async def empty(place: str, blobs: str = "") -> AsyncIterator[Journal]:
    """A journal without sessions, to write. A directory has nothing of it until the context ends without an error."""
    directory = Path(place).expanduser()  # noqa: ASYNC240
    partial = directory / _PARTIAL
    if directory.exists() and any(path != partial for path in directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; choose a new directory")
    make_directory(directory)
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was interrupted
    try:
        journal = await asyncio.to_thread(SqliteJournal, partial)
        try:
            yield journal
        finally:
            await journal.close()
        for name in _KEPT:
            if (partial / name).exists():
                os.rename(partial / name, directory / name)
        sync_directory(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
