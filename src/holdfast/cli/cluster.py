"""`holdfast cluster`: members as Ray actors. Ray places and restarts them; no request passes through it.

Actors are detached and named, in a namespace of their own: they outlive the command that started them.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli import serve
from holdfast.cli.client import HttpServer, ServerError, add_tls_flags
from holdfast.cli.ray_member import RayMember, RayMemberStatus
from holdfast.config import ENVIRONMENT_PREFIX, GROUPS, flag_of, from_arguments, given_flags
from holdfast.errors import ConfigError, HoldfastError
from holdfast.extras import how_to_install
from holdfast.serving.keys import is_loopback

_OURS = ("http", "grpc", "peer_http", "peer_grpc", "member", "advertise", "workers", "host", "port")
_POLL_S = 0.5
_ANSWER_S = 10.0
_DRAIN_S = 3600.0  # the actor ends its server much earlier, after its --drain-s
_MAX_FAILURES = 2
_WIDTH = 200  # of what is piped: addresses are there to be copied
_UP = """Start members as Ray actors until there are N of them, and wait until they serve. Those that run stay as they
are. Each listens on the address of its machine, so pass --keys-file, or --insecure on a network that you trust. Paths
are read on the machines of the members, where Holdfast must be installed; HOLDFAST_... settings of this shell go along.
With --ray-address local, Ray and the members run on this machine until Ctrl-C."""


class ClusterFailed(HoldfastError):
    """Ray, or a member on it, did not do what it should."""

    code = "cluster_failed"


def register(commands: Any) -> None:
    parser = commands.add_parser("cluster", description=__doc__)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, help: str, run: Any, description: str | None = None) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=help, description=description or help)
        about = "address of the Ray cluster: auto, local, HOST:PORT or ray://HOST:PORT (default: %(default)s)"
        added.add_argument("--ray-address", default="auto", metavar="ADDRESS", help=about)
        about = "Ray's namespace, and what names of members begin with (default: %(default)s)"
        added.add_argument("--namespace", default="holdfast", metavar="NAME", help=about)
        added.set_defaults(run=run)
        return added

    up = action("up", "start members and wait until they serve", _up, _UP)
    up.usage = "holdfast cluster up --members N [OPTIONS] -- [MODEL] --journal URL [FLAGS OF holdfast serve]"
    up.add_argument("serve_flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="flags of `holdfast serve`")
    up.add_argument("--members", type=int, required=True, metavar="N", help="how many members there shall be")
    about = "CPUs that Ray reserves for each, which is also the number of compute threads (default: %(default)g)"
    up.add_argument("--cpus-per-member", type=float, default=1.0, metavar="N", help=about)
    about = "GPUs that Ray reserves for each (default: %(default)g)"
    up.add_argument("--gpus-per-member", type=float, default=0.0, metavar="N", help=about)
    for name in ("http", "grpc"):
        about = f"{name} port of each member; 0: a free one, which several members on one machine need (default: 0)"
        up.add_argument(f"--{name}-port", type=int, default=0, metavar="PORT", help=about)
    up.add_argument(
        "--wait-s", type=float, default=600.0, metavar="SECONDS", help="longest wait (default: %(default)g)"
    )
    status = action("status", "show the members: what Ray knows of them, and what they know of each other", _status)
    status.add_argument("--json", action="store_true", help="as JSON")
    add_tls_flags(status)
    about = "let members hand over their sessions, stop and leave; `up` brings them back"
    action("drain", about, _drain).add_argument("members", nargs="+", metavar="MEMBER")
    action("down", "drain all members and remove them from Ray", _down)


# Commands


def _up(arguments: argparse.Namespace) -> int:
    words = arguments.serve_flags
    given = serve.parsed(words[1:] if words[:1] == ["--"] else words, prog="holdfast cluster up --")
    for name in _OURS:
        if getattr(given, name) is not None:
            raise ConfigError(f"{flag_of(name)} is decided by `holdfast cluster up`; leave it out")
    settings, *_ = [from_arguments(cls, given) for cls in GROUPS]
    if not settings.journal:
        raise ConfigError("members share a database: pass --journal postgresql://... after --")
    if arguments.members < 1:
        raise ConfigError("--members must be 1 or more")
    names = [f"{arguments.namespace}-{index}" for index in range(arguments.members)]
    with _connected(arguments) as ray:
        if not (settings.keys_file or settings.insecure or all(map(is_loopback, _nodes(ray)))):
            raise ConfigError(
                "members listen on the addresses of their machines, and without API keys anyone could use them: pass "
                "--keys-file FILE, a path on every machine, or --insecure, after --"
            )
        new = [name for name in names if name not in ray.util.list_named_actors()]
        for name in new:
            _create(ray, name, arguments, given, settings.drain_s)
        try:
            _wait_until_served(ray, names, arguments.wait_s)
        except HoldfastError:
            _remove(ray, new)
            raise
        _show(_statuses(ray, ray.util.list_named_actors()), {}, Console(stderr=True))
        if arguments.ray_address == "local":
            _stay(ray)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    with _connected(arguments) as ray:
        found = _statuses(ray, ray.util.list_named_actors())
        told = asyncio.run(_told(arguments, [status.http for status in found.values() if status and status.http]))
        if arguments.json:
            shown = {name: dataclasses.asdict(status) if status else None for name, status in found.items()}
            print(json.dumps({"ray": shown, "cluster": told}))
        else:
            _show(found, told, Console())
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    with _connected(arguments) as ray:
        known = ray.util.list_named_actors()
        for name in arguments.members:
            if name not in known:
                raise ConfigError(f"Ray has no member {name}; it has: {', '.join(sorted(known)) or 'none'}")
        _remove(ray, arguments.members)
    return 0


def _down(arguments: argparse.Namespace) -> int:
    with _connected(arguments) as ray:
        _remove(ray, ray.util.list_named_actors())
    return 0


# Ray


@contextlib.contextmanager
def _connected(arguments: argparse.Namespace) -> Iterator[Any]:
    """The module `ray`, connected; a connection that is there already is used, and stays."""
    try:
        import ray
    except ImportError as exc:
        raise ConfigError(f"`holdfast cluster` needs Ray; {how_to_install('ray')}") from exc
    if ray.is_initialized():
        yield ray
        return
    address = arguments.ray_address
    try:
        if (found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)) is not None:
            socket.create_connection((found[1].strip("[]"), int(found[2])), _ANSWER_S).close()  # Ray waits for minutes
        ray.init(
            address,
            namespace=arguments.namespace,
            include_dashboard=False,  # of a Ray that is started here
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RuntimeError, ValueError, OverflowError, OSError) as exc:
        said = (isinstance(exc, OSError) and exc.strerror) or str(exc).strip() or type(exc).__name__
        reason = said.splitlines()[0].rstrip(".")
        raise ClusterFailed(
            f"no connection to Ray at {address}: {reason}; start one with `ray start --head`, pass --ray-address, or, "
            "where it asks for a token, set RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from exc
    try:
        yield ray
    finally:
        ray.shutdown()


def _nodes(ray: Any) -> list[str]:
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _create(ray: Any, name: str, arguments: argparse.Namespace, given: argparse.Namespace, drain_s: float) -> None:
    variables = [f"{ENVIRONMENT_PREFIX}{field.name.upper()}" for cls in GROUPS for field in dataclasses.fields(cls)]
    settings = {key: os.environ[key] for key in variables if key in os.environ}
    actor = ray.remote(RayMember).options(
        name=name,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=4,  # its status can be asked while it drains
        num_cpus=arguments.cpus_per_member,
        num_gpus=arguments.gpus_per_member,
        scheduling_strategy="SPREAD",
    )
    ports = (arguments.http_port, arguments.grpc_port)
    actor.remote(name, [*serve.model_flags(given), *given_flags(given)], settings, ports, drain_s)


def _statuses(ray: Any, names: Collection[str]) -> dict[str, RayMemberStatus | None]:
    """None where the actor does not answer: Ray has not placed it yet, or starts it again."""
    asked = {name: ray.get_actor(name).status.remote() for name in sorted(names)}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S) if asked else None
    found: dict[str, RayMemberStatus | None] = {}
    for name, answer in asked.items():
        try:
            found[name] = ray.get(answer, timeout=0)
        except ray.exceptions.RayError:
            found[name] = None
    return found


def _wait_until_served(ray: Any, names: Collection[str], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        found = _statuses(ray, names)
        for name, status in found.items():
            if status and not status.http and status.num_failures >= _MAX_FAILURES:
                raise ClusterFailed(f"{name} on {status.node} does not start: {status.error or 'see the logs of Ray'}")
        missing = [name for name, status in found.items() if not (status and status.http)]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ClusterFailed(
                f"{', '.join(missing)}: not serving after {wait_s:g} s; `ray status` shows whether there are enough "
                "CPUs and GPUs"
            )
        time.sleep(_POLL_S)


def _remove(ray: Any, names: Collection[str]) -> None:
    """Drain and end these members; Ray does not start them again."""
    found = _statuses(ray, names)
    draining = [ray.get_actor(name).drain.remote() for name, status in found.items() if status]
    if draining:
        ray.wait(draining, num_returns=len(draining), timeout=_DRAIN_S)
    for name in names:
        ray.kill(ray.get_actor(name), no_restart=True)


def _stay(ray: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(_DRAIN_S)
    _remove(ray, ray.util.list_named_actors())


# What is shown


async def _told(arguments: argparse.Namespace, addresses: Collection[str]) -> dict[str, Any]:
    """What the first member that answers says of the cluster."""
    for address in addresses:
        try:
            async with HttpServer(address, arguments) as server:
                answer: dict[str, Any] = await server.request("GET", "/cluster")
                return answer
        except ServerError as exc:
            print(f"holdfast: {exc}", file=sys.stderr)
    return {}


def _show(found: Mapping[str, RayMemberStatus | None], told: Mapping[str, Any], console: Console) -> None:
    members = {member["name"]: member for member in told.get("members", ())}
    table = Table("member", "state", "node", "pid", "restarts", "HTTP", "sessions", "lease", box=None)
    for name in sorted({*found, *members}):
        status, member = found.get(name), members.get(name, {})
        state = member.get("state") or ("serving" if status and status.http else "starting")
        by_ray = [status.node, status.pid, status.num_restarts] if status else ["-", "-", "-"]
        lease = f"{left:.1f} s" if (left := member.get("lease_left_s")) is not None else "-"
        http = status.http if status and status.http else member.get("http")
        table.add_row(name, state, *map(str, by_ray), http or "-", str(member.get("sessions", "-")), lease)
        if status and status.error and not status.http:
            table.add_row("", status.error)
    (console if console.is_terminal else Console(file=console.file, width=_WIDTH)).print(table)
