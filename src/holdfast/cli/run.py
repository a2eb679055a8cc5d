"""`holdfast run -- COMMAND`: run an agent on a session of its own, and show what was recorded.

The agent is told by environment variables, and by files in a temporary directory, where the session is. Nothing of the
user's own settings is changed.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from holdfast.bench.processes import ServerProcess
from holdfast.cli.client import HttpServer, ServerError, add_tls_flags
from holdfast.cli.usage import MODEL_HELP, own_command
from holdfast.config import (
    DEFAULT_MODEL,
    GROUPS,
    EngineConfig,
    ServeConfig,
    add_flags,
    from_arguments,
    given_flags,
)
from holdfast.errors import ConfigError
from holdfast.models import open_model

_BASIC = ("data_dir", "backend", "device", "dtype", "sessions", "recent", "upstream")  # what the help shows
_OURS = ("grpc", "http", "keys_file", "tls_cert", "tls_key", "insecure", "cors_origin", "allowed_hosts")
_FORMATS = {".json": "json", ".parquet": "parquet", ".safetensors": "safetensors"}
_KEYS = "run-keys"
_MAX_LINES = 200  # of a tree
_MAX_INDENT = 10
_MAX_TEXT = 60
_OUTPUT_TOKENS = 8192
_MAX_WINDOW = 32_768  # of a server that is started, and how many slabs it has
_SESSIONS = 4
_FIRST_PROMPTS = {"claude": 11_000, "codex": 8_300, "opencode": 7_200, "qwen": 16_900}  # tokens
_NOT_FOUND, _NOT_EXECUTABLE, _SIGNALLED = 127, 126, 128  # exit codes, as shells have them
_EXAMPLES = """examples:
  holdfast run -- claude -p "Fix the failing test"
  holdfast run --samples run.safetensors --label fix -- codex exec "Fix the failing test"
  holdfast run --backend sglang --upstream http://127.0.0.1:30000 --model Qwen/Qwen3-8B -- opencode run "Hello"
  holdfast run --server 127.0.0.1:8000 -- python my_agent.py

