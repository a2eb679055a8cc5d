"""One session for many turns, with our SDK and with the openai package: is a turn's cost flat, in time and in memory?

The control is the same conversation without a session, sent in full each time: it must fail the gates.
"""

import contextlib
import dataclasses
import json
import math
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.bench.conversation import SYSTEM, TIMEOUT_S, OpenAIChat, OpenAIServer, SdkChat, TimedReply, question_of
from holdfast.bench.gates import Gate, all_right, control, kv_bounded, prefill_bounded, share_at_least
from holdfast.bench.machine import resident_bytes
from holdfast.bench.processes import ProcessFailed, RunningServer, listening_process, serving
from holdfast.bench.report import Better, Report, Results
from holdfast.bench.runner import Chart, Scenario, command_of
from holdfast.bench.turn_series import TurnMeasurement, aggregate_run, in_buckets, turns_of, unit_of
from holdfast.chat.chat_model import load_chat
from holdfast.config import DEFAULT_MODEL, ChatConfig, EngineConfig, option
from holdfast.engine.factory import device_of, has_exact_engine, resolved_dtype
from holdfast.engine.interface import CACHE_DTYPES, cache_dtype, kv_bytes_per_position
from holdfast.errors import ConfigError
from holdfast.models import open_model

if TYPE_CHECKING:
    from holdfast_sdk import Client, Session

ClientName = Literal["sdk", "openai"]
CLIENTS: tuple[ClientName, ...] = get_args(ClientName)
CONTROL = "stateless"

_TURNS = 500
_CHECKPOINTS = 20
_LONG_RUN_S = 14_400.0
_MAX_FAILED = 3  # turns in a row, after which the server counts as gone
_PAUSE_S = 0.5  # after a failed turn
INEXACT = "this engine has no --deterministic: whether chunks change the sampled tokens was not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSessionSettings:
    turns: int = option(0, f"number of turns; 0: no limit, or {_TURNS} if there is no --duration-s either")
    duration_s: float = option(0.0, "duration of the run; 0: no limit")
    turn_spacing_s: float = option(0.0, "minimum time from the start of one turn to the start of the next")
    reply_tokens: int = option(16, "sampled tokens in each reply", least=1)
    recent: int = option(1024, "window of the server", least=1)
    recall_tokens: int = option(
        0, "tokens that a turn of the openai package may recall; 0: none. The SDK's tokens are raw, without recall"
    )
    device: str = option("auto", "device of the server")
    dtype: str = option("auto", "weights of the server; auto: int8, or bfloat16 where the engine has no int8")
    retry_every: int = option(25, "turns after which a turn is retried with the openai package; 0: never")
    control_share: float = option(0.2, "share of the time that the control may take")
    script_turns: int = option(8, "turns that are sampled twice, appended in different chunks", least=1)
    model: str = option(DEFAULT_MODEL, "model that is served")
    server: str = option(
        "", "gRPC HOST:PORT of a running server, instead of starting one; needs --http", metavar="HOST:PORT"
    )
    http: str = option("", "HTTP URL of the running server", metavar="URL")
    pid: int = option(0, "process id of the running server, to measure its memory; 0: find it by its port")

    def __post_init__(self) -> None:
        if bool(self.server) != bool(self.http):
            raise ConfigError("--server HOST:PORT and --http URL must be given together")
        if self.dtype not in ("auto", *CACHE_DTYPES):
            raise ConfigError(f"dtype must be one of auto, {', '.join(CACHE_DTYPES)}, got {self.dtype!r}")

    @property
    def num_turns(self) -> int:
        return self.turns or (0 if self.duration_s else _TURNS)

    def progress(self, num_turns: int, elapsed_s: float) -> float:
        """How much of the run is done; 1 at its end."""
        by_turns = num_turns / self.num_turns if self.num_turns else 0.0
        return max(by_turns, elapsed_s / self.duration_s if self.duration_s else 0.0)

    @property
    def is_exact(self) -> bool:
        """Whether the engine of the server can be told to be deterministic."""
        return has_exact_engine(open_model(self.model), EngineConfig(device=self.device))

    @property
    def served_dtype(self) -> str:
        return resolved_dtype(
            self.dtype, open_model(self.model).architecture, device_of(EngineConfig(device=self.device))
        )

    def server_flags(self) -> list[str]:
        recall = ["--recall-tokens", str(self.recall_tokens)] if self.recall_tokens else []
        sizes = ["--recent", str(self.recent), *recall, "--dtype", self.served_dtype, "--sessions", "4"]
        device = ["--device", self.device] if self.device != "auto" else []
        return [self.model, *sizes, *device, *(["--deterministic"] if self.is_exact else [])]


