"""`holdfast chat`: chat with a model in the terminal, in one session that computes only new tokens on each turn."""

import argparse
import asyncio
import contextlib
import os
import secrets
import select
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.chat.chat_model import load_chat
from holdfast.chat.messages import Message
from holdfast.cli.checks import require_fit
from holdfast.cli.client import (
    HttpServer,
    add_tls_flags,
    async_client,
    full_session_id,
    is_grpc,
    server_errors,
)
from holdfast.cli.conversation import Conversation, Notice, TextConversation, TokenConversation, Waiting
from holdfast.cli.token_sessions import LocalSession, ServerSession
from holdfast.cli.usage import MODEL_HELP, own_command
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig, add_flags, from_arguments
from holdfast.engine.factory import build_worker
from holdfast.errors import ConfigError, HoldfastError
from holdfast.generation import SamplingParams
from holdfast.models import ChatDefaults, chat_defaults, open_model
from holdfast.sessions.runtime import Runtime

_LEAVE = "Ctrl-D or /exit leaves"
_HELP = f"/reset starts a new session, /info describes this one, {_LEAVE}; Ctrl-C stops a reply"
_PASTE_PAUSE_S = 0.05
_PIPE_PATIENCE_S = 2.0
_DESCRIPTION = """Chat with a model in the terminal, in one session that computes only new tokens on each turn. Without
--server the model runs in this process. Text that is piped in goes below PROMPT: cat notes.txt | holdfast chat
"Summarise this"."""


