"""`holdfast serve` as a user starts it, in a process of its own: started, killed, stopped."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.bench.processes import ProcessFailed

_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 60.0
_POLL_S = 0.02
_SHOWN = 2000
_ADDRESSES = re.compile(r"gRPC +(\S+)\n(?:.*\n)*? +metrics +(http://\S+)/metrics")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is reached. `http` is a URL, `grpc` HOST:PORT."""

    http: str
    grpc: str
    pid: int


class ServerProcess:
    """One process, on ports that are free. Whoever makes one ends it, with `stop` or `kill`."""

    def __init__(self, *flags: str) -> None:
        doors = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "serve", *doors, *flags],
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches us alone
        )

    def wait_until_served(self) -> tuple[ServerAddress, float]:
        """Blocks until both doors are open; how many seconds after its start that was."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if found := _ADDRESSES.search(self._said()):
                served = ServerAddress(http=found[2], grpc=found[1], pid=self._process.pid)
                return served, time.perf_counter() - self._started
            time.sleep(_POLL_S)
        said = self._said().strip()[-_SHOWN:]
        self.kill()
        raise ProcessFailed(f"holdfast serve does not serve:\n{said}")

    def kill(self) -> None:
        """SIGKILL. Does nothing where the process has ended."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def stop(self) -> int:
        """SIGTERM; blocks until the process has ended, and gives its exit code."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self.kill()
        return self._process.returncode

    def _said(self) -> str:
        """All of its stderr so far. Not by `read`: the file's position is the process's own."""
        descriptor = self._errors.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[ServerAddress]:
    """A server for as long as this lasts."""
    server = ServerProcess(*flags)
    try:
        served, _ = server.wait_until_served()
        yield served
    finally:
        server.stop()