def judge(report: Report) -> list[Gate]:
    gates = []
    for contestant in (*CLIENTS, CONTROL):
        turns = turns_of(report, contestant)
        full, buckets = [turn for turn in turns if turn.is_full], in_buckets(turns)
        kv = kv_bounded(
            f"{contestant}/kv_bounded",
            [turn.kv_live_bytes for turn in full],
            [turn.kv_formula_bytes for turn in full],
            [[turn.memory_bytes for turn in bucket] for bucket in buckets],
        )
        prefill = prefill_bounded(
            f"{contestant}/prefill_bounded",
            [turn.forwarded_tokens for turn in turns],
            [turn.wanted_tokens for turn in turns],
            [[turn.first_token_ms / turn.pace_ms for turn in bucket] for bucket in buckets],
        )
        is_control = contestant == CONTROL
        gates += [control(f"control/{gate.name}", gate, len(full)) if is_control else gate for gate in (kv, prefill)]
    same, violations = report.values("script/is_same"), report.values("invariant_violations")
    recalled, has_recall = report.values("openai/recalled_tokens"), bool(report.settings.get("recall_tokens"))
    agreed, failed = report.values("doors_agree"), report.values("turn_failed")
    return [
        *gates,
        *([] if INEXACT in report.notes else [all_right("determinism", len(same), same.count(0.0))]),
        all_right("invariants", len(violations), sum(map(bool, violations))),
        *([] if has_recall else [all_right("doors_agree", len(agreed), agreed.count(0.0))]),
        *([share_at_least("turns_with_recall", [float(num > 0) for num in recalled], 0.5)] if has_recall else []),
        all_right("every_turn_answered", len(failed), sum(map(bool, failed))),
    ]


def charts(settings: LongSessionSettings) -> list[Chart]:
    def beside(title: str, name: str, label: str) -> Chart:
        names = (*(f"{client}/{name}" for client in CLIENTS), f"{CONTROL}/latest_{name}")
        return Chart(f"{title} by turn; {CONTROL}: last measured value", "course", names, label, is_log=True)

    return [
        beside("latency", "turn_ms", "ms"),
        beside("keys and values", "kv_live_bytes", "bytes"),
        Chart("time in the openai package by turn", "course", ("openai/client_ms",), "ms"),
        beside("tokens computed before the first sampled one", "forwarded_tokens", "tokens"),
        Chart("memory of the server by turn", "course", ("sdk/memory_bytes",), "bytes"),
    ]


def commands(settings: LongSessionSettings) -> str:
    """The commands for two terminals, server and bench; the run lasts four hours unless the settings limit it."""
    grpc, http = settings.server or "127.0.0.1:50051", settings.http or "http://127.0.0.1:8000"
    model, *sizes = settings.server_flags()
    serve = ["holdfast", "serve", model, "--grpc", grpc, *sizes, "--http", http.partition("://")[2]]
    duration_s = settings.duration_s or (0.0 if settings.turns else _LONG_RUN_S)
    known = dataclasses.replace(settings, server=grpc, http=http, duration_s=duration_s)
    bench = command_of(SCENARIO, known, is_quick=False)
    return f"# terminal 1: the server\n{shlex.join(serve)}\n\n# terminal 2, once the server is up: the bench\n{bench}"


def measure(settings: LongSessionSettings, results: Results) -> None:
    import holdfast_sdk

    if not settings.server and not settings.is_exact:
        results.note(INEXACT)
    results.step("starting the server")
    try:
        with (
            _server(settings) as server,
            holdfast_sdk.Client(server.grpc, timeout_s=TIMEOUT_S) as client,
            contextlib.closing(OpenAIServer(server.http)) as openai_server,
        ):
            _LongSessionRun(settings, results, server, client, openai_server).run()
    except _client_errors() as exc:
        raise ProcessFailed(f"the server did not answer as expected: {exc}") from exc
    finally:
        _summarize(results)


def _client_errors() -> tuple[type[Exception], ...]:
    """How a turn can fail with either client. The openai package lets errors of its HTTP library (httpx, or its
    successor, by version) through in mid-stream."""
    import holdfast_sdk
    import openai

    library: Any = sys.modules[openai.Timeout.__init__.__module__.partition(".")[0]]
    return holdfast_sdk.HoldfastError, openai.OpenAIError, library.HTTPError, OSError, ProcessFailed


def _summarize(results: Results) -> None:
    for contestant in (*CLIENTS, CONTROL):
        found = aggregate_run(turns_of(results.report, contestant))
        for name, values in found.by_bucket.items():
            measured = name.rpartition("_")[0]
            better: Better = "" if measured == "forwarded_tokens" else "lower"
            for value in values:
                results.figure(f"{contestant}/{name}", unit_of(measured), value, better)
        if found.num_turns:
            results.figure(f"{contestant}/turns", "", found.num_turns)
        if not math.isnan(found.latency_drift_p50_s):
            results.figure(f"{contestant}/latency_drift_p50_s", "s", found.latency_drift_p50_s, "lower")


