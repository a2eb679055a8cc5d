"""`holdfast chat`: talk to a model in the terminal, on one bounded session."""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.chat.chat_model import load_chat
from holdfast.chat.messages import Message
from holdfast.cli.conversation import Conversation
from holdfast.cli.flags import add_flags, settings
from holdfast.cli.lines import EmbeddedLine, Line, RemoteLine
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig
from holdfast.engine.factory import build_worker
from holdfast.errors import HoldfastError
from holdfast.generation import SamplingParams, Truncated
from holdfast.models import ModelSource, open_model
from holdfast.sessions.runtime import Runtime

_HELP = "/reset starts over, /info tells how the session stands, /quit leaves; Ctrl-C stops an answer"


def register(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="one question, answered on stdout; without it, a conversation")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a bundled name, a GGUF file or a directory")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running `holdfast serve`; its key: HOLDFAST_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, kept in view for ever")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    sampling.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy; default: %(default)s"
    )
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default: %(default)s")
    sampling.add_argument("--seed", type=int, metavar="N", help="fixes every draw; random by default")
    add_flags(parser, EngineConfig, "engine", without=("sessions", "max_batch"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    config = replace(settings(EngineConfig, arguments), sessions=1)
    params = SamplingParams(
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
    )
    system: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        with console.status(f"loading {arguments.model}"):
            source = open_model(arguments.model)
            chat = load_chat(source, ChatConfig(), source.architecture.vocab_size)
            if arguments.server:
                line: Line = runner.run(_connect(arguments.server, source))
            else:
                line = _embedded(source, config, stack)
        conversation = Conversation(line, chat, params, system)
        if arguments.prompt is not None:
            runner.run(_answer(conversation, arguments.prompt, console))
            runner.run(conversation.reset())
            return 0
        console.print(f"[bold]{source.name}[/]. {_HELP}.")
        return _converse(conversation, runner, console)


async def _connect(address: str, source: ModelSource) -> RemoteLine:
    line = RemoteLine(address, os.environ.get("HOLDFAST_API_KEY", ""))
    await line.connect(source)
    return line


def _embedded(source: ModelSource, config: EngineConfig, stack: contextlib.ExitStack) -> EmbeddedLine:
    worker = build_worker(source, config)
    backend = EmbeddedBackend(worker, describe(source, config, worker))
    backend.start()
    stack.callback(backend.stop)
    return EmbeddedLine(Runtime(backend))


def _converse(conversation: Conversation, runner: asyncio.Runner, console: Console) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() editing and history
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            line = "/quit"
        if line == "/quit":
            runner.run(conversation.reset())
            return 0
        if line == "/reset":
            runner.run(conversation.reset())
            console.print("[dim]a new session[/]")
        elif line == "/info":
            console.print(runner.run(conversation.describe()))
        elif line.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif line:
            try:
                runner.run(_answer(conversation, line, console))
            except KeyboardInterrupt:
                console.print("\n[dim]stopped; what was said stays in the session[/]")
            except HoldfastError as exc:
                console.print(f"[red]{exc}[/] [dim](/reset starts over)[/]")


async def _answer(conversation: Conversation, text: str, console: Console) -> None:
    """Stream one answer to stdout, and what it cost to stderr."""
    async with contextlib.aclosing(conversation.ask(text)) as pieces:
        async for piece in pieces:
            if isinstance(piece, str):
                sys.stdout.write(piece)
                sys.stdout.flush()
            elif isinstance(piece, Truncated):
                console.print(f"[yellow]tokens {piece.first} to {piece.end - 1} have left the window[/]")
            else:
                sys.stdout.write("\n")
                sys.stdout.flush()
                console.print(f"[dim]{await conversation.summary(piece)}[/]")
