"""`holdfast sessions`: list, show, search, close, export, import and purge the sessions of a server.

SESSION is a session id, or the start of one if no other session's id begins with it.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from holdfast.cli.client import add_server_flags, add_tls_flags, connected, full_session_id, post
from holdfast.cli.usage import is_agreed
from holdfast.errors import ConfigError
from holdfast.sessions.journal.base import closed_sessions, purge
from holdfast.sessions.journal.salvage import salvage
from holdfast.sessions.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from holdfast_sdk import Client, SessionInfo

_CHUNK_BYTES = 1 << 20
_PAGE_SIZE = 1000
_ID_LENGTH = 32
_PIPED_WIDTH = 200  # session ids are there to be copied, so they are never cut
_SEARCH = """Show passages of a session's history that QUERY is about, the best first: of the messages of a chat, or of
what the tokens of another session spell. By default only passages that have left the model's view."""
_EXPORT = """Write a session to a file: its tokens with spans and logprobs, a chat's turns, and its cache, with which it
continues on another server without recomputing. Closed sessions can be exported until they are purged."""
_IMPORT = """Create a session from a file that `holdfast sessions export` wrote, with exactly the tokens of the file.
The server refuses a damaged file, and one whose tokens would mean something else to its model."""
_PURGE = """Delete closed sessions permanently: tokens, turns, replies. Without SESSION, --closed or --older-than, those
past the server's --retain-days. With an admin's key, or if the server has no keys, the sessions of all owners."""
_SALVAGE = """Copy every session that can still be read from a damaged data directory to a new one, which a server can
then use. Of a session that is damaged in the middle, its intact beginning is saved. DIR is not changed. The exit code
is 1 if something could not be saved."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 10


def register(commands: Any) -> None:
    parser = commands.add_parser("sessions", description=__doc__)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Any, description: str | None = None) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=description or help)
        add_server_flags(added)
        added.set_defaults(run=run)
        return added

    listing = action("list", "list your sessions", _list)
    listing.add_argument("--label", help="only sessions with this label")
    listing.add_argument("--state", choices=("live", "parked", "failed"), help="only sessions in this state")
    show = action("show", "show the state of sessions", _show)
    show.add_argument("session_ids", nargs="+", metavar="SESSION")
    show.add_argument("--json", action="store_true", help="one JSON object per session")
    searching = action("search", "find what was said in a session", _search, _SEARCH)
    searching.add_argument("session_id", metavar="SESSION")
    searching.add_argument("query", metavar="QUERY")
    searching.add_argument("--limit", type=int, default=8, metavar="N", help="most passages (default: %(default)s)")
    searching.add_argument("--in-view", action="store_true", help="also passages that the model sees anyway")
    searching.add_argument("--json", action="store_true", help="one JSON object per passage")
    close = action("close", "close sessions; they stay on record until they are purged", _close)
    close.add_argument("session_ids", nargs="+", metavar="SESSION")
    export = action("export", "write a session to a file", _export, _EXPORT)
    export.add_argument("session_id", metavar="SESSION")
    export.add_argument("-o", "--output", metavar="FILE", help="default: SESSION.holdfast; -: standard output")
    export.add_argument(
        "--no-snapshot", action="store_true", help="leave out the cache: a small file, recomputed when it is imported"
    )
    export.add_argument("--force", action="store_true", help="overwrite an existing file")
    importing = action("import", "create a session from a file", _import, _IMPORT)
    importing.add_argument("file", metavar="FILE", help="-: standard input")
    purging = actions.add_parser("purge", help="delete closed sessions permanently", description=_PURGE)
    purging.add_argument("session_ids", nargs="*", metavar="SESSION", help="these sessions, however long closed")
    purging.add_argument("--closed", action="store_true", help="all closed sessions")
    purging.add_argument(
        "--older-than", type=_age, metavar="AGE", help="closed longer ago than this: 90s, 30m, 12h, 7d"
    )
    where = purging.add_mutually_exclusive_group()
    where.add_argument(
        "--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server's HTTP address (default: %(default)s)"
    )
    where.add_argument("--data-dir", type=Path, metavar="DIR", help="a data directory that no server is using")
    add_tls_flags(purging)
    purging.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    purging.set_defaults(run=_purge)
    about = "save what can be read of a damaged data directory"
    salvaging = actions.add_parser("salvage", help=about, description=_SALVAGE)
    salvaging.add_argument("directory", type=Path, metavar="DIR", help="a data directory that no server is using")
    salvaging.add_argument("--out", type=Path, required=True, metavar="NEW", help="a new or empty directory")
    salvaging.set_defaults(run=_salvage)


def _list(arguments: argparse.Namespace) -> int:
    table = Table(Column("session", no_wrap=True, min_width=32), "label", "state", "tokens", "out of view", "idle")
    with connected(arguments) as client:
        from holdfast_sdk import SessionState

        state = SessionState(arguments.state.upper()) if arguments.state else None
        for info in client.list_sessions(arguments.label, state, _PAGE_SIZE):
            counts = (f"{info.history_length:,}", f"{info.dropped_token_count:,}", f"{info.idle_seconds:,.0f} s")
            table.add_row(info.session_id, escape(info.label), info.state.lower(), *counts)
    console = Console()
    (console if console.is_terminal else Console(width=_PIPED_WIDTH)).print(table)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with connected(arguments) as client:
        for index, session_id in enumerate(_full_ids(client, arguments.session_ids)):
            info = client.session(session_id).info()
            if arguments.json:
                print(json.dumps(dataclasses.asdict(info)))
                continue
            if index:
                print()
            for name, value in _facts(info).items():
                print(f"{name:<10}{value}")
    return 0


def _facts(info: "SessionInfo") -> dict[str, str]:
    """What there is to know about a session, in a few lines."""
    spans, num_dropped = info.spans, info.dropped_token_count
    facts = {
        "session": info.session_id,
        "label": info.label,
        "state": f"{info.state.lower()}, {'busy' if info.busy else f'idle for {info.idle_seconds:,.0f} s'}",
        "failure": info.failure or "",
        "tokens": f"{info.history_length:,}: {spans.given_tokens:,} given in {spans.given_spans:,} spans, "
        f"{spans.sampled_tokens:,} sampled in {spans.sampled_spans:,} spans",
        "window": f"the first {info.sink:,} and the last {info.recent:,} tokens; {num_dropped:,} are out of view",
        "cache": f"{info.kv_live_bytes or 0:,} bytes in use of {info.kv_reserved_bytes:,} reserved"
        if info.kv_reserved_bytes
        else "",
        "rewinds": f"{info.rewind_count:,}" if info.rewind_count else "",
        "metadata": ", ".join(f"{key}={value}" for key, value in sorted(info.metadata.items())),
        "problems": f"{info.inv1_violations:,} history and {info.inv2_violations:,} memory invariants were violated"
        if info.inv1_violations or info.inv2_violations
        else "",
    }
    return {name: value for name, value in facts.items() if value}


def _full_ids(client: "Client", starts: Sequence[str]) -> list[str]:
    """The sessions that these ids, or starts of ids, mean."""
    if all(len(start) >= _ID_LENGTH for start in starts):
        return list(starts)
    session_ids = [info.session_id for info in client.list_sessions(page_size=_PAGE_SIZE)]
    return [full_session_id(start, session_ids) for start in starts]


def _search(arguments: argparse.Namespace) -> int:
    with connected(arguments) as client:
        (session_id,) = _full_ids(client, [arguments.session_id])
        found = client.session(session_id).search(
            arguments.query, limit=arguments.limit, include_in_view=arguments.in_view
        )
    for passage in found:
        if arguments.json:
            print(json.dumps(dataclasses.asdict(passage)))
            continue
        print(f"turn {passage.turn:,}, {passage.role}, tokens {passage.start:,} to {passage.end:,}")
        for line in passage.text.splitlines():
            print("  " + "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line))
    return 0


def _close(arguments: argparse.Namespace) -> int:
    with connected(arguments) as client:
        for session_id in _full_ids(client, arguments.session_ids):
            closed = client.session(session_id).close()
            print(f"{session_id}: closed after {closed.final_history_length:,} tokens")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    num_bytes = 0
    with connected(arguments) as client:
        (session_id,) = _full_ids(client, [arguments.session_id])
        name = arguments.output or f"{session_id}.holdfast"
        with _written(name, is_forced=arguments.force) as file, _progress() as advance:
            for chunk in client.session(session_id).export(with_snapshot=not arguments.no_snapshot):
                file.write(chunk)
                advance(chunk)
                num_bytes += len(chunk)
    if name != "-":
        print(f"{name}: {num_bytes:,} bytes")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    with _read(arguments.file) as (file, size), connected(arguments) as client, _progress(size) as advance:

        def chunks() -> Iterator[bytes]:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                advance(chunk)

        origin: Any = client.import_session(chunks()).origin
    print(
        f"{origin.session_id}: {origin.history_length:,} tokens, "
        f"{origin.reused_tokens:,} reused, {origin.recomputed_tokens:,} computed again"
    )
    return 0


@contextlib.contextmanager
def _written(name: str, *, is_forced: bool) -> Iterator[IO[bytes]]:
    """A file that gets its name once it is complete, and is removed otherwise."""
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(name)
    if path.exists() and not is_forced:
        raise ConfigError(f"{path} already exists; pass another -o FILE, or --force to overwrite it")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            yield file
        new.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def _read(name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """An open file and its size, if known."""
    if name == "-":
        yield sys.stdin.buffer, None
        return
    try:
        with Path(name).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise ConfigError(f"cannot read {name}: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def _progress(size: int | None = None) -> Iterator[Callable[[bytes], None]]:
    """A progress bar if stderr is a terminal; call it with each chunk."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("session", total=size)
        yield lambda chunk: progress.advance(task, len(chunk))