The command finds OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL and their like in its environment;
Claude Code, Codex, opencode, qwen-code, aider and mini-swe-agent need nothing else. First prompts of such agents have
7,000 to 21,000 tokens, more than the bundled model can read: pass --model with one whose context is 32,768 tokens or
more, or put an upstream behind it. The exit code is the command's own."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        description="Run a command, an agent, on a session of its own that records every turn: on the server that\n"
        "--server names, or on one that is started for it and stopped afterwards. Then show the session's tree.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="holdfast run [OPTIONS] -- COMMAND [ARGUMENTS]",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")
    server = "HTTP address of a running `holdfast serve`, or several of one cluster, separated by commas, with the key "
    server += "HOLDFAST_API_KEY; "
    parser.add_argument("--server", metavar="URL", help=server + "default: HOLDFAST_SERVER, else a server is started")
    parser.add_argument("--label", default="", help="label of the session")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="write the samples of all branches: .safetensors, .json, .parquet"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the data of a server that is started, in a new directory"
    )
    add_tls_flags(parser)
    model = f"what a started server serves: {MODEL_HELP} (default: {DEFAULT_MODEL})"
    parser.add_argument("--model", "-m", metavar="MODEL", help=model)
    for cls in GROUPS:
        add_flags(parser, cls, without=_OURS, shown=_BASIC)
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an agent finds its session. `url` has no /v1; `directory` is for files that it reads."""

    url: str
    key: str
    model: str
    context: int
    directory: Path


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    if not command:
        raise ConfigError("pass the command to run: holdfast run -- COMMAND")
    if shutil.which(command[0]) is None:
        is_file = os.path.dirname(command[0]) and os.path.isfile(command[0])
        console.print(f"holdfast: {command[0]}: {'not executable' if is_file else 'command not found'}")
        return _NOT_EXECUTABLE if is_file else _NOT_FOUND
    _check_samples(arguments.samples)
    flags = _serve_flags(arguments)
    address = arguments.server or ("" if flags else os.environ.get("HOLDFAST_SERVER", ""))
    if address and (flags or arguments.keep):
        wrong = flags[0].partition("=")[0] if flags else "--keep"
        raise ConfigError(f"{wrong} is for a server that is started; leave it out, or leave out --server")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-run-")))
        if arguments.keep and not from_arguments(ServeConfig, arguments).data_dir:
            arguments.data_dir = tempfile.mkdtemp(prefix="holdfast-data-")
        server = HttpServer(address, arguments) if address else _started(arguments, directory, console, stack)
        session_id, model, context = asyncio.run(_opened(server, arguments.label))
        if (needed := _FIRST_PROMPTS.get(Path(command[0]).name, 0)) > context:
            console.print(
                f"holdfast: the first prompt of {command[0]} has about {needed:,} tokens, and the window here has "
                f"{context:,}: the request will be refused; use a model with a larger context, or --upstream"
            )
        url = f"{server.url}/sessions/{session_id}"
        place = Place(url=url, key=server.key or "holdfast", model=model, context=context, directory=directory)
        status = _run(command, agent_environment(os.environ, place, command[0], arguments.tls_ca))
        try:
            has_turns = asyncio.run(_report(server, session_id, arguments.samples, console))
        except ServerError as exc:
            console.print(f"holdfast: {exc}")
            return status or 1
        if has_turns and not arguments.samples:
            console.print("\n".join(_hints(server if address else None, session_id, arguments)))
    return status


# The server


def _started(
    arguments: argparse.Namespace, directory: Path, console: Console, stack: contextlib.ExitStack
) -> HttpServer:
    """A new server, with a key of its own, that `stack` stops."""
    data_dir = from_arguments(ServeConfig, arguments).data_dir
    key, keys = secrets.token_hex(24), Path(data_dir or directory) / _KEYS  # to serve what is kept again
    keys.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys.touch(mode=0o600)
    keys.write_text(f"run:{key}\n")
    flags = [*_serve_flags(arguments), *_whole_context(arguments)]
    started = ServerProcess(*flags, f"--keys-file={keys}", "--tls-cert=", "--tls-key=")
    stack.callback(started.stop)
    with console.status(f"starting a server with {arguments.model or DEFAULT_MODEL}"):
        http = started.wait_until_served()[0].http
    return HttpServer(http, arguments, key=key)


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of `holdfast serve` that were given."""
    model = [f"--model={arguments.model}"] if arguments.model else []
    return model + given_flags(arguments, without=_OURS)


def _whole_context(arguments: argparse.Namespace) -> list[str]:
    """A window as large as the model allows, unless one was given: first prompts of agents are long, and the
    conversations of one run are few."""
    engine, usual = from_arguments(EngineConfig, arguments), EngineConfig()
    if from_arguments(ServeConfig, arguments).backend != "embedded" or engine.recent != usual.recent:
        return []
    context = open_model(arguments.model or DEFAULT_MODEL).architecture.context
    recent = min(context, _MAX_WINDOW) - engine.max_pin
    sessions = [f"--sessions={_SESSIONS}"] if engine.sessions == usual.sessions else []
    return [f"--recent={recent}", *sessions] if recent > engine.recent else []


async def _opened(server: HttpServer, label: str) -> tuple[str, str, int]:
    """A new forest session: its id, and the name and the context of the model."""
    async with server:
        (model,) = (await server.request("GET", "/v1/models"))["data"]
        try:
            session = await server.request("POST", "/sessions", {"history": "forest", "label": label})
        except ServerError as exc:
            if "history" in str(exc):
                raise ServerError(f"{server.address}: this server has no forest sessions; update it") from exc
            raise
    return session["session_id"], model["id"], model["max_model_len"]


# The command


