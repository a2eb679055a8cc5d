"""Replies in OpenAI's format: whole, or chunk by chunk."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from holdfast.chat.reply import ReplyEnd, ReplyPiece, TokenUsage
from holdfast.chat.tokenizer import Tokenizer
from holdfast.generation import Sampled

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter:
    """Writes one chat completion; its id and time stay the same over all chunks."""

    model: str
    tokenizer: Tokenizer
    with_logprobs: bool = False
    with_meta_info: bool = False
    with_matched_stop: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, endings: Sequence[ReplyEnd]) -> Json:
        choices = [self._choice(index, ending) for index, ending in enumerate(endings)]
        return self._head("chat.completion", choices) | {"usage": usage_of(endings)}

    def opening(self, index: int) -> Json:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, piece: ReplyPiece, num_calls: int) -> Json | None:
        """The chunk for a piece; None if it adds nothing. `num_calls`: tool calls that were sent before."""
        delta: Json = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [{"index": num_calls + i, **call} for i, call in enumerate(piece.calls)]
        logprobs = self._logprobs(piece.tokens) if self.with_logprobs and piece.tokens else None
        return self._chunk(index, delta, logprobs=logprobs) if delta or logprobs else None

    def finish(self, index: int, ending: ReplyEnd) -> Json:
        chunk = self._chunk(index, {}, finish_reason=ending.finish_reason)
        if self.with_meta_info:
            chunk["choices"][0]["meta_info"] = self._meta_info(ending)
        return chunk

    def usage(self, endings: Sequence[ReplyEnd]) -> Json:
        return self._head("chat.completion.chunk", []) | {"usage": usage_of(endings)}

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(
        self, index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk", [choice])

    def _choice(self, index: int, ending: ReplyEnd) -> Json:
        message = {"refusal": None, **ending.message}
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(ending.tokens) if self.with_logprobs else None,
            "finish_reason": ending.finish_reason,
        }
        if self.with_matched_stop:
            choice["matched_stop"] = ending.matched_stop  # as SGLang has it
        return choice | ({"meta_info": self._meta_info(ending)} if self.with_meta_info else {})

    def _logprobs(self, tokens: Sequence[Sampled]) -> Json:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Sampled) -> Json:
        top = [self._token(id, logprob) for id, logprob in token.top]
        return self._token(token.token, token.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    def _meta_info(self, ending: ReplyEnd) -> Json:
        """As SGLang gives it; the logprobs are those of the distribution that was sampled from."""
        return {
            "id": self.id,
            "prompt_tokens": ending.usage.prompt_tokens,
            "completion_tokens": len(ending.tokens),
            "cached_tokens": ending.usage.cached_tokens,
            "finish_reason": {"type": ending.finish_reason, "matched": ending.matched_stop},
            "logprob_kind": "sampling",
            "seed": ending.seed,
            "output_token_logprobs": [
                [token.sampling_logprob, token.token, self.tokenizer.decode([token.token])] for token in ending.tokens
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWriter:
    """Writes one text completion."""

    model: str
    tokenizer: Tokenizer
    with_logprobs: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _lengths: dict[int, int] = field(default_factory=dict)  # characters of the tokens sent so far, by choice

    def whole(self, endings: Sequence[ReplyEnd]) -> Json:
        choices = [
            self._choice(index, ending.message["content"], ending.tokens, ending.finish_reason)
            for index, ending in enumerate(endings)
        ]
        return self._head(choices) | {"usage": usage_of(endings)}

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, index: int, piece: ReplyPiece, num_calls: int) -> Json | None:
        if not piece.content and not (self.with_logprobs and piece.tokens):
            return None
        return self._head([self._choice(index, piece.content, piece.tokens, None)])

    def finish(self, index: int, ending: ReplyEnd) -> Json:
        return self._head([self._choice(index, "", (), ending.finish_reason)])

    def usage(self, endings: Sequence[ReplyEnd]) -> Json:
        return self._head([]) | {"usage": usage_of(endings)}

    def _head(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, tokens: Sequence[Sampled], finish_reason: str | None) -> Json:
        logprobs = self._logprobs(index, tokens) if self.with_logprobs and tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, tokens: Sequence[Sampled]) -> Json:
        texts = [self._text(token.token) for token in tokens]
        *offsets, self._lengths[index] = accumulate(map(len, texts), initial=self._lengths.get(index, 0))
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text(id): logprob for id, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")


Writer = ChatWriter | TextWriter


def usage_of(endings: Sequence[ReplyEnd]) -> Json:
    """One prompt is counted once, however many choices it has; of several prompts, all."""
    usages: list[TokenUsage] = [ending.usage for ending in endings]
    first = usages[0]
    prompt = sum(usage.prompt_tokens for usage in usages if usage.is_first)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
        "holdfast": {
            "prefilled_tokens": sum(usage.prefilled_tokens for usage in usages if usage.is_first),
            "recomputed_tokens": first.recomputed_tokens,
            "dropped_tokens": max(usage.dropped_tokens for usage in usages),
            "recalled_tokens": first.recalled_tokens,
        },
    }
