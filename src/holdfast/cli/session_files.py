"""`holdfast sessions export | import`: sessions as files."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from holdfast.cli.client import Metadata, add_server, with_server
from holdfast.errors import ConfigError
from holdfast.serving.grpc.gen import runtime_pb2 as pb

_CHUNK_BYTES = 1 << 20
_EXPORT = """Write a session to a file: its tokens with spans and logprobs, a chat's turns, and its cache, with which it
goes on elsewhere without computing anything again. Closed sessions can be exported until they are purged."""
_IMPORT = """A new session from a file that `holdfast sessions export` wrote. Its tokens are exactly those of the file;
a file that is damaged, or whose tokens would mean something else to the server's model, is refused."""


def register(actions: Any) -> None:
    export = actions.add_parser("export", help="write a session to a file", description=_EXPORT)
    add_server(export)
    export.add_argument("session_id", metavar="SESSION")
    export.add_argument("-o", "--output", metavar="FILE", help="default: SESSION.holdfast; -: standard output")
    export.add_argument("--no-snapshot", action="store_true", help="leave the cache out: small, and computed again")
    export.add_argument("--force", action="store_true", help="write over a file that is there")
    export.set_defaults(run=_export)
    importing = actions.add_parser("import", help="a new session from a file", description=_IMPORT)
    add_server(importing)
    importing.add_argument("file", metavar="FILE", help="-: standard input")
    importing.set_defaults(run=_import)


def _export(arguments: argparse.Namespace) -> int:
    name = arguments.output or f"{arguments.session_id}.holdfast"
    request = pb.ExportSessionRequest(session_id=arguments.session_id, without_snapshot=arguments.no_snapshot)
    num_bytes = 0

    with _written(name, is_forced=arguments.force) as file, _progress() as (progress, task):

        async def call(stub: Any, metadata: Metadata) -> None:
            nonlocal num_bytes
            async for chunk in stub.ExportSession(request, metadata=metadata):
                file.write(chunk.data)
                num_bytes += len(chunk.data)
                progress.update(task, completed=num_bytes)

        asyncio.run(with_server(arguments.server, call))
    if name != "-":
        print(f"{name}: {num_bytes:,} bytes")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    with _read(arguments.file) as (file, size), _progress(size) as (progress, task):

        async def chunks() -> AsyncIterator[pb.SessionChunk]:
            while data := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield pb.SessionChunk(data=data)
                progress.advance(task, len(data))

        async def call(stub: Any, metadata: Metadata) -> None:
            answers.append(await stub.ImportSession(chunks(), metadata=metadata))

        answers: list[pb.ImportSessionResponse] = []
        asyncio.run(with_server(arguments.server, call))
    (answer,) = answers
    print(
        f"{answer.session_id}: {answer.history_length:,} tokens, "
        f"{answer.reused_tokens:,} reused, {answer.recomputed_tokens:,} computed again"
    )
    return 0


@contextlib.contextmanager
def _written(name: str, *, is_forced: bool) -> Iterator[IO[bytes]]:
    """A file that has its name once it is whole, and is not there otherwise."""
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(name)
    if path.exists() and not is_forced:
        raise ConfigError(f"{path} is there already; give another -o FILE, or --force to write over it")
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
    """An open file and its size, where that is known."""
    if name == "-":
        yield sys.stdin.buffer, None
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115 - closed below, and only opening is ours to explain
    except OSError as exc:
        raise ConfigError(f"cannot read {name}: {exc.strerror or exc}") from exc
    with file:
        yield file, os.fstat(file.fileno()).st_size


@contextlib.contextmanager
def _progress(size: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """Shown to people, and gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("session", total=size)
