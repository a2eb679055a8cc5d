"""`holdfast chat`: talk to a model in the terminal, on one bounded session."""

import argparse
import asyncio
import contextlib
import secrets
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console

from holdfast.chat.continuation import Continuation
from holdfast.chat.template import Message, load_template
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.cli.conversation import Conversation
from holdfast.cli.flags import add_flags, settings
from holdfast.config import DEFAULT_MODEL, EngineConfig
from holdfast.engine.embedded import build_worker
from holdfast.engine.run import Done
from holdfast.engine.sampling import SamplingParams
from holdfast.models import open_model

_HELP = "/reset starts over, /info tells how the session stands, /quit leaves; Ctrl-C stops an answer"


def register(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="one question, answered on stdout; without it, a conversation")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a bundled name, a GGUF file or a directory")
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
    with console.status(f"loading {arguments.model}"):
        source = open_model(arguments.model)
        tokenizer = load_tokenizer(source)
        continuation = Continuation(load_template(source, tokenizer), tokenizer)
        worker = build_worker(source, config)
    system: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    worker.start()
    try:
        conversation = Conversation(worker, tokenizer, continuation, params, system=system, config=config)
        if arguments.prompt is not None:
            asyncio.run(_answer(conversation, arguments.prompt, console))
            return 0
        console.print(f"[bold]{source.name}[/], {config.dtype}, window of {config.sink} + {config.recent}. {_HELP}.")
        return _converse(conversation, console)
    finally:
        worker.stop()


def _converse(conversation: Conversation, console: Console) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() editing and history
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            asyncio.run(conversation.reset())
            console.print("[dim]a new session[/]")
        elif line == "/info":
            console.print(conversation.describe())
        elif line.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif line:
            try:
                asyncio.run(_answer(conversation, line, console))
            except KeyboardInterrupt:
                console.print("\n[dim]stopped; what was said stays in the session[/]")


async def _answer(conversation: Conversation, text: str, console: Console) -> None:
    """Stream one answer to stdout, and what it cost to stderr."""
    async for piece in conversation.ask(text):
        if isinstance(piece, str):
            sys.stdout.write(piece)
            sys.stdout.flush()
        elif isinstance(piece, Done):
            sys.stdout.write("\n")
            sys.stdout.flush()
            console.print(f"[dim]{conversation.summary(piece)}[/]")
        else:
            console.print(f"[yellow]tokens {piece.first} to {piece.end - 1} have left the window[/]")
