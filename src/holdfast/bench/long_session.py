"""One session for many turns, through both doors: does a turn cost its new tokens and no more, in flat memory?

The same conversation without a session, sent anew in full each time, is the control: it must fail the gates.
"""

import contextlib
import dataclasses
import json
import math
import shlex
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from holdfast.bench.conversation import SYSTEM, TIMEOUT_S, Clock, SdkTalk, TimedReply, Web, WebTalk
from holdfast.bench.gates import Gate, all_right, control, kv_bounded, prefill_bounded
from holdfast.bench.page import Chart
from holdfast.bench.processes import ProcessFailed, resident_bytes
from holdfast.bench.report import Better, Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario, command_of
from holdfast.bench.server_process import ServerAddress, serving
from holdfast.bench.turn_series import TurnMeasurement, aggregate_run, in_buckets, question_of, turns_of, unit_of
from holdfast.chat.chat_model import load_chat
from holdfast.config import DEFAULT_MODEL, ChatConfig, option
from holdfast.errors import ConfigError
from holdfast.models import open_model

if TYPE_CHECKING:
    from holdfast_sdk import Client, Session

Door = Literal["sdk", "openai"]
DOORS: tuple[Door, ...] = get_args(Door)
CONTROL = "stateless"

_TURNS = 500
_CHECKPOINTS = 20
_LONG_RUN_S = 14_400.0
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "int8": 2}  # of the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSessionSettings:
    turns: int = option(0, f"ends after so many turns; 0: no limit, or {_TURNS} where no duration is given either")
    duration_s: float = option(0.0, "ends after so long; 0: no limit")
    turn_spacing_s: float = option(0.0, "from the start of one turn to that of the next, at least")
    reply_tokens: int = option(16, "sampled tokens in each reply", least=1)
    recent: int = option(1024, "window of the server that is started", least=1)
    dtype: str = option("int8", "its weights; it is started with --deterministic")
    retry_every: int = option(25, "turns after which one is asked again through openai; 0: never")
    control_share: float = option(0.2, "part of the time that the control may take")
    script_turns: int = option(8, "turns that are said twice, in other chunks, for the same tokens", least=1)
    model: str = option(DEFAULT_MODEL, "what is served")
    server: str = option("", "HOST:PORT of the gRPC door of a server that runs already, serving that model and dtype")
    http: str = option("", "URL of its HTTP door")
    pid: int = option(0, "its process, to watch the memory of; 0: whoever listens there on this machine")

    def __post_init__(self) -> None:
        if bool(self.server) != bool(self.http):
            raise ConfigError("a server that runs already is given as --server HOST:PORT and --http URL, both")
        if self.dtype not in _ITEMSIZES:
            raise ConfigError(f"dtype must be one of {', '.join(_ITEMSIZES)}, got {self.dtype!r}")

    @property
    def num_turns(self) -> int:
        return self.turns or (0 if self.duration_s else _TURNS)

    def progress(self, num_turns: int, elapsed_s: float) -> float:
        """How much of the run is done, 1 at its end."""
        by_turns = num_turns / self.num_turns if self.num_turns else 0.0
        return max(by_turns, elapsed_s / self.duration_s if self.duration_s else 0.0)


def judge(report: Report) -> list[Gate]:
    gates = []
    for contestant in (*DOORS, CONTROL):
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
    agreed = report.values("doors_agree")
    return [
        *gates,
        all_right("determinism", len(same), same.count(0.0)),
        all_right("invariants", len(violations), sum(map(bool, violations))),
        all_right("doors_agree", len(agreed), agreed.count(0.0)),
    ]


def charts(settings: LongSessionSettings) -> list[Chart]:
    def beside(title: str, name: str, label: str) -> Chart:
        names = (*(f"{door}/{name}" for door in DOORS), f"{CONTROL}/latest_{name}")
        return Chart(f"{title} by turn; {CONTROL}: as last measured", "course", names, label, is_log=True)

    return [
        beside("latency", "turn_ms", "ms"),
        beside("keys and values", "kv_live_bytes", "bytes"),
        Chart("what the openai package itself takes by turn", "course", ("openai/client_ms",), "ms"),
        beside("tokens forwarded before the first one", "forwarded_tokens", "tokens"),
        Chart("memory of the server by turn", "course", ("sdk/memory_bytes",), "bytes"),
    ]


def commands(settings: LongSessionSettings) -> str:
    """What to type in two terminals for a long run, of four hours unless told otherwise."""
    grpc, http = settings.server or "127.0.0.1:50051", settings.http or "http://127.0.0.1:8000"
    model, *sizes = _server_flags(settings)
    serve = ["holdfast", "serve", model, "--grpc", grpc, *sizes, "--http", http.partition("://")[2]]
    duration_s = settings.duration_s or (0.0 if settings.turns else _LONG_RUN_S)
    known = dataclasses.replace(settings, server=grpc, http=http, duration_s=duration_s)
    bench = command_of(SCENARIO, known, is_quick=False)
    return f"# terminal 1: the server\n{shlex.join(serve)}\n\n# terminal 2, once it serves: the bench\n{bench}"