def agent_environment(environment: Mapping[str, str], place: Place, program: str, tls_ca: str = "") -> dict[str, str]:
    """The environment in which agents find their session. Writes the files that some of them need."""
    v1, key, model = f"{place.url}/v1", place.key, place.model
    claude = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    claude += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")]
    local = ",".join(filter(None, (environment.get("NO_PROXY", environment.get("no_proxy")), "127.0.0.1,localhost")))
    found = dict(environment) | {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), v1),
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": place.url,
        **dict.fromkeys(claude, model),
        **dict.fromkeys(("AIDER_MODEL", "AIDER_WEAK_MODEL", "MSWEA_MODEL_NAME"), f"openai/{model}"),
        **dict.fromkeys(("AIDER_CHECK_UPDATE", "AIDER_SHOW_MODEL_WARNINGS", "LANGSMITH_TRACING"), "false"),
        **dict.fromkeys(("AIDER_ANALYTICS_DISABLE", "MSWEA_CONFIGURED", "LITELLM_LOCAL_MODEL_COST_MAP"), "true"),
        **dict.fromkeys(("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER", "DO_NOT_TRACK"), "1"),
        **dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "OPENAI_AGENTS_DISABLE_TRACING"), "1"),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would change the system prompt with every request
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_config(place)),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "CODEX_HOME": _written(place.directory / "codex" / "config.toml", _codex_config(place)),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), local),
        **(dict.fromkeys(("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"), tls_ca) if tls_ca else {}),
    }
    qwen = place.directory / "qwen" / "settings.json"
    _written(qwen, json.dumps(_QWEN_SETTINGS))
    found["QWEN_CODE_SYSTEM_SETTINGS_PATH"] = str(qwen)
    # Claude Code asks a person whether it may use an API key, and warns where it finds a token too.
    is_claude = Path(program).name == "claude"
    found["ANTHROPIC_AUTH_TOKEN" if is_claude else "ANTHROPIC_API_KEY"] = key
    found.pop("ANTHROPIC_API_KEY" if is_claude else "ANTHROPIC_AUTH_TOKEN", None)
    return found


_QWEN_SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True},
}


def _codex_config(place: Place) -> str:
    text = json.dumps  # a JSON string is one of TOML, too
    return (
        f'model = {text(place.model)}\nmodel_provider = "holdfast"\nmodel_context_window = {place.context}\n'
        f'[model_providers.holdfast]\nname = "Holdfast"\nbase_url = {text(place.url + "/v1")}\n'
        'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n[analytics]\nenabled = false\n'
    )


def _opencode_config(place: Place) -> dict[str, Any]:
    limit = {"context": place.context, "output": min(_OUTPUT_TOKENS, place.context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: {"limit": limit}},
    }
    chosen = f"holdfast/{place.model}"
    return {"model": chosen, "small_model": chosen, "share": "disabled", "autoupdate": False} | {
        "provider": {"holdfast": provider}
    }


def _written(path: Path, text: str) -> str:
    """Writes the file; gives its directory."""
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return str(path.parent)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of the command. It gets our signals; a terminal sends Ctrl-C to both of us, so we only wait."""
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: FrameType | None) -> None:
        if process is not None and not (number == signal.SIGINT and _is_foreground()):
            process.send_signal(number)

    with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), forward):
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as exc:
            raise ConfigError(f"cannot run {command[0]}: {exc.strerror}") from exc
        status = process.wait()
    return status if status >= 0 else _SIGNALLED - status


@contextlib.contextmanager
def _handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def _is_foreground() -> bool:
    """Whether a terminal sends its signals to this process and to its children."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


# The report


async def _report(server: HttpServer, session_id: str, samples: Path | None, console: Console) -> bool:
    """Shows the session's tree and writes its samples. Whether there are any turns."""
    path = f"/sessions/{session_id}"
    async with server:
        info = await server.request("GET", f"{path}?records=false")
        console.print("\n".join(tree_lines(info)))
        if samples and info["metadata"]["tree"]:
            options = {"branch": "all", "format": _FORMATS[samples.suffix]}
            await asyncio.to_thread(_write, samples, await server.content("POST", f"{path}/samples", options))
            console.print(f"samples: {samples}")
    return bool(info["metadata"]["tree"])


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise ServerError(f"cannot write {path}: {exc.strerror}") from exc


