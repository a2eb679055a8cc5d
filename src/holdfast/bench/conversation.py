"""One conversation with two clients: raw tokens with our SDK over gRPC, messages with the openai package over HTTP."""

import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.bench.processes import ProcessFailed
from holdfast.chat.chat_model import ChatModel

if TYPE_CHECKING:
    from holdfast_sdk import Client, Generation

TIMEOUT_S = 600.0
SYSTEM = {"role": "system", "content": "You are a terse assistant who keeps a log."}
_THINGS = ("roof", "door", "wall", "floor", "gate", "stair", "lamp")
_PREFILLED = "holdfast_generate_prefill_tokens_sum "


def question_of(number: int, *, is_about_past: bool = False) -> str:
    """The question of a turn: a different one each time, always of the same length."""
    thing = _THINGS[number % len(_THINGS)]
    asked = f"What was entry {number // 2:05d}?" if is_about_past else "What is next?"
    return f"Entry {number:05d}: the {thing} is done. {asked}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReply:
    """`turn_ms` is what the caller waits; `first_token_ms` counts from when the request left, after `client_ms`."""

    turn_ms: float
    first_token_ms: float
    forwarded: int
    wanted: int
    text: str
    client_ms: float = 0.0
    recalled: int = 0


class SdkChat:
    """The conversation as raw tokens over gRPC. Pins the same tokens as a chat session over HTTP does."""

    def __init__(self, client: "Client", chat: ChatModel, reply_tokens: int) -> None:
        model = client.model_info()
        pinned = max(model.sink, chat.continuation.pinned([SYSTEM], model.max_pin_tokens))
        self.session = client.create_session(label="long-session", pin_tokens=pinned)
        self._chat = chat
        self._reply_tokens = reply_tokens
        self._bias = dict.fromkeys(chat.continuation.stop_token_ids, -100.0)
        self.last: int | None = None

    def ask(self, question: str) -> TimedReply:
        ids = self._ids(question)
        wanted = len(ids) + (self.last is not None)
        first_s, started = 0.0, time.perf_counter()
        generation = self._turn(ids, temperature=0.0)
        for _ in generation:
            first_s = first_s or time.perf_counter() - started
        total_s = time.perf_counter() - started
        self.last = generation.tokens[-1]
        return TimedReply(
            turn_ms=total_s * 1000,
            first_token_ms=first_s * 1000,
            forwarded=generation.done.prefill_tokens,
            wanted=wanted,
            text=self._chat.tokenizer.decode(generation.tokens, skip_special=True),
        )

    @property
    def history_length(self) -> int:
        return self.session.history_length or 0

    def rewind(self, length: int, last: int | None) -> None:
        """Go back to the first `length` tokens, which end with `last`."""
        if self.session.info().history_length > length:
            self.session.rewind(length)
        self.last = last

    def sample(self, question: str, num_chunks: int) -> list[int]:
        """The sampled tokens of a turn whose own tokens are appended in `num_chunks` parts."""
        ids = self._ids(question)
        size = -(-len(ids) // num_chunks)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        for part in parts[:-1]:
            self.session.append(part)
        tokens = [token.id for token in self._turn(parts[-1], temperature=0.8, seed=1)]
        self.last = tokens[-1]
        return tokens

    def _turn(self, ids: list[int], **sampling: Any) -> "Generation":
        return self.session.turn(
            ids, max_tokens=self._reply_tokens, logit_bias=self._bias, timeout_s=TIMEOUT_S, **sampling
        )

    def _ids(self, question: str) -> list[int]:
        message = {"role": "user", "content": question}
        if self.last is None:
            return self._chat.continuation.first([SYSTEM, message]).ids
        if num_trimmed := self._chat.continuation.num_trimmed(self.last):
            self.session.rewind(self.history_length - num_trimmed)
        return self._chat.continuation.tail(self.last, [message]).ids


class OpenAIServer:
    """The openai package connected to a server; `close` it at the end.

    `sent_at` is when the last request left the package, which goes through every message of the conversation before.
    """

    def __init__(self, http: str) -> None:
        import openai

        connection = openai.DefaultHttpxClient(timeout=TIMEOUT_S, event_hooks={"request": [self._note_sent]})
        self.http = http
        self.client = openai.OpenAI(base_url=http, api_key="none", max_retries=0, http_client=connection)
        self.sent_at = 0.0

    def prefilled(self) -> int:
        """How many tokens the server's generations have computed before their first one, so far."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        return int(float(next(line for line in lines if line.startswith(_PREFILLED)).split()[1]))

    def close(self) -> None:
        self.client.close()

    def _note_sent(self, request: object) -> None:
        self.sent_at = time.perf_counter()


class OpenAIChat:
    """The conversation as messages; `path` is that of a session, or of the stateless endpoint."""

    def __init__(self, server: OpenAIServer, path: str, chat: ChatModel, reply_tokens: int) -> None:
        self.messages = [dict(SYSTEM)]
        self.recomputed = 0
        self.history_length = 0
        self._server = server
        self._client = server.client.with_options(base_url=server.http + path)
        self._reply_tokens = reply_tokens
        self._bias = {str(token): -100 for token in chat.continuation.stop_token_ids}

    def ask(self, messages: Sequence[Mapping[str, str]], num_tokens: int = 0, **extra: Any) -> TimedReply:
        before, first_s, text, usage = self._server.prefilled(), 0.0, "", None
        started = time.perf_counter()
        chunks: Any = self._client.chat.completions.create(  # type: ignore[call-overload]
            model="any",
            messages=messages,
            temperature=0.0,
            max_completion_tokens=num_tokens or self._reply_tokens,
            logit_bias=self._bias,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.delta.content:
                    first_s = first_s or time.perf_counter() - self._server.sent_at
                    text += choice.delta.content
            usage = chunk.usage or usage
        ended, sent_at = time.perf_counter(), self._server.sent_at
        if usage is None:
            raise ProcessFailed("a streamed response ended without its usage")
        wanted = usage.prompt_tokens - self.history_length + bool(self.history_length)
        self.history_length = usage.total_tokens
        counts = usage.model_dump()["holdfast"]
        self.recomputed = counts["recomputed_tokens"]
        return TimedReply(
            turn_ms=(ended - started) * 1000,
            first_token_ms=(first_s or ended - sent_at) * 1000,
            client_ms=(sent_at - started) * 1000,
            forwarded=self._server.prefilled() - before,
            wanted=wanted,
            text=text,
            recalled=counts["recalled_tokens"],
        )
