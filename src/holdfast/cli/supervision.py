"""`holdfast serve` as child processes: each tells when it serves, is started again when it ends, and ends with us.

Parent and child hold one end each of a pair of sockets. The child writes one line of JSON: where it serves, or why it
could not. When the parent's end is closed, however the parent ended, the child drains and stops.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import ConfigError

logger = logging.getLogger(__name__)

SERVE = (sys.executable, "-m", "holdfast.cli", "serve")
_POLL_S, _ENDING_POLL_S = 0.2, 0.01  # the shorter one once a process has closed its end
_END_S = 20.0  # beyond `drain_s`; then a process that should end is killed
_STEADY_S = 10.0  # a process that served for that long is started again at once
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 8.0
_MAX_FAILURES = 5


class ChildReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child tells: its addresses and its banner when it serves, or else why it could not."""

    grpc: str = ""
    http: str = ""
    banner: str = ""
    error: str = ""


class ParentLink:
    """In the child: its end of the pair of sockets. SIGTERM to this process once the parent is gone."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError as exc:
            raise ConfigError("--supervised is for servers that another `holdfast` has started; leave it out") from exc
        self._socket.set_inheritable(False)
        threading.Thread(target=self._follow, daemon=True).start()

    def tell(self, report: ChildReport) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and SIGTERM on its way
            self._socket.sendall(msgspec.json.encode(report) + b"\n")

    def _follow(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class ServerChild:
    """One server: the process that runs it, if one does at this moment, and what that has told."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    report: ChildReport | None = None  # of the process that serves
    last_error: str = ""  # why a process did not serve, or stopped serving
    num_starts: int = 0
    num_failures: int = 0  # starts in a row after which it did not serve
    starts_at: float = 0.0  # by time.monotonic()
    serves_since: float = 0.0
    kill_at: float | None = None
    process: "subprocess.Popen[bytes] | None" = None
    channel: socket.socket | None = None
    _told: bytes = b""
    _delay_s: float = 0.0

    def start(self) -> None:
        self.num_starts += 1
        self._told, self.kill_at = b"", None
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*self.command, f"--supervised={theirs.fileno()}"]
            try:
                self.process = subprocess.Popen(
                    words,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on
                )
            except OSError as exc:  # a Python that is being replaced
                self.last_error = f"cannot run {words[0]}: {exc.strerror}"
                logger.warning("%s: %s", self.name, self.last_error)
                ours.close()
                self._waits()
                return
        ours.setblocking(False)
        self.channel = ours

    def read(self) -> bool:
        """Whether it has just told that it serves."""
        if self.channel is None:
            return False
        try:
            received = self.channel.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:  # it ends
            self.channel.close()
            self.channel = None
            return False
        self._told += received
        line, end, self._told = self._told.partition(b"\n")
        if not end:
            self._told = line
            return False
        report = msgspec.json.decode(line, type=ChildReport)
        if report.error:
            self.last_error = report.error
            return False
        self.report, self.num_failures, self.serves_since = report, 0, time.monotonic()
        return True

    def ended(self) -> int | None:
        """The exit code of its process if that has ended; when it is to be started again is decided then."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.read()  # what it told last
        if self.channel:
            self.channel.close()
        self.process = self.channel = None
        self._waits()
        return status

    def stop(self, within_s: float) -> None:
        if self.process and self.kill_at is None:
            self.process.terminate()
            self.kill_at = time.monotonic() + within_s

    def _waits(self) -> None:
        was_steady = self.report is not None and (
            self.kill_at is not None or time.monotonic() - self.serves_since > _STEADY_S
        )
        self._delay_s = 0.0 if was_steady else min(max(_FIRST_DELAY_S, 2 * self._delay_s), _LONGEST_DELAY_S)
        self.starts_at = time.monotonic() + self._delay_s
        self.num_failures += self.report is None
        self.report = None


class Supervisor:
    """Keeps servers running until it is told to stop. `run` blocks; the other methods may be called meanwhile, from
    other threads and from signal handlers.

    The first server starts alone, so that wrong settings are reported once. Unless it `persists`, a server that ends
    before all have served for the first time ends them all, and so does the time when none of them serves and all
    starts fail.
    """

    def __init__(
        self,
        children: Sequence[ServerChild],
        *,
        drain_s: float,
        persists: bool = False,
        on_ready: Callable[[ChildReport], None] = lambda report: None,
    ) -> None:
        self.children = children
        self._drain_s = drain_s
        self._persists = persists
        self._on_ready = on_ready
        self._is_ready = False  # all have served
        self._is_stopping = False
        self._status = 0
        self._restarts: deque[ServerChild] = deque()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    def stop(self) -> None:
        """Let all servers drain; `run` returns when they have ended."""
        self._is_stopping = True
        self._awake()

    def restart(self) -> None:
        """Restart all servers, each when all others serve."""
        self._restarts = deque(self.children)
        self._awake()

    def run(self) -> int:
        """The exit code: 0 after `stop`."""
        try:
            while not self._is_stopping or any(child.process for child in self.children):
                self._step()
                channels = [child.channel for child in self.children if child.channel]
                is_ending = any(child.process and not child.channel for child in self.children)
                select.select([self._woken, *channels], [], [], _ENDING_POLL_S if is_ending else _POLL_S)
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1024)
            return self._status
        finally:
            for child in self.children:
                if child.process:
                    child.process.kill()
                    child.process.wait()
            self._woken.close()
            self._wake.close()

    def _awake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"x")

    def _step(self) -> None:
        for child in self.children:
            if child.read() and not self._is_ready and all(other.report for other in self.children):
                self._is_ready = True
                self._on_ready(self.children[0].report or ChildReport())
            if (status := child.ended()) is not None:
                self._ended(child, status)
            if self._is_stopping:
                child.stop(self._drain_s + _END_S)
            elif child.process is None and time.monotonic() >= child.starts_at and self._may_start(child):
                child.start()
            if child.process and child.kill_at and time.monotonic() > child.kill_at:
                logger.warning("%s did not stop in time and is killed", child.name)
                child.process.kill()
        if self._restarts and all(child.report and not child.kill_at for child in self.children):
            self._restarts.popleft().stop(self._drain_s + _END_S)

    def _may_start(self, child: ServerChild) -> bool:
        return self._is_ready or self._persists or child is self.children[0] or self.children[0].report is not None

    def _ended(self, child: ServerChild, status: int) -> None:
        if self._is_stopping:
            return
        how = f"exit code {status}" if status >= 0 else f"signal {-status}"
        if not self._persists and not self._is_ready:
            self._fail(f"{child.name} ended with {how} before all workers served; stopping", status)
        elif not self._persists and all(
            each.report is None and each.num_failures >= _MAX_FAILURES for each in self.children
        ):
            self._fail(f"no worker could be started {_MAX_FAILURES} times in a row; stopping", 1)
        elif child.kill_at is None:
            when = child.starts_at - time.monotonic()
            logger.warning("%s ended with %s; it is started again in %.1f s", child.name, how, max(0.0, when))

    def _fail(self, why: str, status: int) -> None:
        logger.error("%s", why)
        self._status = status if status > 0 else 1
        self._is_stopping = True