def _hints(server: HttpServer | None, session_id: str, arguments: argparse.Namespace) -> list[str]:
    """How to get the samples: from `server`, or from one that is started again with the data that were kept."""
    data_dir = from_arguments(ServeConfig, arguments).data_dir
    if server is None and not data_dir:
        return ["the session ended with its server; pass --samples FILE to get its samples, or --keep to keep it"]
    keys = shlex.quote(str(Path(data_dir) / _KEYS))
    model = f" {shlex.quote(arguments.model)}" if arguments.model else ""
    serve = f"{own_command()} serve{model} --data-dir {shlex.quote(data_dir)} --keys-file {keys}"
    key = f"$(cut -d: -f2 {keys})" if server is None else "$HOLDFAST_API_KEY" if server.key else ""
    header = f'-H "authorization: Bearer {key}" ' if key else ""
    path = f"{server.url if server else 'http://127.0.0.1:8000'}/sessions/{session_id}/samples"
    samples = f"""curl {header}{path} -d '{{"branch": "all"}}' -o {session_id}.safetensors"""
    return [*([] if server else [f"to serve it again: {serve}"]), f"to get its samples: {samples}"]


def tree_lines(info: Mapping[str, Any]) -> list[str]:
    """A session as lines of text: its conversations with their branches, each line a run of turns without a branch."""
    turns: dict[int, Mapping[str, Any]] = {turn["turn"]: turn for turn in info["metadata"]["tree"]}
    children: dict[int, list[int]] = {}
    for number, turn in turns.items():
        children.setdefault(turn["parent"], []).append(number)
    openings = {one["root"]: one.get("opening", "") for one in info.get("conversations", ())}
    roots = [number for number, turn in turns.items() if turn["parent"] not in turns]
    head = f"session {info['session_id']}: {_number(len(roots), 'conversation')}, {_counted(turns.values())}"
    if not turns:
        head += "; the command sent no request to it: does it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
    lines, waiting = [head], [(number, "", number == roots[-1]) for number in reversed(roots)]
    while waiting:
        number, indent, is_last = waiting.pop()
        if len(lines) > _MAX_LINES:
            return [*lines, f"... and {len(waiting) + 1} more"]
        stretch = [number]
        while len(below := children.get(stretch[-1], [])) == 1:
            stretch += below
        text = _short(openings.get(number, ""))
        about = _counted([turns[one] for one in stretch])
        edited = "edited, " if turns[number].get("edited") else ""
        span = f"turn {number}" if len(stretch) == 1 else f"turns {number} to {stretch[-1]}"
        lines.append(f"{indent}{'└─' if is_last else '├─'} {span}{text}: {edited}{about}")
        deeper = indent + ("   " if is_last else "│  ") if len(indent) < 3 * _MAX_INDENT else indent
        waiting += [(one, deeper, one == below[-1]) for one in reversed(below)]
    return lines


def _counted(turns: Collection[Mapping[str, Any]]) -> str:
    sampled = sum(turn["sampled_tokens"] for turn in turns)
    tokens = sampled + sum(turn["given_tokens"] for turn in turns)
    reasons = Counter(turn["finish_reason"] for turn in turns)
    ends = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{_number(len(turns), 'turn')}, {_number(tokens, 'token')} ({sampled:,} sampled)" + (ends and f": {ends}")


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _short(text: str) -> str:
    words = "".join(char if char.isprintable() else " " for char in text).split()
    joined = " ".join(words)
    return f' "{joined if len(joined) <= _MAX_TEXT else joined[: _MAX_TEXT - 3] + "..."}"' if joined else ""


def _check_samples(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--samples {path}: the name must end in {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--samples {path}: there is no directory {path.parent}")
