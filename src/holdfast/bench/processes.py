"""Child processes of a bench: helpers that take orders as lines of JSON, and `holdfast serve` as a user starts it.

All of them end with the bench, however it ends: they stop when their stdin does.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from holdfast.errors import HoldfastError

START_TIMEOUT_S = 300.0
_HELPER_END_S = 10.0
_SERVER_END_S = 60.0
_POLL_S = 0.02
_SHOWN = 2000
_UNTIL_STDIN_ENDS = """
import runpy
from holdfast.bench.processes import stop_when_stdin_ends
stop_when_stdin_ends()
runpy.run_module("holdfast.cli", run_name="__main__")
"""
# A program that knows nothing of us, ended when its stdin is: `$$` is its process id, too.
_EXEC_UNTIL_STDIN_ENDS = 'exec 3<&0; (cat <&3 >/dev/null; kill $$) & exec "$@" 3<&- </dev/null'
_ADDRESSES = re.compile(r"gRPC +(\S+)\n(?:.*\n)*? +metrics +(http://\S+)/metrics")

T = TypeVar("T")


class ProcessFailed(HoldfastError):
    """A child process ended, or did not answer as it should."""

    code = "bench_process_failed"


class _ChildProcess:
    """A process in a session of its own, so that Ctrl-C reaches the bench alone. Its stderr goes to a file."""

    def __init__(self, name: str, command: Sequence[str], *, stdin: int, stdout: int) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=self._errors, start_new_session=True
        )
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL. Does nothing if the process has ended."""
        self._process.kill()
        self._process.wait()
        self._errors.close()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _stderr(self) -> str:
        """All of its stderr so far. Not by `read`: the process shares the position in the file."""
        descriptor = self._errors.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def _failed(self, what: str) -> ProcessFailed:
        said = self._stderr().strip()[-_SHOWN:]
        return ProcessFailed(f"process {self._name} {what}" + (f":\n{said}" if said else ""))


class Child(_ChildProcess):
    """A helper process, for as long as the context lasts. It prints one line when it is ready, then answers orders."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        super().__init__(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, order: Any, kind: type[T], *, timeout_s: float) -> T:
        """Send an order and block until it is answered."""
        assert self._process.stdin
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._failed("has ended") from exc
        return self.read(kind, timeout_s=timeout_s)

    def read(self, kind: type[T], *, timeout_s: float = START_TIMEOUT_S) -> T:
        """Block until the next line: the answer to an order, or at first what the process says when it is ready."""
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise self._failed(f"did not answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("has ended")
        return msgspec.json.decode(line, type=kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_HELPER_END_S)
        finally:  # a second Ctrl-C ends the wait, and the process all the same
            self.kill()


def started(module: str, *arguments: object) -> Child:
    """`python -m holdfast.bench.MODULE`; arguments other than text are passed as JSON."""
    words = [word if isinstance(word, str) else msgspec.json.encode(word).decode() for word in arguments]
    return Child(module, [sys.executable, "-m", f"holdfast.bench.{module}", *words])


def run_helper(main: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a helper process. What it refuses is one sentence on stderr."""
    try:
        asyncio.run(main)
    except HoldfastError as exc:
        sys.exit(str(exc))


async def obey(ready: Any, handle: Callable[[bytes], Awaitable[Any]]) -> None:
    """The main loop of a helper: say that it is ready, then answer each line of stdin until stdin ends."""
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


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that accepts requests. `http` is a URL, `grpc` HOST:PORT."""

    http: str
    grpc: str
    pid: int


class _StoppableProcess(_ChildProcess):
    """A server. Whoever creates it ends it with `stop` or `kill`."""

    def stop(self) -> int:
        """SIGTERM; blocks until the process has ended, and gives its exit code."""
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SERVER_END_S)
        finally:  # a second Ctrl-C ends the wait, and the process all the same
            self.kill()
        return self._process.returncode


class ForeignServer(_StoppableProcess):
    """Another HTTP server, for as long as the context lasts. `command` gets the address that it is to listen at."""

    def __init__(self, name: str, command: Callable[[str, int], Sequence[str]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            host, port = free.getsockname()
        self.url = f"http://{host}:{port}"
        words = ["sh", "-c", _EXEC_UNTIL_STDIN_ENDS, "sh", *command(host, port)]
        super().__init__(name, words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def wait_until_healthy(self) -> None:
        """Blocks until GET /health is answered with success."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=_SERVER_END_S):
                return
            time.sleep(_POLL_S)
        raise self._failed("did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class ServerProcess(_StoppableProcess):
    """`holdfast serve` on free ports."""

    def __init__(self, *flags: str) -> None:
        addresses = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        self._started = time.perf_counter()
        command = [sys.executable, "-c", _UNTIL_STDIN_ENDS, "serve", *addresses, *flags]
        super().__init__("holdfast serve", command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def wait_until_served(self) -> tuple[RunningServer, float]:
        """Blocks until both endpoints are open; also how many seconds that took since its start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if found := _ADDRESSES.search(self._stderr()):
                return RunningServer(found[2], found[1], self.pid), time.perf_counter() - self._started
            time.sleep(_POLL_S)
        error = self._failed("did not start")
        self.kill()
        raise error

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line of its stderr. Not after `stop` or `kill`."""
        return (self._stderr().strip().splitlines() or [""])[-1]


def stop_when_stdin_ends() -> None:
    """In a server of a bench: SIGTERM to this process once the bench has ended, even by SIGKILL."""

    def follow() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[RunningServer]:
    """A server for as long as the context lasts."""
    server = ServerProcess(*flags)
    try:
        yield server.wait_until_served()[0]
    finally:
        server.stop()


def listening_process(address: str) -> int:
    """The id of the process that listens at HOST:PORT on this machine; 0 if it cannot be found."""
    port = int(address.rpartition(":")[2])
    with contextlib.suppress(ImportError, OSError):
        import psutil  # type: ignore[import-untyped]

        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return int(found.pid)
    return 0
