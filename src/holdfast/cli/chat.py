"""`holdfast chat`: chat with a model in the terminal, in one session that sends only new tokens on each turn."""

import argparse
import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from holdfast.backends.embedded import EmbeddedBackend, describe
from holdfast.chat.chat_model import ChatModel, load_chat
from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Detokenizer
from holdfast.cli.checks import require_fit
from holdfast.cli.client import add_server_flags, async_client, server_errors
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig, add_flags, from_arguments
from holdfast.engine.factory import build_worker
from holdfast.errors import ConfigError, HoldfastError
from holdfast.generation import Done, Sampled, SamplingParams, Truncated
from holdfast.models import ModelSource, open_model
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import SessionView

if TYPE_CHECKING:
    import holdfast_sdk
    from holdfast_sdk import AsyncClient, AsyncSession, SessionInfo

    Event = int | range | Done | holdfast_sdk.Done  # a sampled token, positions that left the window, the end

Errors = Callable[[], contextlib.AbstractContextManager[None]]

_HELP = "/reset starts a new session, /info describes this one, /quit exits; Ctrl-C stops a reply"


def register(commands: Any) -> None:
    parser = commands.add_parser("chat", help="chat with a model in the terminal", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="one question, answered on stdout (default: an interactive chat)")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a bundled name, a GGUF file or a directory (default: %(default)s)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt; it always stays in the window")
    add_server_flags(parser, default=None)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    sampling.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy; default: %(default)s"
    )
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="default: %(default)s")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes sampling reproducible; default: random")
    add_flags(parser, EngineConfig, without=("sessions", "max_batch"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    config = replace(from_arguments(EngineConfig, arguments), sessions=1)
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
        conversation = Conversation(session, chat, params, system)
        if arguments.prompt is not None:
            runner.run(_answer(conversation, arguments.prompt, console))
            runner.run(conversation.reset())
            return 0
        console.print(f"[bold]{source.name}[/]. {_HELP}.")
        return _converse(conversation, runner, console)


def _converse(conversation: "Conversation", runner: asyncio.Runner, console: Console) -> int:
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
            console.print("[dim]new session[/]")
        elif line == "/info":
            console.print(runner.run(conversation.describe()))
        elif line.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif line:
            try:
                runner.run(_answer(conversation, line, console))
            except KeyboardInterrupt:
                console.print("\n[dim]stopped; the tokens sampled so far stay in the session[/]")
            except HoldfastError as exc:
                console.print(f"[red]{exc}[/] [dim](/reset starts a new session)[/]")


async def _answer(conversation: "Conversation", text: str, console: Console) -> None:
    """Stream one reply to stdout, and its figures to stderr."""
    async with contextlib.aclosing(conversation.ask(text)) as parts:
        async for part in parts:
            if isinstance(part, range):
                console.print(f"[yellow]tokens {part.start} to {part.stop - 1} have left the window[/]")
            else:
                sys.stdout.write(part)
                sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.print(f"[dim]{conversation.summary}[/]")


class LocalSession:
    """One session at a time of a runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._id = ""
        self.sink, self.max_pin = runtime.model.sink, runtime.model.max_pin

    async def open(self, pin_tokens: int) -> None:
        self._id = (await self._runtime.create(LOCAL_OWNER, pin_tokens=pin_tokens)).session_id

    async def turn(self, tokens: Sequence[int], params: SamplingParams) -> "AsyncGenerator[Event, None]":
        async with contextlib.aclosing(self._runtime.generate(self._id, LOCAL_OWNER, params, tokens=tokens)) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Sampled):
                        yield event.token
                    else:
                        yield range(event.first, event.end) if isinstance(event, Truncated) else event

    async def last_token(self) -> int:
        """The end of the history, which may come from an interrupted reply."""
        length = (await self.info()).history_length
        return self._runtime.history(self._id, LOCAL_OWNER, length - 1)[0].tokens[0]

    async def info(self) -> SessionView:
        return self._runtime.info(self._id, LOCAL_OWNER)

    async def close(self) -> None:
        await self._runtime.close(self._id, LOCAL_OWNER)


class ServerSession:
    """The same on a server; `errors` translates those of the SDK."""

    _session: "AsyncSession"
    sink: int
    max_pin: int

    def __init__(self, client: "AsyncClient", address: str, errors: Errors) -> None:
        self._client = client
        self._address = address
        self._errors = errors

    async def connect(self, source: ModelSource) -> None:
        """Check that text means the same tokens on both sides."""
        with self._errors():
            model = await self._client.model_info()
        if model.tokenizer_hash != source.tokenizer_hash:
            raise ConfigError(
                f"{self._address} serves {model.name}, whose tokenizer differs from that of {source.name}; "
                "pass the server's model as --model"
            )
        self.sink, self.max_pin = model.sink, model.max_pin_tokens

    async def open(self, pin_tokens: int) -> None:
        with self._errors():
            self._session = await self._client.create_session(label="holdfast chat", pin_tokens=pin_tokens)

    async def turn(self, tokens: Sequence[int], params: SamplingParams) -> "AsyncGenerator[Event, None]":
        with self._errors():
            generation = await self._session.turn(
                tokens,
                max_tokens=params.max_tokens,
                seed=params.seed,
                temperature=params.temperature,
                top_p=params.top_p,
                stop_token_ids=sorted(params.eos_token_ids),
            )
            num_truncated = 0
            async with generation:
                async for token in generation:
                    for positions in generation.truncated[num_truncated:]:
                        yield positions
                    num_truncated = len(generation.truncated)
                    yield token.id
        for positions in generation.truncated[num_truncated:]:
            yield positions
        yield generation.done

    async def last_token(self) -> int:
        """The end of the history, which may come from an interrupted reply."""
        length = (await self.info()).history_length
        with self._errors():
            chunks = [chunk async for chunk in self._session.history(length - 1)]
        return chunks[-1].token_ids[-1]

    async def info(self) -> "SessionInfo":
        with self._errors():
            return await self._session.info()

    async def close(self) -> None:
        with self._errors():
            await self._session.close()


class Conversation:
    """One chat in one session: keeps no history of its own, sends only what is new.

    `summary` says what the last reply took.
    """

    def __init__(
        self,
        session: LocalSession | ServerSession,
        chat: ChatModel,
        params: SamplingParams,
        system: list[Message],
    ) -> None:
        self._session = session
        self._tokenizer = chat.tokenizer
        self._continuation = chat.continuation
        self._params = replace(params, eos_token_ids=chat.continuation.stop_token_ids)
        self._system = system
        self._is_open = False
        self.summary = ""

    async def ask(self, text: str) -> AsyncGenerator[str | range, None]:
        """The reply as it arrives: parts of the text, and ranges of positions that left the window."""
        message = {"role": "user", "content": text}
        messages = [*self._system, message]
        if not self._is_open:
            num_pinned = self._continuation.pinned(messages, self._session.max_pin)
            await self._session.open(max(self._session.sink, num_pinned))
            self._is_open = True
        if (await self._session.info()).history_length:
            prompt = self._continuation.tail(await self._session.last_token(), [message])
        else:
            prompt = self._continuation.first(messages)
        detokenizer = Detokenizer(self._tokenizer)
        times: list[float] = []
        async with contextlib.aclosing(self._session.turn(prompt.ids, self._params)) as events:
            async for event in events:
                if isinstance(event, int):
                    times.append(time.perf_counter())
                    if part := detokenizer.push(event):
                        yield part
                elif isinstance(event, range):
                    yield event
                else:
                    if rest := detokenizer.finish():
                        yield rest
                    decode_s = times[-1] - times[0] if times else 0.0
                    speed = f"{(len(times) - 1) / decode_s:.1f} tokens/s, " if decode_s else ""
                    window = _window(await self._session.info())
                    self.summary = (
                        f"{event.prefill_tokens} prefilled, {len(times)} sampled, {speed}{window}, "
                        f"stop reason {str(event.stop_reason).lower()}"
                    )

    async def reset(self) -> None:
        """Close the session; the next question opens a new one."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(HoldfastError):  # it may have been evicted or closed already
                await self._session.close()

    async def describe(self) -> str:
        if not self._is_open:
            return "no session yet; ask something first"
        info = await self._session.info()
        live, reserved = (info.kv_live_bytes or 0) / 1e6, (info.kv_reserved_bytes or 0) / 1e6
        return (
            f"{info.history_length} tokens of history, {info.dropped_token_count} out of view, "
            f"{_window(info)}, cache {live:.1f} MB live of {reserved:.1f} MB reserved"
        )


def _window(info: "SessionView | SessionInfo") -> str:
    return f"window {info.history_length - info.dropped_token_count}/{info.sink + info.recent}"
