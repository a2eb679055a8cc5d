"""`holdfast serve`: sessions over gRPC, with health and metrics over HTTP."""

import argparse
import asyncio
import logging
import shutil
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.cli.flags import add_flags, settings
from holdfast.config import DEFAULT_MODEL, EngineConfig, ServeConfig
from holdfast.engine.embedded import build_worker
from holdfast.errors import ConfigError
from holdfast.models import open_model
from holdfast.observability.metrics import Metrics
from holdfast.serving.keys import check_bind, check_free, read_keys
from holdfast.serving.run import Doors, serve

_NOT_YET = ("block_size", "num_diffusion_steps")


def register(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve sessions", description=__doc__)
    parser.add_argument(
        "model", nargs="?", help=f"a bundled name, a GGUF file or a directory (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--verifier-id", metavar="MODEL", help="another way to name the model")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    for name in _NOT_YET:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=argparse.SUPPRESS)
    add_flags(parser, ServeConfig, "doors")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, highlight=False)
    doors, engine = settings(ServeConfig, arguments), settings(EngineConfig, arguments)
    if arguments.model and arguments.verifier_id:
        raise ConfigError("give the model once: as MODEL or as --verifier-id")
    name = arguments.model or arguments.verifier_id or DEFAULT_MODEL
    for unused in _NOT_YET:
        if getattr(arguments, unused) is not None:
            flag = "--" + unused.replace("_", "-")
            console.print(f"[yellow]{flag} has no effect yet: there is no block-diffusion proposer[/]")
    for address in filter(None, (doors.grpc, doors.http)):  # before the model is loaded
        check_bind(address, read_keys(doors.keys_file), insecure=doors.insecure)
        check_free(address)
    with console.status(f"loading {name}"):
        source = open_model(name)
        metrics = Metrics()
        worker = build_worker(source, engine, on_step=metrics.observe_step)
        model = describe(source, engine, worker)
        if doors.served_model_name:
            model = replace(model, name=doors.served_model_name)
    try:
        asyncio.run(
            serve(EmbeddedBackend(worker, model), doors, metrics, lambda at: _banner(console, model.name, engine, at))
        )
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    console.print("[dim]stopped[/]")
    return 0


def _banner(console: Console, model: str, engine: EngineConfig, doors: Doors) -> None:
    lines = [
        f"[bold]{model}[/] is served: {engine.sessions} sessions of {engine.sink} + {engine.recent} tokens",
        f"  gRPC     {doors.grpc}",
        f"  metrics  http://{doors.http}/metrics" if doors.http else "  metrics  none",
        f"  try it   {_own_command()} chat --server {doors.grpc}",
        "[dim]Ctrl-C drains and stops[/]",
    ]
    console.print("\n".join(lines), soft_wrap=True)  # a command that is broken over two lines cannot be copied


def _own_command() -> str:
    """This program as it can be typed here."""
    if shutil.which("holdfast"):
        return "holdfast"
    return f"{sys.executable} -m holdfast.cli" if sys.argv[0].endswith(".py") else sys.argv[0]