def register(commands: Any) -> None:
    parser = commands.add_parser("chat", description=_DESCRIPTION)
    parser.add_argument("prompt", nargs="?", help="one question, answered on stdout (default: an interactive chat)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: %(default)s)")
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt, which always stays in the window; default: the model's"
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="chat on a running `holdfast serve`: its HTTP address, HOST:PORT or a URL; HOLDFAST_API_KEY is its key. "
        "Several of one cluster are separated by commas. grpc://HOST:PORT sends tokens instead of text, which needs "
        "--model here and the Python SDK",
    )
    parser.add_argument(
        "--session", metavar="ID", help="continue this session of the server; the start of its id is enough"
    )
    add_tls_flags(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    usual = ChatDefaults()
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 is greedy; default: 0 for bundled models, otherwise {usual.temperature}",
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help=f"default: {usual.top_p}")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes sampling reproducible; default: random")
    add_flags(parser, EngineConfig, without=("sessions", "max_batch"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    prompt = arguments.prompt
    if prompt is not None:
        prompt = "\n\n".join(filter(None, (prompt, _piped_text(console))))
    is_text = bool(arguments.server) and not is_grpc(arguments.server)
    if arguments.session and not is_text:
        raise ConfigError("--session needs --server with the HTTP address of the server that has the session")
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        connect = _on_server if is_text else _with_tokens
        conversation, model_name = connect(arguments, runner, stack, console)
        if prompt is not None:
            runner.run(_answer(conversation, prompt, console))
            if not arguments.session:
                runner.run(conversation.reset())
            return 0
        console.print(f"[bold]{escape(model_name)}[/]. {_HELP}.")
        _converse(conversation, runner, console)
        if conversation.session_id:
            command = escape(_resuming(arguments, conversation.session_id))
            console.print(f"[dim]continue with: {command}[/]", soft_wrap=True)
        else:
            runner.run(conversation.reset())
    return 0


def _resuming(arguments: argparse.Namespace, session_id: str) -> str:
    """The command that continues a session."""
    flags = ["--server", arguments.server, "--session", session_id]
    flags += ["--tls-ca", arguments.tls_ca] if arguments.tls_ca else ["--tls"] if arguments.tls else []
    return f"{own_command()} chat {shlex.join(flags)}"


# Where the conversation takes place


def _on_server(
    arguments: argparse.Namespace, runner: asyncio.Runner, stack: contextlib.ExitStack, console: Console
) -> tuple[Conversation, str]:
    """A conversation in text, and the name of the server's model."""
    server = HttpServer(arguments.server, arguments)
    stack.callback(lambda: runner.run(server.close()))

    async def connect() -> tuple[Conversation, str]:
        await server.__aenter__()
        name = (await server.request("GET", "/v1/models"))["data"][0]["id"]
        params, system = _settings(arguments, name)
        sampling = {key: getattr(params, key) for key in ("max_tokens", "temperature", "top_p", "seed")}
        conversation = TextConversation(server, sampling, system)
        if arguments.session:
            listed = (await server.request("GET", "/sessions"))["data"]
            await conversation.resume(full_session_id(arguments.session, [entry["session_id"] for entry in listed]))
        return conversation, name

    return runner.run(connect())


def _with_tokens(
    arguments: argparse.Namespace, runner: asyncio.Runner, stack: contextlib.ExitStack, console: Console
) -> tuple[Conversation, str]:
    """A conversation whose tokens are made here: for an engine in this process, or for a server's gRPC endpoint."""
    config = replace(from_arguments(EngineConfig, arguments), sessions=1)
    source = open_model(arguments.model, tokenizer_only=bool(arguments.server))  # may show a download's progress
    with console.status(f"loading {arguments.model}"):
        params, system = _settings(arguments, source.name)
        chat = load_chat(source, ChatConfig(), source.vocab_size)
        session: LocalSession | ServerSession
        if arguments.server:
            client = async_client(arguments)
            stack.callback(lambda: runner.run(client.close()))
            session = ServerSession(client, arguments.server, lambda: server_errors(arguments))
            runner.run(session.connect(source))
        else:
            require_fit(source, config)
            worker = build_worker(source, config)
            backend = EmbeddedBackend(worker, describe(source, config, worker))
            backend.start()
            stack.callback(backend.stop)
            session = LocalSession(Runtime(backend))
    return TokenConversation(session, chat, params, system), source.name


def _settings(arguments: argparse.Namespace, model_name: str) -> tuple[SamplingParams, list[Message]]:
    """Sampling parameters and system prompt: those given, otherwise the model's own."""
    usual = chat_defaults(model_name)
    params = SamplingParams(
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        max_tokens=arguments.max_tokens,
        temperature=usual.temperature if arguments.temperature is None else arguments.temperature,
        top_p=usual.top_p if arguments.top_p is None else arguments.top_p,
    )
    system = usual.system if arguments.system is None else arguments.system
    return params, [{"role": "system", "content": system}] if system else []


# The terminal


def _converse(conversation: Conversation, runner: asyncio.Runner, console: Console) -> None:
    """Turns until the user leaves. Ctrl-C ends neither the chat nor the conversation, unless input is not typed."""
    read = _reader()
    while True:
        is_answering = False
        try:
            text = read()
            is_answering = True
            if text in (None, "/exit", "/quit"):
                return
            runner.run(_take_turn(conversation, text, console))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            said = "stopped; what was said so far stays in the conversation" if is_answering else _LEAVE
            console.print(f"\n[dim]{said}[/]")
        except HoldfastError as exc:
            console.print(f"[red]{escape(str(exc))}[/] [dim](/reset starts a new session)[/]")


async def _take_turn(conversation: Conversation, text: str, console: Console) -> None:
    """A command, or a question; a pasted text of several lines is always a question."""
    if text == "/reset":
        await conversation.reset()
        console.print("[dim]new session[/]")
    elif text == "/info":
        console.print(await conversation.describe())
    elif text.startswith("/") and "\n" not in text:
        console.print(f"[dim]{_HELP}[/]")
    elif text:
        await _answer(conversation, text, console)


def _reader() -> Callable[[], str | None]:
    """A function that reads what the user enters, a line or a pasted text; None at the end of the input."""
    pastes_whole = False
    with contextlib.suppress(ImportError):
        import readline  # importing it gives input() editing and history

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
            pastes_whole = True

    def read() -> str | None:
        is_terminal = sys.stdin.isatty()
        try:
            lines = [input("> " if is_terminal else "")]
        except EOFError:
            if is_terminal:
                print(file=sys.stderr)
            return None
        while is_terminal and not pastes_whole and select.select([sys.stdin], [], [], _PASTE_PAUSE_S)[0]:
            if not (line := sys.stdin.readline()):
                break
            lines.append(line.rstrip("\n"))
        return "\n".join(lines).strip()

    return read


def _piped_text(console: Console) -> str:
    """What is piped into the command; "" if its input is a terminal or a device, or closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    if not select.select([0], [], [], _PIPE_PATIENCE_S)[0]:
        console.print("[dim]reading standard input to its end; pass </dev/null if there is nothing to read[/]")
    try:
        with open(0, encoding="utf-8", closefd=False) as stream:
            return stream.read().strip()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"standard input is not UTF-8 text: {exc}") from exc


async def _answer(conversation: Conversation, text: str, console: Console) -> None:
    """Stream one reply to stdout; to stderr what it waits for, notices and figures."""
    with contextlib.ExitStack() as waiting:
        async with contextlib.aclosing(conversation.ask(text)) as parts:
            async for part in parts:
                if isinstance(part, Waiting):
                    waiting.enter_context(_progress(part, console))
                    continue
                waiting.close()
                if isinstance(part, Notice):
                    console.print(f"[yellow]{part}[/]")
                else:
                    sys.stdout.write(part)
                    sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.print(f"[dim]{conversation.summary}[/]")


@contextlib.contextmanager
def _progress(text: str, console: Console) -> Iterator[None]:
    """A spinner with the time that has passed, if stderr is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield
