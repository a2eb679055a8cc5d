"""One conversation by two doors: raw tokens through the SDK, messages through the openai package."""

import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.bench.processes import ProcessFailed
from holdfast.chat.chat_model import ChatModel

if TYPE_CHECKING:
    import openai
    from holdfast_sdk import Client

TIMEOUT_S = 600.0
SYSTEM = {"role": "system", "content": "You are a terse assistant who keeps a log."}
_PREFILLED = "holdfast_generate_prefill_tokens_sum "


@dataclass(slots=True)
class Clock:
    """When the last request left the openai package, which looks at every message of the conversation before that."""

    sent_at: float = 0.0

    def note(self, request: object) -> None:
        self.sent_at = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Web:
    client: "openai.OpenAI"
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReply:
    """`turn_ms` is as the caller feels it; `first_token_ms` counts from when the request left, after `client_ms`."""

    turn_ms: float
    first_token_ms: float
    forwarded: int
    wanted: int
    text: str
    client_ms: float = 0.0


class SdkTalk:
    """The conversation as raw tokens over gRPC, pinned as the HTTP door pins it."""

    def __init__(self, client: "Client", chat: ChatModel, reply_tokens: int) -> None:
        model = client.model_info()
        pinned = max(model.sink, chat.continuation.pinned([SYSTEM], model.max_pin_tokens))
        self.session = client.create_session(label="long-session", pin_tokens=pinned)
        self._chat = chat
        self._reply_tokens = reply_tokens
        self._bias = dict.fromkeys(chat.continuation.stop_token_ids, -100.0)
        self._last: int | None = None

    def ids(self, question: str) -> list[int]:
        message = {"role": "user", "content": question}
        if self._last is None:
            return self._chat.continuation.first([SYSTEM, message]).ids
        return self._chat.continuation.tail(self._last, [message]).ids

    def ask(self, question: str) -> TimedReply:
        ids = self.ids(question)
        first_s, started = 0.0, time.perf_counter()
        generation = self.session.turn(
            ids, max_tokens=self._reply_tokens, temperature=0.0, logit_bias=self._bias, timeout_s=TIMEOUT_S
        )
        for _ in generation:
            first_s = first_s or time.perf_counter() - started
        total_s = time.perf_counter() - started
        wanted = len(ids) + (self._last is not None)
        self._last = generation.tokens[-1]
        return TimedReply(
            turn_ms=total_s * 1000,
            first_token_ms=first_s * 1000,
            forwarded=generation.done.prefill_tokens,
            wanted=wanted,
            text=self._chat.tokenizer.decode(generation.tokens, skip_special=True),
        )

    def say(self, question: str, num_chunks: int) -> list[int]:
        """A turn of the script, its tokens given in `num_chunks` parts: what was sampled."""
        ids = self.ids(question)
        size = -(-len(ids) // num_chunks)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        for part in parts[:-1]:
            self.session.append(part)
        generation = self.session.turn(
            parts[-1], max_tokens=self._reply_tokens, temperature=0.8, seed=1, logit_bias=self._bias
        )
        for _ in generation:
            pass
        self._last = generation.tokens[-1]
        return generation.tokens


@dataclass(slots=True, kw_only=True)
class WebTalk:
    """The conversation as messages through the openai package; with a session or without."""

    client: "openai.OpenAI"
    clock: Clock
    http: str
    reply_tokens: int
    bias: Mapping[str, int]
    messages: list[dict[str, str]] = field(default_factory=lambda: [dict(SYSTEM)])
    history: int = 0
    recomputed: int = 0

    def ask(self, messages: Sequence[Mapping[str, str]], num_tokens: int = 0, **extra: Any) -> TimedReply:
        before, first_s, text, usage = self._prefilled(), 0.0, "", None
        started = time.perf_counter()
        chunks: Any = self.client.chat.completions.create(  # type: ignore[call-overload]
            model="any",
            messages=messages,
            temperature=0.0,
            max_completion_tokens=num_tokens or self.reply_tokens,
            logit_bias=dict(self.bias),
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.delta.content:
                    first_s = first_s or time.perf_counter() - self.clock.sent_at
                    text += choice.delta.content
            usage = chunk.usage or usage
        ended, sent_at = time.perf_counter(), self.clock.sent_at
        if usage is None:
            raise ProcessFailed("a reply ended without saying what it cost")
        wanted = usage.prompt_tokens - self.history + bool(self.history)
        self.history = usage.total_tokens
        self.recomputed = usage.model_dump()["holdfast"]["recomputed_tokens"]
        return TimedReply(
            turn_ms=(ended - started) * 1000,
            first_token_ms=(first_s or ended - sent_at) * 1000,
            client_ms=(sent_at - started) * 1000,
            forwarded=self._prefilled() - before,
            wanted=wanted,
            text=text,
        )

    def _prefilled(self) -> int:
        """All tokens that the server's generations have computed before their first one, so far."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        return int(float(next(line for line in lines if line.startswith(_PREFILLED)).split()[1]))