def _purge(arguments: argparse.Namespace) -> int:
    if arguments.session_ids and (arguments.closed or arguments.older_than is not None):
        raise ConfigError("pass either SESSION, or --closed or --older-than")
    older_than_s = 0.0 if arguments.closed and arguments.older_than is None else arguments.older_than
    if arguments.data_dir is not None:
        return asyncio.run(_in_directory(arguments, older_than_s))
    return _on_server(arguments, older_than_s)


def _on_server(arguments: argparse.Namespace, older_than_s: float | None) -> int:
    path = "/sessions/purge"
    session_ids = arguments.session_ids
    if any(len(start) < _ID_LENGTH for start in session_ids):
        closed = post(path, {"older_than_s": 0.0, "dry_run": True}, arguments)["sessions"]
        session_ids = [full_session_id(start, [entry["session_id"] for entry in closed]) for start in session_ids]
    selection: dict[str, Any] = {"session_ids": session_ids or None, "older_than_s": older_than_s}
    if not arguments.yes:
        found = [entry["session_id"] for entry in post(path, selection | {"dry_run": True}, arguments)["sessions"]]
        if not _is_confirmed(found):
            return 1 if found else 0
        selection = {"session_ids": found}  # what was confirmed, not what was closed since
    return _purged(post(path, selection, arguments)["purged"])


