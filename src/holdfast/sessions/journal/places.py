"""Journals by the name of their place, for commands: a data directory, or the URL of a PostgreSQL database."""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import __version__
from holdfast.errors import ConfigError, HoldfastError, StorageUnavailable
from holdfast.extras import how_to_install
from holdfast.sessions.journal import schema
from holdfast.sessions.journal.base import Journal, Member, Members
from holdfast.sessions.journal.blobs import usable_blobs
from holdfast.sessions.journal.files import make_directory, sync_directory
from holdfast.sessions.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from holdfast.sessions.journal.postgres import PostgresJournal

_LEASE_S = 30.0
_PARTIAL = "incomplete-copy"  # in the directory that is copied to, until all is there
_KEPT = ("segments", schema.MODEL, "journal.db")  # the database at the end: without it there is nothing to start on

Facts = Mapping[str, str]  # the name and tokenizer_hash of a model


def is_database(place: str) -> bool:
    return place.startswith(("postgresql://", "postgres://"))


def shown(place: str) -> str:
    """The place as messages name it: without a password."""
    if not is_database(place):
        return place
    _require_psycopg()
    from holdfast.sessions.journal.postgres_connection import place_of

    return place_of(place)


@contextlib.asynccontextmanager
async def existing(place: str, blobs: str = "", *, is_alone: bool = False) -> AsyncIterator[Journal]:
    """A journal that is there, to read. `is_alone`: no server may use it; a data directory never has two users."""
    journal: Journal
    if is_database(place):
        journal = await asyncio.to_thread(_postgres, place, blobs)
    else:
        directory = Path(place).expanduser()  # noqa: ASYNC240 - of a command that does nothing else
        if not (directory / "journal.db").exists():
            raise ConfigError(f"{directory} is not the data directory of a server: it has no journal")
        journal = await asyncio.to_thread(SqliteJournal, directory)
    try:
        if is_alone and journal.members is not None:
            await _check_alone(journal.members, place)
        yield journal
    finally:
        await journal.close()


@contextlib.asynccontextmanager
async def empty(place: str, blobs: str = "", model: Facts | None = None) -> AsyncIterator[Journal]:
    """A journal without sessions, to write; `model` is noted in it. A directory has nothing of it until the context
    ends without an error."""
    if is_database(place):
        database = await asyncio.to_thread(_postgres, place, blobs, model)
        try:
            if await database.list_all(limit=1):
                raise ConfigError(f"the database {database.place} has sessions already; create a new one")
            await _check_alone(database.members, place)
            try:
                async with joined(database):
                    yield database
            except HoldfastError as exc:
                raise StorageUnavailable(
                    f"{exc}. The database {database.place} may have a part of the sessions now: drop it and create it "
                    "again before the next attempt"
                ) from exc
        finally:
            await database.close()
        return
    directory = Path(place).expanduser()  # noqa: ASYNC240
    partial = directory / _PARTIAL
    if directory.exists() and any(path != partial for path in directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; choose a new directory")
    make_directory(directory)
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was interrupted
    try:
        journal = await asyncio.to_thread(SqliteJournal, partial)
        try:
            if model:
                schema.note_model(partial, model)
            yield journal
        finally:
            await journal.close()
        for name in _KEPT:
            if (partial / name).exists():
                os.rename(partial / name, directory / name)
        sync_directory(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.asynccontextmanager
async def joined(journal: Journal) -> AsyncIterator[None]:
    """The journal can be written: where several servers may share it, as one of its members."""
    members = journal.members
    if members is None:
        yield
        return
    await members.join(Member(name=f"holdfast-journal:{secrets.token_hex(4)}", epoch=0, version=__version__))
    renewing = asyncio.create_task(_renew(members))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await members.leave()


def noted_model(place: str) -> Facts | None:
    """The model that the journal was first used with; None where none is noted. Blocks."""
    if not is_database(place):
        return schema.noted_model(Path(place).expanduser())
    from holdfast.sessions.journal.postgres_connection import connect
    from holdfast.sessions.journal.postgres_schema import noted_model

    with contextlib.closing(connect(place)) as connection:
        return noted_model(connection) or None


def migrate(place: str) -> int:
    """Bring the journal to the version of this Holdfast; which that is. Blocks."""
    if not is_database(place):
        directory = Path(place).expanduser()
        if not (directory / "journal.db").exists():
            raise ConfigError(f"{directory} is not the data directory of a server: it has no journal")
        journal = SqliteJournal(directory)
        asyncio.run(journal.close())
        return len(schema.MIGRATIONS)
    _require_psycopg()
    import psycopg

    from holdfast.sessions.journal.postgres_connection import cannot_connect, connect
    from holdfast.sessions.journal.postgres_schema import MIGRATIONS, prepare

    try:
        connection = connect(place)
    except psycopg.Error as exc:
        raise cannot_connect(shown(place), exc) from exc
    with contextlib.closing(connection):
        prepare(connection, shown(place), may_stop=True)
    return len(MIGRATIONS)


def _postgres(url: str, blobs: str, model: Facts | None = None) -> "PostgresJournal":
    _require_psycopg()
    from holdfast.sessions.journal.postgres import PostgresJournal

    store = usable_blobs(blobs) if blobs else None
    return PostgresJournal(url, lease_s=_LEASE_S, blobs=store, model=model)


def _require_psycopg() -> None:
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError as exc:
        raise ConfigError(f"a PostgreSQL database needs the package {exc.name}; {how_to_install('postgres')}") from exc


async def _check_alone(members: Members, place: str) -> None:
    for member in await members.all():
        if member.state != "dead" and member.lease_left_s > 0:
            raise ConfigError(f"{member.name} uses the journal in {shown(place)}; stop all servers that do")


async def _renew(members: Members) -> None:
    while True:
        await asyncio.sleep(_LEASE_S / 10)
        with contextlib.suppress(StorageUnavailable):  # the lease may still be valid; if not, writing fails
            await members.renew(state="serving", room=0, num_sessions=0)
