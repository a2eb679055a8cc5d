"""`holdfast serve`: sessions of raw tokens over gRPC, of OpenAI chats over HTTP."""

import argparse
import asyncio
import logging
import shutil
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.backends.passthrough import parse_routes
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import UpstreamBackend, upstream_model_info
from holdfast.backends.vllm import VLLMBackend
from holdfast.chat.chat_model import load_chat
from holdfast.cli.flags import add_flags, settings
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig, ServeConfig, UpstreamConfig
from holdfast.engine.factory import build_worker
from holdfast.errors import ConfigError, ModelError
from holdfast.models import ModelSource, open_model
from holdfast.observability.metrics import Metrics
from holdfast.serving.http import Upstream
from holdfast.serving.keys import check_bind, check_free, read_keys
from holdfast.serving.lifecycle import Chat, ServerAddresses, serve
from holdfast.sessions.ports import ServedBackend

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
    add_flags(parser, ChatConfig, "chat")
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, UpstreamConfig, "upstream")
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
    upstream = settings(UpstreamConfig, arguments)
    if (doors.backend == "embedded") == bool(upstream.upstream):
        raise ConfigError("--upstream URL goes with --backend sglang or vllm, and these with it")
    with console.status(f"loading {name}"):
        source = open_model(name)
        metrics = Metrics()
        chat = _load_chat(source, settings(ChatConfig, arguments), console) if doors.http else None
        backend: ServedBackend
        if doors.backend == "embedded":
            backend = _embedded(source, doors, engine, metrics)
            about = f"{engine.sessions} sessions of {engine.sink} + {engine.recent} tokens"
        else:
            remote = _remote(source, doors, upstream, metrics)
            backend, about = remote, f"by {doors.backend} at {upstream.upstream}"
            if chat:
                chat = replace(chat, upstream=Upstream(remote, remote.transport, parse_routes(upstream.passthrough)))
    kept = f"kept in {doors.data_dir}" if doors.data_dir else "ending with this process; --data-dir DIR keeps them"
    banner = f"[bold]{backend.model.name}[/] is served: {about}\n  sessions {kept}"
    try:
        asyncio.run(serve(backend, doors, metrics, chat, lambda at: _show(console, banner, at, chat is not None)))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    console.print("[dim]stopped[/]")
    return 0


def _load_chat(source: ModelSource, config: ChatConfig, console: Console) -> Chat | None:
    """None, and a warning, for a model that cannot chat: its sessions of raw tokens are served all the same."""
    try:
        return Chat(load_chat(source, config, source.architecture.vocab_size), config)
    except ConfigError:
        raise
    except ModelError as exc:
        console.print(f"[yellow]no OpenAI door: {exc}[/]")
        return None


def _embedded(source: ModelSource, doors: ServeConfig, engine: EngineConfig, metrics: Metrics) -> EmbeddedBackend:
    worker = build_worker(source, engine, on_step=metrics.observe_step)
    model = describe(source, engine, worker)
    return EmbeddedBackend(worker, replace(model, name=doors.served_model_name or model.name))


def _remote(source: ModelSource, doors: ServeConfig, config: UpstreamConfig, metrics: Metrics) -> UpstreamBackend:
    model = upstream_model_info(
        name=doors.served_model_name or source.name,
        vocab_size=source.architecture.vocab_size,
        eos_token_ids=source.eos_token_ids,
        tokenizer_hash=source.tokenizer_hash,
        chat_template_hash=source.chat_template_hash,
    )
    kind = SGLangBackend if doors.backend == "sglang" else VLLMBackend
    return kind(config, model, observe=metrics.observe_upstream)


def _show(console: Console, banner: str, doors: ServerAddresses, speaks: bool) -> None:
    openai = f"  OpenAI   http://{doors.http}/v1, sessions at http://{doors.http}/sessions" if speaks else ""
    lines = [
        banner,
        f"  gRPC     {doors.grpc}",
        *([openai] if doors.http and speaks else []),
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
