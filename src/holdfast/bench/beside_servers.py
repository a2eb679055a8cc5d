"""Our HTTP endpoint beside other servers, with the same client: conversations of one client and of several at once.

The other servers are llama.cpp's, started here, and any OpenAI-compatible ones that are running, such as vLLM.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.bench.chat_load import Talk, TalkResult, Turn
from holdfast.bench.gates import Gate, all_right, median, median_at_least
from holdfast.bench.load import ask
from holdfast.bench.machine import MIB, resident_bytes
from holdfast.bench.processes import Child, ForeignServer, listening_process, serving, started
from holdfast.bench.quality import long_text
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.chat.chat_model import ChatModel, load_chat
from holdfast.config import DEFAULT_MODEL, ChatConfig, option
from holdfast.errors import ConfigError
from holdfast.models import GGUFSource, open_model

OURS, STATELESS = "holdfast", "stateless"
MANY_CLIENTS = 16
_TALK_TIMEOUT_S = 3600.0
_FRAME = 16  # tokens that the template adds to a message, at most
_WARM_TURNS = 2
_STRIDE = 7919  # between the texts of two conversations, so that no server knows one from another
_SYSTEM = "You are a helpful assistant."
_LAST = "last_first_token_ms"
_HOW_TO_GET = (
    "llama.cpp's server was not measured: build it from its sources (cmake -B build && cmake --build build --target "
    "llama-server llama-quantize) and pass --llama-server build/bin/llama-server"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpeedSettings:
    clients: str = option("1,4,16", "numbers of clients that converse at once, comma-separated")
    turns: int = option(20, "turns of each conversation", least=2)
    reply_tokens: int = option(32, "sampled tokens in each reply", least=1)
    short: int = option(24, "tokens of each question in short conversations; 0: not measured")
    long: int = option(160, "tokens of each question in long conversations, 4,000 in 20 turns; 0: not measured")
    rounds: int = option(3, "rounds, in each of which every server is measured once", least=1)
    stateless_clients: int = option(
        1, "clients up to which our server is also measured without sessions; 0: not measured"
    )
    model: str = option(DEFAULT_MODEL, "model; llama.cpp takes part if it is a GGUF file")
    llama_server: str = option(
        "", "llama.cpp's server, built from its sources; empty: the llama-server in PATH, if there is one"
    )
    llama_files: str = option(
        "",
        "GGUF files that llama.cpp serves, comma-separated; empty: the model's own. "
        "`llama-quantize --allow-requantize MODEL.gguf q8_0.gguf Q8_0` makes one with eight bits, as our default",
        metavar="FILES",
    )
    peers: str = option(
        "",
        "further servers that are running, NAME=URL, comma-separated; for example vllm=http://127.0.0.1:8000 after "
        "`vllm serve`, with the same model",
        metavar="NAME=URL",
    )
    threads: int = option(0, "compute threads of our server and of llama.cpp's; 0: as many as each takes by itself")
    flags: str = option("", "further flags for our server, separated by spaces")

    def __post_init__(self) -> None:
        _ = self.client_counts, self.peer_urls
        if not self.shapes:
            raise ConfigError("--short and --long cannot both be 0")

    @property
    def client_counts(self) -> list[int]:
        words = self.clients.split(",")
        if not all(word.strip().isdigit() and int(word) for word in words):
            raise ConfigError(f"clients must be numbers like 1,4,16, got {self.clients!r}")
        return [int(word) for word in words]

    @property
    def peer_urls(self) -> dict[str, str]:
        found = {}
        for word in filter(None, self.peers.split(",")):
            name, _, url = word.strip().partition("=")
            if not name.isidentifier() or name in (OURS, STATELESS) or not url.startswith("http://"):
                raise ConfigError(f"peers must be NAME=http://HOST:PORT, comma-separated, got {word!r}")
            found[name] = url.rstrip("/")
        return found

    @property
    def named_files(self) -> dict[str, str]:
        """What llama.cpp serves, by its name in the report; an empty path is the model's own file."""
        files = [path.strip() for path in self.llama_files.split(",") if path.strip()]
        return {f"llama_{Path(path).stem}": path for path in files} or {"llama_file": ""}

    @property
    def shapes(self) -> dict[str, int]:
        """Tokens of a question, by kind of conversation."""
        return {name: num for name, num in (("short", self.short), ("long", self.long)) if num}

    @property
    def context(self) -> int:
        """Tokens of the longest conversation, at most: every server has that much room for each client."""
        return self.turns * (max(self.shapes.values()) + self.reply_tokens + 2 * _FRAME) + _FRAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A running server. `pid` is 0 where it is not known. `fields` are those of every request."""

    name: str
    url: str
    pid: int
    fields: Mapping[str, Any]
    slot_field: str = ""  # takes the number of the client
    has_sessions: bool = False


class Part(NamedTuple):
    """One kind of conversation with one number of clients."""

    shape: str
    num_clients: int

    def __str__(self) -> str:
        return f"{self.shape}_{self.num_clients}"


def measure(settings: ServeSpeedSettings, results: Results) -> None:
    results.step("loading")
    source = open_model(settings.model)
    chat = load_chat(source, ChatConfig(), source.architecture.vocab_size)
    program, files = find_llama(settings, str(source.path) if isinstance(source, GGUFSource) else "", results)
    with started("chat_load") as client:
        client.read(str)
        bench = _ServeBench(settings, results, client, _Questions(chat, settings.turns))
        try:
            for num_clients in settings.client_counts:
                results.step(f"starting servers for {num_clients} clients")
                with _contestants(settings, chat, num_clients, program, files) as contestants:
                    bench.run({one.name: one for one in contestants}, num_clients)
        finally:
            bench.record_courses()


def find_llama(settings: ServeSpeedSettings, own: str, results: Results) -> tuple[str, dict[str, str]]:
    """llama.cpp's server, and the files that it serves by its name in the report; none, and a note, without it.

    `own`: the model's GGUF file, if it is one.
    """
    program = shutil.which(settings.llama_server or "llama-server") or ""
    if settings.llama_server and not program:
        raise ConfigError(f"{settings.llama_server} is not a program; pass llama.cpp's server with --llama-server PATH")
    if not program:
        results.note(_HOW_TO_GET)
        return "", {}
    files = {name: path or own for name, path in settings.named_files.items()}
    if missing := [path for path in files.values() if not Path(path).is_file()]:
        raise ConfigError(f"llama.cpp needs a GGUF file, and {missing[0] or 'the model is none'}; see --llama-files")
    return program, files


@contextlib.contextmanager
def _contestants(
    settings: ServeSpeedSettings, chat: ChatModel, num_clients: int, program: str, files: Mapping[str, str]
) -> Iterator[list[Contestant]]:
    """All servers, each with room for all clients."""
    sampling = {"temperature": 0.0, "max_tokens": settings.reply_tokens}
    never_ends = {"logit_bias": {str(token): -100 for token in chat.continuation.stop_token_ids}}
    context = settings.context
    with contextlib.ExitStack() as stack:
        sizes = ["--sessions", str(num_clients), "--recent", str(context), "--threads", str(settings.threads)]
        ours = stack.enter_context(serving(settings.model, *sizes, *settings.flags.split()))
        fields = {"model": "any", **sampling, **never_ends}
        found = [Contestant(name=OURS, url=ours.http, pid=ours.pid, fields=fields, has_sessions=True)]
        if num_clients <= settings.stateless_clients:
            found.append(replace(found[0], name=STATELESS, has_sessions=False))
        for name, path in files.items():
            command = _LlamaCommand(program, path, num_clients, context, settings.threads)
            server = stack.enter_context(ForeignServer(name, command))
            server.wait_until_healthy()
            fields = {"model": "any", **sampling, "ignore_eos": True, "cache_prompt": True}
            found.append(Contestant(name=name, url=server.url, pid=server.pid, fields=fields, slot_field="id_slot"))
        for name, url in settings.peer_urls.items():
            (served, *_) = ask("GET", url.partition("://")[2], "/v1/models")["data"]
            fields = {"model": served["id"], **sampling, "ignore_eos": True}
            found.append(Contestant(name=name, url=url, pid=listening_process(url), fields=fields))
        yield found


@dataclass(frozen=True, slots=True)
class _LlamaCommand:
    """llama.cpp's server with a slot for each client, which the client names, and its prompt cache (the default).

    Its further cache, in host memory, is for conversations without a slot: there are none, so it is off.
    """

    program: str
    path: str
    num_clients: int
    context: int
    num_threads: int = 0

    def __call__(self, host: str, port: int) -> list[str]:
        place = ["--host", host, "--port", str(port)]
        sizes = ["--parallel", str(self.num_clients), "--ctx-size", str(self.num_clients * self.context)]
        threads = ["--threads", str(self.num_threads)] if self.num_threads else []
        return [self.program, "--model", self.path, *place, *sizes, *threads, "--cache-ram", "0", "--no-ui"]


class _Questions:
    """Questions of exact lengths from a long text; no two conversations have the same."""

    def __init__(self, chat: ChatModel, num_turns: int) -> None:
        self._decode = chat.tokenizer.decode
        self._tokens = chat.tokenizer.encode(long_text())
        self._num_turns = num_turns
        self._num_asked = 0

    def next(self, num_tokens: int) -> list[str]:
        self._num_asked += 1
        at = self._num_asked * _STRIDE
        return [self._text(at + index * num_tokens, num_tokens) for index in range(self._num_turns)]

    def _text(self, at: int, num_tokens: int) -> str:
        size = len(self._tokens)
        return self._decode([self._tokens[(at + index) % size] for index in range(num_tokens)], skip_special=True)


@dataclass(frozen=True, slots=True)
class _ServeBench:
    """Measures servers. `first_tokens`: times by contestant, part and turn, over all rounds."""

    settings: ServeSpeedSettings
    results: Results
    client: Child
    questions: _Questions
    first_tokens: dict[tuple[str, Part], list[list[float]]] = field(default_factory=dict)

    def run(self, contestants: Mapping[str, Contestant], num_clients: int) -> None:
        """Measure these servers with one number of clients."""
        settings, results = self.settings, self.results
        for one in contestants.values():
            results.step(f"warming up {one.name}")
            self._converse(one, [texts[:_WARM_TURNS] for texts in self._asked(settings.reply_tokens, num_clients)])
        for shape in settings.shapes:
            self._run_part(contestants, Part(shape, num_clients))
        for one in contestants.values():
            if one.pid and one.name != STATELESS:
                results.figure(f"{one.name}/{num_clients}/memory", "MiB", resident_bytes(one.pid) / MIB, "lower")

    def _run_part(self, contestants: Mapping[str, Contestant], part: Part) -> None:
        names, pids = list(contestants), [one.pid for one in contestants.values() if one.pid]
        size = self.settings.shapes[part.shape]
        asked = self._asked(size, part.num_clients)
        rounds = self.results.rounds(
            names,
            self.settings.rounds,
            [*pids, self.client.pid],
            lambda name: self._measure(contestants[name], part, asked),
        )
        for _ in rounds:
            for name in names[1:]:
                self._compare(name, part)
            asked = self._asked(size, part.num_clients)

    def record_courses(self) -> None:
        for (name, part), by_turn in self.first_tokens.items():
            self.results.extend(f"{name}/{part}/first_token_ms_by_turn", "ms", [median(values) for values in by_turn])

    def _asked(self, size: int, num_clients: int) -> list[list[str]]:
        return [self.questions.next(size) for _ in range(num_clients)]

    def _measure(self, contestant: Contestant, part: Part, asked: Sequence[Sequence[str]]) -> None:
        found, results, at = self._converse(contestant, asked), self.results, f"{contestant.name}/{part}"
        turns = [turn for client in found.turns for turn in client]
        results.count("answered", len(turns))
        results.count("wrong", sum(bool(turn.wrong) for turn in turns))
        if wrong := next((turn.wrong for turn in turns if turn.wrong), ""):
            results.note(f"{at}: {wrong}")
            return
        last = [client[-1] for client in found.turns]
        results.count(f"{at}/first_prompt", sum(client[0].prompt_tokens for client in found.turns))
        by_turn = self.first_tokens.setdefault((contestant.name, part), [[] for _ in range(self.settings.turns)])
        for client in found.turns:
            for values, turn in zip(by_turn, client, strict=True):
                values.append(turn.first_token_ms)
        results.figure(f"{at}/{_LAST}", "ms", median([turn.first_token_ms for turn in last]), "lower")
        results.figure(f"{at}/first_token_ms", "ms", median([turn.first_token_ms for turn in turns]), "lower")
        results.figure(f"{at}/worst_first_token_ms", "ms", max(turn.first_token_ms for turn in turns), "lower")
        rate = sum(turn.reply_tokens for turn in turns) / found.wall_s
        results.figure(f"{at}/tokens_per_s", "tokens/s", rate, "higher")
        results.figure(f"{at}/cached_share", "", sum(_cached_share(turn) for turn in last) / len(last))
        results.figure(f"{at}/history", "tokens", median([turn.prompt_tokens + turn.reply_tokens for turn in last]))

    def _compare(self, name: str, part: Part) -> None:
        at, ours, results = f"{name}/{part}", f"{OURS}/{part}", self.results
        results.ratio(f"{at}/{_LAST}_beside_ours", f"{at}/{_LAST}", f"{ours}/{_LAST}", "higher")
        results.ratio(f"{at}/our_tokens_per_s_beside", f"{ours}/tokens_per_s", f"{at}/tokens_per_s", "higher")

    def _converse(self, contestant: Contestant, asked: Sequence[Sequence[str]]) -> TalkResult:
        address = contestant.url.partition("://")[2]
        sessions: list[str] = []
        if contestant.has_sessions:
            sessions = [str(ask("POST", address, "/sessions")["session_id"]) for _ in asked]
        paths = [f"/sessions/{session}" for session in sessions] or [""] * len(asked)
        talks = [
            Talk(
                url=f"{contestant.url}{path}/v1/chat/completions",
                system=_SYSTEM,
                questions=questions,
                fields={**contestant.fields, **({contestant.slot_field: index} if contestant.slot_field else {})},
            )
            for index, (path, questions) in enumerate(zip(paths, asked, strict=True))
        ]
        try:
            return self.client.ask(talks, TalkResult, timeout_s=_TALK_TIMEOUT_S)
        finally:
            for session in sessions:
                ask("DELETE", address, f"/sessions/{session}")


def _cached_share(turn: Turn) -> float:
    return turn.cached_tokens / turn.prompt_tokens


def judge(report: Report) -> list[Gate]:
    answered, wrong = report.total("answered"), report.total("wrong")
    gates = [all_right("replies", answered, wrong)]
    prompts = {name: found.values for name, found in report.series.items() if name.endswith("/first_prompt")}
    ours = {name.partition("/")[2]: values for name, values in prompts.items() if name.startswith(f"{OURS}/")}
    differ = [name for name, values in prompts.items() if values != ours.get(name.partition("/")[2])]
    gates.append(all_right("same_prompts", len(prompts), len(differ)))
    for name, figure in report.figures.items():
        if name.endswith(f"/{_LAST}_beside_ours"):
            contestant, part, _ = name.split("/")
            is_many = int(part.rpartition("_")[2]) >= MANY_CLIENTS and contestant != STATELESS
            gates.append(median_at_least(f"{contestant}/{part}", figure.values, 1.5 if is_many else 1.0, "times"))
    return gates


def charts(settings: ServeSpeedSettings) -> list[Chart]:
    parts = [Part(shape, num) for num in settings.client_counts for shape in settings.shapes]
    names = [OURS, *settings.named_files, *settings.peer_urls, STATELESS]
    drawn = [
        Chart(
            f"time to first token by turn: {part.shape} conversations, {part.num_clients} clients",
            "course",
            tuple(f"{name}/{part}/first_token_ms_by_turn" for name in names),
            "ms",
            is_log=True,
        )
        for part in parts
    ]
    rates = tuple(f"{name}/{part}/tokens_per_s" for part in parts for name in names)
    memory = tuple(f"{name}/{num}/memory" for num in settings.client_counts for name in names if name != STATELESS)
    return [
        *drawn,
        Chart("sampled tokens per second of all clients", "bars", rates, "tokens/s"),
        Chart("memory of the server", "bars", memory, "MiB"),
    ]


SCENARIO = Scenario(
    name="serve",
    about="time to first token by turn, tokens/s and memory of our HTTP endpoint beside other servers",
    settings=ServeSpeedSettings,
    quick={"clients": "1,4", "turns": 4, "reply_tokens": 16, "long": 80, "rounds": 1},
    quick_s=50,
    num_rounds=lambda settings: settings.rounds * len(settings.client_counts) * len(settings.shapes),
    measure=measure,
    judge=judge,
    charts=charts,
)