async def _in_directory(arguments: argparse.Namespace, older_than_s: float | None) -> int:
    directory: Path = arguments.data_dir.expanduser()
    if not arguments.session_ids and older_than_s is None:
        raise ConfigError("pass SESSION, --closed or --older-than AGE")
    if not (directory / "journal.db").exists():
        raise ConfigError(f"{directory} is not the data directory of a server: it has no journal")
    journal = await asyncio.to_thread(SqliteJournal, directory)
    try:
        closed = await closed_sessions(journal)
        session_ids = {
            full_session_id(start, [session.session_id for session in closed]) for start in arguments.session_ids
        }
        found = await closed_sessions(
            journal,
            session_ids=session_ids or None,
            before=None if older_than_s is None else time.time() - older_than_s,
        )
        if not arguments.yes and not _is_confirmed([session.session_id for session in found]):
            return 1 if found else 0
        await purge(journal, found)
    finally:
        await journal.close()
    return _purged(len(found))


def _salvage(arguments: argparse.Namespace) -> int:
    target: Path = arguments.out.expanduser()
    found = asyncio.run(salvage(arguments.directory.expanduser(), target))
    damaged = [session for session in found if session.problem]
    for session in damaged:
        print(f"session {session.session_id}: {session.problem}", file=sys.stderr)
    print(f"{target}: {_counted(len(found) - len(damaged))} saved whole, {len(damaged)} damaged")
    return 1 if damaged else 0


def _is_confirmed(session_ids: Sequence[str]) -> bool:
    """Whether there are sessions, and the user agrees to delete them."""
    if not session_ids:
        _purged(0)
        return False
    for session_id in session_ids[:_SHOWN]:
        print(session_id)
    if len(session_ids) > _SHOWN:
        print(f"... and {len(session_ids) - _SHOWN:,} more")
    return is_agreed(f"delete {_counted(len(session_ids))} permanently?")


def _purged(number: int) -> int:
    print(f"purged {_counted(number)}" if number else "nothing to purge")
    return 0


def _counted(number: int) -> str:
    return "1 session" if number == 1 else f"{number:,} sessions"


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age like 90s, 30m, 12h or 7d")
    return float(found.group(1)) * _UNITS[found.group(2)]
