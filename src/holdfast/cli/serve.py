"""`holdfast serve`: serve token sessions over gRPC, and chat sessions with the OpenAI API over HTTP."""

import argparse
import asyncio
import contextlib
import logging
import shlex
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.backends.passthrough import parse_routes
from holdfast.chat.chat_model import load_chat
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.cli.checks import require_fit
from holdfast.cli.supervision import ChildReport, ParentLink
from holdfast.cli.usage import MODEL_HELP, HelpAll, own_command, refuse_unknown
from holdfast.cli.workers import PER_WORKER, run_workers
from holdfast.config import (
    DEFAULT_MODEL,
    GROUPS,
    ChatConfig,
    EngineConfig,
    ServeConfig,
    UpstreamConfig,
    add_flags,
    check_upstream,
    flag_of,
    from_arguments,
    given_flags,
)
from holdfast.engine.factory import build_worker
from holdfast.errors import ConfigError, HoldfastError, InvalidArgument, ModelError
from holdfast.metrics import Metrics
from holdfast.models import ModelSource, open_model
from holdfast.serving.http import Upstream
from holdfast.serving.http.web_pages import read_origins
from holdfast.serving.keys import check_bind, check_free, read_keys
from holdfast.serving.lifecycle import Chat, ServerAddresses, serve
from holdfast.serving.logs import RepeatLimit
from holdfast.sessions.ports import ServedBackend

if TYPE_CHECKING:
    from holdfast.backends.probe import TokenSample
    from holdfast.backends.upstream import UpstreamBackend

_BASIC = (  # what the short help shows
    *("http", "grpc", "keys_file", "data_dir", "backend"),
    *("device", "dtype", "sessions", "recent", "upstream"),
)
_NOT_YET = ("block_size", "num_diffusion_steps")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        description="Serve token sessions over gRPC, and chat sessions with the OpenAI API over HTTP.",
        epilog="Every setting is also an environment variable (HOLDFAST_RECENT=4096) and a key of the file given with "
        "--config (recent = 4096).",
    )
    _add_flags(parser, _BASIC)
    parser.add_argument(
        "--help-all",
        action=HelpAll,
        fill=_add_flags,
        help="show every setting and exit; this help shows the most important ones",
    )
    parser.set_defaults(run=run)