@contextlib.contextmanager
def _server(settings: LongSessionSettings) -> Iterator[RunningServer]:
    """The server that the settings name, or one that is started for as long as the context lasts."""
    if settings.server:
        if not (pid := settings.pid or listening_process(settings.server)):
            raise ConfigError(f"cannot find the process that listens at {settings.server}; pass its id with --pid")
        yield RunningServer(http=settings.http.rstrip("/"), grpc=settings.server, pid=pid)
        return
    with serving(*settings.server_flags()) as server:
        yield server


class _LongSessionRun:
    def __init__(
        self,
        settings: LongSessionSettings,
        results: Results,
        server: RunningServer,
        client: "Client",
        openai_server: OpenAIServer,
    ) -> None:
        source = open_model(settings.model)
        if (served := client.model_info()).tokenizer_hash != source.tokenizer_hash:
            raise ConfigError(f"the server has {served.name}, not {settings.model}; pass its model with --model")
        arch = source.architecture
        self._position_bytes = kv_bytes_per_position(arch, cache_dtype(settings.served_dtype))
        self._settings = settings
        self._results = results
        self._server = server
        self._client = client
        self._openai_server = openai_server
        self._chat = load_chat(source, ChatConfig(), arch.vocab_size)
        self._control_s = 0.0
        self._errors = _client_errors()

    def run(self) -> None:
        self._results.step("checking determinism")
        self._check_determinism()
        with urllib.request.urlopen(f"{self._server.http}/sessions", data=b"", timeout=TIMEOUT_S) as answer:
            session_id = str(json.load(answer)["session_id"])
        sdk = SdkChat(self._client, self._chat, self._settings.reply_tokens)
        with sdk.session as one, self._client.session(session_id) as other:
            self._converse(sdk, self._openai_chat(f"/sessions/{session_id}/v1"), {"sdk": one, "openai": other})

    def _check_determinism(self) -> None:
        """Sample the same turns in two chunkings. Warms up the server, too."""
        chats = {num: SdkChat(self._client, self._chat, self._settings.reply_tokens) for num in (1, 3)}
        with chats[1].session, chats[3].session:
            for number in range(self._settings.script_turns):
                one, other = (chat.sample(question_of(number), num) for num, chat in chats.items())
                same = [float(a == b) for a, b in zip(one, other, strict=True)]
                self._results.extend("script/is_same", "", same)

    def _converse(self, sdk: SdkChat, chat: OpenAIChat, sessions: "Mapping[ClientName, Session]") -> None:
        settings, results = self._settings, self._results
        stateless, pace = self._openai_chat("/v1"), self._openai_chat("/v1")
        started, number, num_saved, num_failed = time.perf_counter(), 0, 0, 0
        known: tuple[int, int | None, int] = (0, None, 0)
        while settings.progress(number, (at_s := time.perf_counter() - started)) < 1:
            number += 1
            results.step(f"turn {number}" + (f" of {settings.num_turns}" if settings.num_turns else ""))
            question = question_of(number, is_about_past=settings.recall_tokens > 0)
            chat.messages.append({"role": "user", "content": question})
            try:
                if num_failed:
                    sdk.rewind(*known[:2])
                    chat.history_length = known[2]
                known = (sdk.history_length, sdk.last, chat.history_length)
                pace_ms = pace.ask([SYSTEM, {"role": "user", "content": question_of(0)}], 1).first_token_ms
                order = CLIENTS if number % 2 else reversed(CLIENTS)
                replies = {name: sdk.ask(question) if name == "sdk" else chat.ask(chat.messages) for name in order}
                if settings.recall_tokens:
                    replies["openai"] = _counted(replies["openai"], replies["sdk"])
                turns = {name: self._measured((at_s, pace_ms), replies[name], sessions[name]) for name in CLIENTS}
                # The control takes ever longer, so it runs as often as its share of the time allows.
                has_control = self._control_s <= settings.control_share * (time.perf_counter() - started)
                control_reply = stateless.ask(chat.messages, truncation="auto") if has_control else None
                retried = settings.retry_every and number % settings.retry_every == 0
                text = self._retry(chat) if retried else replies["openai"].text
            except self._errors as exc:  # the next turn goes on where this one began
                results.count("turn_failed", True)
                results.note(f"turn {number} failed: {str(exc) or type(exc).__name__}")
                chat.messages.pop()
                num_failed += 1
                if num_failed == _MAX_FAILED:
                    raise
                time.sleep(_PAUSE_S)
                continue
            num_failed = 0
            results.count("turn_failed", False)
            for name in CLIENTS:
                self._write(name, turns[name])
            results.extend("openai/client_ms", "ms", [replies["openai"].client_ms])
            self._compare(replies)
            if control_reply:
                self._record_control(control_reply, turns["openai"])
            self._repeat_control()
            chat.messages.append({"role": "assistant", "content": text})
            elapsed_s = time.perf_counter() - started
            done = min(1.0, settings.progress(number, elapsed_s))
            while num_saved < int(done * _CHECKPOINTS):
                results.on_round()
                num_saved += 1
            if done < 1:
                time.sleep(max(0.0, at_s + settings.turn_spacing_s - elapsed_s))

    def _compare(self, replies: "Mapping[ClientName, TimedReply]") -> None:
        if self._settings.recall_tokens:  # the two read different things
            self._results.extend("openai/recalled_tokens", "tokens", [replies["openai"].recalled])
        else:
            self._results.count("doors_agree", replies["sdk"].text == replies["openai"].text)

    def _measured(self, times: tuple[float, float], reply: TimedReply, session: "Session") -> TurnMeasurement:
        info = session.info()
        computed, size = info.history_length - 1, info.sink + info.recent  # the last token is pending
        at_s, pace_ms = times
        self._results.count("invariant_violations", info.inv1_violations + info.inv2_violations)
        return TurnMeasurement(
            at_s=at_s,
            pace_ms=pace_ms,
            turn_ms=reply.turn_ms,
            first_token_ms=reply.first_token_ms,
            forwarded_tokens=reply.forwarded,
            wanted_tokens=reply.wanted,
            kv_live_bytes=info.kv_live_bytes or 0,
            kv_formula_bytes=min(computed, size) * self._position_bytes,
            kv_reserved_bytes=info.kv_reserved_bytes or 0,
            is_full=float(computed >= size),
            memory_bytes=resident_bytes(self._server.pid),
        )

    def _record_control(self, reply: TimedReply, beside: TurnMeasurement) -> None:
        """The same turn without a session: the whole history is computed, and so are its keys and values."""
        self._control_s += reply.turn_ms / 1000
        num_bytes = reply.forwarded * self._position_bytes
        turn = dataclasses.replace(
            beside,
            turn_ms=reply.turn_ms,
            first_token_ms=reply.first_token_ms,
            forwarded_tokens=reply.forwarded,
            kv_live_bytes=num_bytes,
            kv_reserved_bytes=num_bytes,
            memory_bytes=resident_bytes(self._server.pid),
        )
        self._write(CONTROL, turn)

    def _write(self, contestant: str, turn: TurnMeasurement) -> None:
        for name, value in dataclasses.asdict(turn).items():
            self._results.extend(f"{contestant}/{name}", unit_of(name), [value])

    def _repeat_control(self) -> None:
        """A value of the control for every turn, for the plot: the last measured one."""
        for name in ("turn_ms", "kv_live_bytes", "forwarded_tokens"):
            latest = self._results.report.values(f"{CONTROL}/{name}")[-1:]
            self._results.extend(f"{CONTROL}/latest_{name}", unit_of(name), latest)

    def _retry(self, chat: OpenAIChat) -> str:
        """Ask the last question again: the reply replaces the first one. Not counted as a turn."""
        reply = chat.ask(chat.messages)
        self._results.extend("retry/turn_ms", "ms", [reply.turn_ms])
        self._results.extend("retry/forwarded_tokens", "tokens", [reply.forwarded])
        self._results.extend("retry/recomputed_tokens", "tokens", [chat.recomputed])
        return reply.text

    def _openai_chat(self, path: str) -> OpenAIChat:
        return OpenAIChat(self._openai_server, path, self._chat, self._settings.reply_tokens)


def _counted(reply: TimedReply, plain: TimedReply) -> TimedReply:
    """With recall, a turn takes the tokens of the same question without it, and those that were recalled."""
    return dataclasses.replace(reply, wanted=plain.wanted + reply.recalled)


SCENARIO = Scenario(
    name="long-session",
    about="one session for many turns with our SDK and the openai package: flat latency and memory, unlike stateless",
    settings=LongSessionSettings,
    quick={"duration_s": 20.0, "recent": 128, "reply_tokens": 3, "retry_every": 8, "script_turns": 3},
    quick_s=35,
    num_rounds=lambda settings: _CHECKPOINTS,
    needs=lambda settings: ("holdfast_sdk", "openai"),
    measure=measure,
    judge=judge,
    charts=charts,
)
