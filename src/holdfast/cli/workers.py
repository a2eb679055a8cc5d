"""`holdfast serve --workers 4`: a parent that keeps four servers running, which share both addresses and the journal.

SIGTERM and SIGINT drain all of them; SIGHUP restarts them one after the other.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from rich.console import Console

from holdfast.cli.supervision import SERVE, ChildReport, ServerChild, Supervisor
from holdfast.config import EngineConfig, ServeConfig, flag_of
from holdfast.errors import ConfigError
from holdfast.serving.keys import split_address

PER_WORKER = ("grpc", "http", "peer_grpc", "peer_http", "member", "threads")  # flags that each worker has its own of


def run_workers(flags: Sequence[str], server: ServeConfig, engine: EngineConfig, console: Console) -> int:
    """Blocks until a signal has ended all workers, or they cannot be kept running; the exit code.

    `flags`: what was given on the command line, without `PER_WORKER`.
    """
    with contextlib.ExitStack() as stack:
        grpc, http = (stack.enter_context(_reserved(address)) for address in (server.grpc, server.http))
        children = [ServerChild(name, [*SERVE, *flags, *own]) for name, own in _workers(server, engine, grpc, http)]

        def on_ready(report: ChildReport) -> None:
            running = [f"{child.name} (pid {child.process.pid})" for child in children if child.process]
            lines = [report.banner, f"  workers  {', '.join(running)}"]
            lines.append(
                f"[dim]Ctrl-C drains and stops; kill -HUP {os.getpid()} restarts one worker after the other[/]"
            )
            console.print("\n".join(lines), soft_wrap=True)

        supervisor = Supervisor(children, drain_s=server.drain_s, on_ready=on_ready)

        def on_signal(number: int, _: FrameType | None) -> None:
            # A terminal that is closed sends SIGHUP, too: nobody asks for a restart then.
            (supervisor.restart if number == signal.SIGHUP and not sys.stdin.isatty() else supervisor.stop)()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, on_signal)
        status = supervisor.run()
    console.print("[dim]stopped[/]")
    return status


def _workers(server: ServeConfig, engine: EngineConfig, grpc: str, http: str) -> Iterator[tuple[str, list[str]]]:
    """For each worker its name in the cluster and its own flags."""
    base = server.member or f"{socket.gethostname()}:{(http or grpc).rpartition(':')[2]}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = engine.threads or (0 if "OMP_NUM_THREADS" in os.environ else max(1, cores // server.workers))
    for index in range(server.workers):
        name = f"{base}-{index + 1}"
        flags = {"grpc": grpc, "http": http, "member": name, "threads": threads}
        flags["peer_grpc"] = _numbered(server.peer_grpc or _any_port(grpc), index)
        flags["peer_http"] = _numbered(server.peer_http or _any_port(http), index)
        yield name, [f"{flag_of(key)}={value}" for key, value in flags.items()]


def _any_port(address: str) -> str:
    return f"{address.rpartition(':')[0]}:0" if address else ""


def _numbered(address: str, index: int) -> str:
    """The address of a worker for other members: a port of its own, free or counted from the given one."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}" if address else ""


@contextlib.contextmanager
def _reserved(address: str) -> Iterator[str]:
    """The address with a port that stays ours while workers come and go. Nothing connects to a socket that does not
    listen."""
    if not address:
        yield address
        return
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((host, port))
        except OSError as exc:
            raise ConfigError(f"cannot listen on {address}: {exc.strerror}; choose another address") from exc
        yield f"{address.rpartition(':')[0]}:{held.getsockname()[1]}"