def measure(settings: LongSessionSettings, results: Results) -> None:
    try:
        import holdfast_sdk
        import openai
    except ImportError as exc:
        raise ConfigError(f"this bench drives both doors: pip install holdfast-sdk openai ({exc})") from exc
    results.step("starting the server")
    try:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(_place(settings))
            client = stack.enter_context(holdfast_sdk.Client(place.grpc, timeout_s=TIMEOUT_S))
            clock = Clock()
            connection = openai.DefaultHttpxClient(timeout=TIMEOUT_S, event_hooks={"request": [clock.note]})
            web = stack.enter_context(
                openai.OpenAI(base_url=f"{place.http}/v1", api_key="none", max_retries=0, http_client=connection)
            )
            _ConversationRun(settings, results, place, client, Web(web, clock)).run()
    except (holdfast_sdk.HoldfastError, openai.OpenAIError, OSError) as exc:
        raise ProcessFailed(f"the server did not answer as it should: {exc}") from exc
    finally:
        _sum_up(results)


def _sum_up(results: Results) -> None:
    for contestant in (*DOORS, CONTROL):
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
def _place(settings: LongSessionSettings) -> Iterator[ServerAddress]:
    """The server that was named, or one of our own for as long as this lasts."""
    if settings.server:
        pid = settings.pid or _listening(settings.server)
        yield ServerAddress(http=settings.http.rstrip("/"), grpc=settings.server, pid=pid)
        return
    with serving(*_server_flags(settings)) as served:
        yield served


def _server_flags(settings: LongSessionSettings) -> list[str]:
    return [
        settings.model,
        "--recent",
        str(settings.recent),
        "--dtype",
        settings.dtype,
        "--deterministic",
        "--sessions",
        "4",
    ]


def _listening(address: str) -> int:
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    with contextlib.suppress(ImportError, OSError):
        import psutil  # type: ignore[import-untyped]

        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return int(found.pid)
    raise ConfigError(f"which process listens at {address} cannot be seen from here: give it as --pid")