def _add_flags(parser: argparse.ArgumentParser, shown: Container[str] | None = None) -> None:
    """All flags; the help has those in `shown`, or all of them."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})",
    )
    hidden = argparse.SUPPRESS if shown else "the same as MODEL"
    parser.add_argument(
        *("--model", "-m", "--model-path", "--verifier-id"), dest="verifier_id", metavar="MODEL", help=hidden
    )
    for name, kind in (("port", int), ("host", str)):
        about = argparse.SUPPRESS if shown else f"the {name} of --http, whose other half stays as it is"
        parser.add_argument(f"--{name}", type=kind, metavar=name.upper(), help=about)
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", default="warning", choices=levels, help="default: %(default)s")
    for name in (*_NOT_YET, "supervised"):  # the last one is for servers that another process has started
        parser.add_argument(flag_of(name), type=int, help=argparse.SUPPRESS)
    for cls in GROUPS:
        add_flags(parser, cls, shown=shown)


def parsed(words: Sequence[str], *, prog: str) -> argparse.Namespace:
    """The flags of `holdfast serve` in the command line of another command; exits where one is not known."""
    parser = argparse.ArgumentParser(prog=prog, usage=f"{prog} [MODEL] [FLAGS OF holdfast serve]", add_help=False)
    _add_flags(parser)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        refuse_unknown(parser, words, unknown)
    return arguments


def model_flags(arguments: argparse.Namespace) -> list[str]:
    """What a parsed command line says besides its settings, as words of another."""
    name = arguments.model or arguments.verifier_id
    return [*([f"--model={name}"] if name else []), f"--log-level={arguments.log_level}"]


def run(arguments: argparse.Namespace) -> int:
    log = logging.StreamHandler()
    log.addFilter(RepeatLimit())
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=arguments.log_level.upper(), format=form, handlers=[log])
    if arguments.supervised is None:
        return _run(arguments)
    parent = ParentLink(arguments.supervised)
    try:
        return _run(arguments, parent)
    except HoldfastError as exc:
        parent.tell(ChildReport(error=str(exc)))
        raise


def _run(arguments: argparse.Namespace, parent: ParentLink | None = None) -> int:
    console = Console(stderr=True, highlight=False)
    server, engine = _with_http_address(arguments), from_arguments(EngineConfig, arguments)
    if arguments.model and arguments.verifier_id:
        raise ConfigError("pass the model once, as MODEL or as --model")
    name = arguments.model or arguments.verifier_id or DEFAULT_MODEL
    for unused in _NOT_YET:
        if getattr(arguments, unused) is not None:
            console.print(f"[yellow]{flag_of(unused)} has no effect yet: there is no block-diffusion proposer[/]")
    keys = read_keys(server.keys_file)
    read_origins(server, keys)
    for address in filter(None, (server.grpc, server.http)):  # before the model is loaded
        check_bind(address, keys, insecure=server.insecure)
        if parent is None or server.workers == 1:  # workers share their addresses
            check_free(address)
    upstream = from_arguments(UpstreamConfig, arguments)
    check_upstream(server, upstream)
    if server.workers > 1 and parent is None:
        return run_workers(
            [*model_flags(arguments), *given_flags(arguments, without=PER_WORKER)], server, engine, console
        )
    source = open_model(name, tokenizer_only=server.backend != "embedded")  # may show a download's progress
    with console.status(f"loading {name}"):
        metrics = Metrics()
        chat = _load_chat(source, from_arguments(ChatConfig, arguments), console) if server.http else None
        tokenizer = _load_tokenizer(source) if chat is None else None
        backend: ServedBackend
        if server.backend == "embedded":
            if warning := require_fit(source, engine, server.snapshot_memory_mb * 2**20):
                console.print(warning, style="yellow", markup=False, soft_wrap=True)
            backend = _embedded(source, server, engine, metrics)
            about = f"{engine.sessions} sessions of {engine.sink} + {engine.recent} tokens"
        else:
            remote = _remote(source, server, upstream, metrics)
            backend, about = remote, f"by {server.backend} at {', '.join(upstream.upstreams)}"
            if chat:
                remote.sample = _sample(source, chat)
                routes, relays_chats = parse_routes(upstream.passthrough), upstream.upstream_api == "chat"
                chat = replace(chat, upstream=Upstream(remote, routes, relays_chats, upstream.context_budget))
    title = f"[bold]{backend.model.name}[/] is served: {about}"

    def on_ready(addresses: ServerAddresses) -> None:
        doors = _banner(addresses, server, name, has_chat=chat is not None)
        if backend.not_ready:
            doors.append(f"  [yellow]{escape(backend.not_ready)}; it is tried again until it is[/]")
        banner = "\n".join((title, *doors))
        if parent:
            parent.tell(ChildReport(grpc=addresses.grpc, http=addresses.http or "", banner=banner))
        else:  # a wrapped command cannot be copied
            console.print(banner, "[dim]Ctrl-C drains and stops[/]", sep="\n", soft_wrap=True)

    try:
        asyncio.run(serve(backend, server, metrics, chat, on_ready, tokenizer=tokenizer))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    if parent is None:
        console.print("[dim]stopped[/]")
    return 0


def _with_http_address(arguments: argparse.Namespace) -> ServeConfig:
    """The settings of the server; --host and --port replace their half of --http."""
    server = from_arguments(ServeConfig, arguments)
    if arguments.host is None and arguments.port is None:
        return server
    if arguments.http is not None:
        raise ConfigError("pass the address once, as --http HOST:PORT or as --host and --port")
    host, _, port = (server.http or ServeConfig().http).rpartition(":")
    host = host if arguments.host is None else f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    return replace(server, http=f"{host}:{port if arguments.port is None else arguments.port}")


def _load_chat(source: ModelSource, config: ChatConfig, console: Console) -> Chat | None:
    """None, after a warning, if the model cannot chat; token sessions are served all the same."""
    try:
        return Chat(load_chat(source, config, source.vocab_size), config)
    except ConfigError:
        raise
    except ModelError as exc:
        console.print(f"[yellow]no OpenAI API: {exc}[/]")
        return None


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    with contextlib.suppress(ModelError):
        return load_tokenizer(source)
    return None


def _embedded(source: ModelSource, server: ServeConfig, engine: EngineConfig, metrics: Metrics) -> EmbeddedBackend:
    worker = build_worker(source, engine, on_step=metrics.observe_step)
    model = describe(source, engine, worker)
    return EmbeddedBackend(worker, replace(model, name=server.served_model_name or model.name))


def _remote(source: ModelSource, server: ServeConfig, config: UpstreamConfig, metrics: Metrics) -> "UpstreamBackend":
    from holdfast.backends.sglang import SGLangBackend  # here: a server with an engine of its own needs none of this
    from holdfast.backends.upstream import DEFAULT_CONTEXT, upstream_model_info
    from holdfast.backends.vllm import VLLMBackend

    model = upstream_model_info(
        name=server.served_model_name or source.name,
        vocab_size=source.vocab_size,
        context=source.context or DEFAULT_CONTEXT,
        eos_token_ids=source.eos_token_ids,
        tokenizer_hash=source.tokenizer_hash,
        chat_template_hash=source.chat_template_hash,
    )
    kind = SGLangBackend if server.backend == "sglang" else VLLMBackend
    routing = source.routing
    shape = (routing.num_layers, routing.top_k, routing.depth) if routing else None
    return kind(config, model, metrics=metrics, routing=shape)


def _sample(source: ModelSource, chat: Chat) -> "TokenSample | None":
    """Text that the upstream must read as we do; None where the vocabulary cannot express it."""
    from holdfast.backends.probe import SAMPLE_TEXT, TokenSample

    with contextlib.suppress(InvalidArgument):
        return TokenSample(source.name, SAMPLE_TEXT, tuple(chat.model.tokenizer.encode(SAMPLE_TEXT)))
    return None


def _banner(addresses: ServerAddresses, server: ServeConfig, model: str, *, has_chat: bool) -> list[str]:
    kept = (
        f"kept in {server.data_dir}" if server.data_dir else "end with this process; pass --data-dir DIR to keep them"
    )
    if server.journal:  # without its password
        url = urlsplit(server.journal)
        kept = f"kept in the database {url.path.lstrip('/')} at {url.hostname or 'this machine'}"
    http = f"{'https' if server.tls_cert else 'http'}://{addresses.http}"
    try_it = f"{own_command()} chat --server {_url_here(addresses, server)}"
    if not server.http and model != DEFAULT_MODEL:
        try_it += f" --model {shlex.quote(model)}"
    if server.tls_cert:
        try_it += f" --tls-ca {shlex.quote(server.tls_cert)}"
    lines = [
        f"  sessions {kept}",
        f"  gRPC     {addresses.grpc}",
        *([f"  OpenAI   {http}/v1, sessions at {http}/sessions"] if addresses.http and has_chat else []),
        *([f"  console  {_url_here(addresses, server)}/console"] if addresses.http and has_chat else []),
        f"  metrics  {http}/metrics" if addresses.http else "  metrics  none",
        *([f"  API keys {server.keys_file}; clients of `holdfast` send HOLDFAST_API_KEY"] if server.keys_file else []),
        *([f"  try it   {try_it}"] if has_chat or not server.http else []),
    ]
    return [escape(line) for line in lines]


def _url_here(addresses: ServerAddresses, server: ServeConfig) -> str:
    """The URL at which `holdfast chat` on this machine reaches the server: HTTP, or gRPC if there is no HTTP."""
    scheme, address = ("http", addresses.http) if addresses.http else ("grpc", addresses.grpc)
    host, _, port = address.rpartition(":")
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # all interfaces: loopback is one of them
    return f"{scheme}{'s' if server.tls_cert else ''}://{here}:{port}"
