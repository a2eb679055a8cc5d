"""Processes of a bench: started here, told what to do in lines of JSON, gone when their stdin ends."""

import asyncio
import contextlib
import os
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from holdfast.errors import HoldfastError

_END_TIMEOUT_S = 10.0
_SHOWN = 2000

T = TypeVar("T")


class ProcessFailed(HoldfastError):
    """A process of the bench ended, or did not answer."""

    code = "bench_process_failed"


class Child:
    """One process. `ask` blocks until it has answered."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._errors = errors

    def ask(self, order: Any, kind: type[T], *, timeout_s: float) -> T:
        assert self._process.stdin
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._failed("is gone") from exc
        return self.read(kind, timeout_s=timeout_s)

    def read(self, kind: type[T], *, timeout_s: float) -> T:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise self._failed(f"did not answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("is gone")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """Blocks until the process has ended; its stdin ends now."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _failed(self, what: str) -> ProcessFailed:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-_SHOWN:]
        return ProcessFailed(f"the process {self.name} {what}" + (f":\n{said}" if said else ""))


@contextlib.contextmanager
def started(module: str, *arguments: str) -> Iterator[Child]:
    """`python -m holdfast.bench.MODULE`. Ctrl-C reaches us alone, so that what was measured can still be asked for."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
    process = subprocess.Popen(
        [sys.executable, "-m", f"holdfast.bench.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    child = Child(module, process, errors)
    try:
        yield child
    finally:
        child.close()


async def obey(ready: Any, handle: Callable[[bytes], Awaitable[Any]]) -> None:
    """A child's life: say that it is ready, then answer each line of stdin until that ends."""
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say(ready)
    while line := await reader.readline():
        _say(await handle(line))
    pipe.close()


def _say(answer: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def cpu_s() -> float:
    """CPU time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s_of(pids: Iterable[int]) -> float:
    """CPU time of these processes so far; 0 where the system does not tell."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """The memory that a process has in RAM now."""
    statm = Path(f"/proc/{pid}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(told.stdout) * 1024