class _ConversationRun:
    def __init__(
        self, settings: LongSessionSettings, results: Results, place: ServerAddress, client: "Client", web: Web
    ) -> None:
        source = open_model(settings.model)
        if (served := client.model_info()).tokenizer_hash != source.tokenizer_hash:
            raise ConfigError(f"the server has {served.name}, not {settings.model}: name its model with --model")
        arch = source.architecture
        self._position_bytes = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * _ITEMSIZES[settings.dtype]
        self._settings = settings
        self._results = results
        self._place = place
        self._client = client
        self._web = web
        self._chat = load_chat(source, ChatConfig(), arch.vocab_size)
        self._bias = {str(token): -100 for token in self._chat.continuation.stop_token_ids}

    def run(self) -> None:
        self._results.step("one script in two chunkings")
        self._script()
        opened = self._open()
        sdk = SdkTalk(self._client, self._chat, self._settings.reply_tokens)
        with sdk.session as one, self._client.session(opened) as other:
            self._converse(sdk, self._talk(f"/sessions/{opened}/v1"), {"sdk": one, "openai": other})

    def _script(self) -> None:
        """Warms the server up, too."""
        talks = {num: SdkTalk(self._client, self._chat, self._settings.reply_tokens) for num in (1, 3)}
        with talks[1].session, talks[3].session:
            for number in range(self._settings.script_turns):
                one, other = (talk.say(question_of(number), num) for num, talk in talks.items())
                same = [float(a == b) for a, b in zip(one, other, strict=True)]
                self._results.extend("script/is_same", "", same)

    def _converse(self, sdk: SdkTalk, web: WebTalk, sessions: Mapping[Door, "Session"]) -> None:
        settings, results = self._settings, self._results
        stateless, pace = _Control(self._talk("/v1"), settings.control_share), self._talk("/v1")
        started, number, num_saved = time.perf_counter(), 0, 0
        while settings.progress(number, (at_s := time.perf_counter() - started)) < 1:
            number += 1
            results.step(f"turn {number}" + (f" of {settings.num_turns}" if settings.num_turns else ""))
            question = question_of(number)
            web.messages.append({"role": "user", "content": question})
            pace_ms = pace.ask([SYSTEM, {"role": "user", "content": question_of(0)}], 1).first_token_ms
            answers: dict[Door, TimedReply] = {}
            turns: dict[Door, TurnMeasurement] = {}
            for door in DOORS if number % 2 else reversed(DOORS):
                answers[door] = sdk.ask(question) if door == "sdk" else web.ask(web.messages)
                turns[door] = self._record(door, (at_s, pace_ms), answers[door], sessions[door])
            results.extend("openai/client_ms", "ms", [answers["openai"].client_ms])
            results.extend("doors_agree", "", [float(answers["sdk"].text == answers["openai"].text)])
            if stateless.may_ask(time.perf_counter() - started):
                self._record_control(stateless.ask(web.messages), turns["openai"])
            self._carry_control()
            reply = answers["openai"].text
            if settings.retry_every and number % settings.retry_every == 0:
                reply = self._retry(web)
            web.messages.append({"role": "assistant", "content": reply})
            elapsed_s = time.perf_counter() - started
            done = min(1.0, settings.progress(number, elapsed_s))
            while num_saved < int(done * _CHECKPOINTS):
                results.on_round()
                num_saved += 1
            if done < 1:
                time.sleep(max(0.0, at_s + settings.turn_spacing_s - elapsed_s))

    def _record(
        self, door: Door, beside: tuple[float, float], answered: TimedReply, session: "Session"
    ) -> TurnMeasurement:
        info = session.info()
        computed, size = info.history_length - 1, info.sink + info.recent  # the last token is pending
        at_s, pace_ms = beside
        turn = TurnMeasurement(
            at_s=at_s,
            pace_ms=pace_ms,
            turn_ms=answered.turn_ms,
            first_token_ms=answered.first_token_ms,
            forwarded_tokens=answered.forwarded,
            wanted_tokens=answered.wanted,
            kv_live_bytes=info.kv_live_bytes or 0,
            kv_formula_bytes=min(computed, size) * self._position_bytes,
            kv_reserved_bytes=info.kv_reserved_bytes or 0,
            is_full=float(computed >= size),
            memory_bytes=resident_bytes(self._place.pid),
        )
        self._write(door, turn)
        self._results.extend("invariant_violations", "", [info.inv1_violations + info.inv2_violations])
        return turn

    def _record_control(self, answered: TimedReply, beside: TurnMeasurement) -> None:
        """The same turn without a session: all of the history is new, and so are its keys and values."""
        num_bytes = answered.forwarded * self._position_bytes
        turn = dataclasses.replace(
            beside,
            turn_ms=answered.turn_ms,
            first_token_ms=answered.first_token_ms,
            forwarded_tokens=answered.forwarded,
            kv_live_bytes=num_bytes,
            kv_reserved_bytes=num_bytes,
            memory_bytes=resident_bytes(self._place.pid),
        )
        self._write(CONTROL, turn)

    def _write(self, contestant: str, turn: TurnMeasurement) -> None:
        for name, value in dataclasses.asdict(turn).items():
            self._results.extend(f"{contestant}/{name}", unit_of(name), [value])

    def _carry_control(self) -> None:
        """A value for every turn, for the plot: the control's latest."""
        for name in ("turn_ms", "kv_live_bytes", "forwarded_tokens"):
            latest = self._results.report.values(f"{CONTROL}/{name}")[-1:]
            self._results.extend(f"{CONTROL}/latest_{name}", unit_of(name), latest)

    def _retry(self, web: WebTalk) -> str:
        """Ask the last question again: the reply that replaces the first one. Counted apart from the turns."""
        answered = web.ask(web.messages)
        self._results.extend("retry/turn_ms", "ms", [answered.turn_ms])
        self._results.extend("retry/forwarded_tokens", "tokens", [answered.forwarded])
        self._results.extend("retry/recomputed_tokens", "tokens", [web.recomputed])
        return answered.text

    def _talk(self, path: str) -> WebTalk:
        return WebTalk(
            client=self._web.client.with_options(base_url=self._place.http + path),
            clock=self._web.clock,
            http=self._place.http,
            reply_tokens=self._settings.reply_tokens,
            bias=self._bias,
        )

    def _open(self) -> str:
        with urllib.request.urlopen(f"{self._place.http}/sessions", data=b"", timeout=TIMEOUT_S) as answer:
            return str(json.load(answer)["session_id"])


class _Control:
    """The whole conversation, sent anew. As that takes ever longer, it is done as often as its share of time allows."""

    def __init__(self, talk: WebTalk, share: float) -> None:
        self._talk = talk
        self._share = share
        self._spent_s = 0.0

    def may_ask(self, elapsed_s: float) -> bool:
        return self._spent_s <= self._share * elapsed_s

    def ask(self, messages: Sequence[Mapping[str, str]]) -> TimedReply:
        answered = self._talk.ask(messages, truncation="auto")
        self._spent_s += answered.turn_ms / 1000
        return answered


SCENARIO = Scenario(
    name="long-session",
    about="one session for many turns through both doors: flat latency and memory, beside the stateless control",
    settings=LongSessionSettings,
    quick={"duration_s": 20.0, "recent": 128, "reply_tokens": 3, "retry_every": 8, "script_turns": 3},
    num_rounds=lambda settings: _CHECKPOINTS,
    measure=measure,
    judge=judge,
    charts=charts,
)
