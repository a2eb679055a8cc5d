"""`holdfast journal`: check, copy and migrate what servers have on record.

A TARGET is a data directory, or the URL of a PostgreSQL database.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.errors import ConfigError
from holdfast.sessions.journal.copying import Advance, compare, copy_sessions, examine
from holdfast.sessions.journal.damage import damage_of
from holdfast.sessions.journal.places import empty, existing, migrate, noted_model, shown
from holdfast.sessions.journal.schema import connect
from holdfast.sessions.journal.sqlite import SqliteJournal

_COPY = """Copy every session, open and closed, with turns, replies, rewards and names: from a data directory to a
PostgreSQL database, or back. TO must be empty; FROM is not changed, and no server may use it. Afterwards both are read
and compared, session by session."""
_CHECK = """Read everything that is on record and compare it with its checksums. The exit code is 1 if something is
damaged. No server may use a data directory meanwhile; a database may be in use."""
_MIGRATE = """Bring a data directory or a database to the version of this Holdfast. A server does so by itself where it
can. TARGET is by default what HOLDFAST_JOURNAL or HOLDFAST_DATA_DIR names."""
_BLOBS = "where a database keeps long requests and replies, as in `holdfast serve --blobs`"


def register(commands: Any) -> None:
    parser = commands.add_parser("journal", description=__doc__)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Any, description: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=description)
        added.set_defaults(run=run)
        return added

    checking = action("check", "read everything and compare it with its checksums", _check, _CHECK)
    checking.add_argument("target", metavar="TARGET")
    checking.add_argument("--blobs", default="", metavar="DIR|URL", help=_BLOBS)
    copying = action("copy", "copy all sessions to another place", _copy, _COPY)
    copying.add_argument("source", metavar="FROM")
    copying.add_argument("target", metavar="TO")
    copying.add_argument("--blobs", default="", metavar="DIR|URL", help=_BLOBS)
    copying.add_argument("--to-blobs", metavar="DIR|URL", help="the same for TO (default: --blobs)")
    migrating = action("migrate", "bring it to the version of this Holdfast", _migrate, _MIGRATE)
    migrating.add_argument("target", nargs="?", metavar="TARGET")


def _check(arguments: argparse.Namespace) -> int:
    return asyncio.run(_checked(arguments.target, arguments.blobs))


async def _checked(target: str, blobs: str) -> int:
    async with existing(target, blobs) as journal:
        problem = None
        if isinstance(journal, SqliteJournal):
            problem = await asyncio.to_thread(_page_damage, journal.directory / "journal.db")
        with _progress("checking", await journal.count_all()) as advance:
            found = await examine(journal, advance)
    if problem is not None:
        print(f"damaged pages: {problem}", file=sys.stderr)
    for what in found.problems:
        print(what, file=sys.stderr)
    intact = found.num_sessions - len(found.problems)
    print(f"{shown(target)}: {intact:,} of {found.num_sessions:,} sessions are intact, with {found.num_turns:,} turns")
    return 1 if found.problems or problem is not None else 0


def _page_damage(path: Path) -> str | None:
    with contextlib.closing(connect(path)) as connection:
        return damage_of(connection, with_indexes=True)


def _copy(arguments: argparse.Namespace) -> int:
    to_blobs = arguments.blobs if arguments.to_blobs is None else arguments.to_blobs
    return asyncio.run(_copied(arguments.source, arguments.target, arguments.blobs, to_blobs))


async def _copied(source_name: str, target_name: str, blobs: str, to_blobs: str) -> int:
    async with existing(source_name, blobs, is_alone=True) as source:
        model = await asyncio.to_thread(noted_model, source_name)
        async with empty(target_name, to_blobs, model) as target:
            total = await source.count_all()
            with _progress("copying", total) as advance:
                await copy_sessions(source, target, advance)
            with _progress("comparing", total) as advance:
                num_sessions = await compare(source, target, advance)
    print(f"{shown(target_name)}: {num_sessions:,} sessions copied and compared")
    return 0


def _migrate(arguments: argparse.Namespace) -> int:
    place = arguments.target or os.environ.get("HOLDFAST_JOURNAL") or os.environ.get("HOLDFAST_DATA_DIR")
    if not place:
        raise ConfigError("pass TARGET: a data directory, or the URL of a PostgreSQL database")
    print(f"{shown(place)} has version {migrate(place)}")
    return 0


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Advance]:
    """A progress bar if stderr is a terminal; call it after each session."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
