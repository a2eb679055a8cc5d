"""One assistant reply as it is generated: sampled tokens in; content, reasoning and tool calls out."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.chat.messages import Message
from holdfast.chat.stop_strings import StopStrings, StringSearch
from holdfast.chat.tokenizer import Detokenizer, Tokenizer
from holdfast.chat.tool_calls import Delta, Parsed, ToolCall, ToolCallParser, without_tags
from holdfast.generation import Done, Event, Sampled, StopReason

_NEWLINES = "\r\n"


class ReasoningSplit:
    """Splits `<think>reasoning</think>content`; only a tag at the very start of the reply opens reasoning.

    White space before the opening tag and newlines directly inside and after the tags belong to the tags and are
    dropped. A reply without an opening tag is all content, unchanged; without a closing tag it is all reasoning.
    `starts_open` is for prompts that already end in the opening tag.
    """

    def __init__(self, open: str = "<think>", close: str = "</think>", starts_open: bool = False) -> None:
        self._open = open
        self._closing = StringSearch([close])
        self._take = self._take_newlines_after_open if starts_open else self._take_start
        self._space: list[str] = []  # white space that is dropped if a tag follows, and given back otherwise
        self._tag = ""  # what has been seen of the opening tag

    def push(self, text: str) -> Delta:
        return self._take(text)

    def finish(self) -> Delta:
        """What was held back for a tag that did not come."""
        is_reasoning = self._take == self._take_reasoning
        rest = "".join(self._space) + self._tag + self._closing.finish().before
        self._space, self._tag, self._take = [], "", self._take_content
        return Delta(reasoning=rest) if is_reasoning else Delta(rest)

    def _take_start(self, text: str) -> Delta:
        if not self._tag:
            body = text.lstrip()
            self._space.append(text[: len(text) - len(body)])
            text = body
        self._tag += text
        if self._tag.startswith(self._open):
            after = self._tag[len(self._open) :]
            self._space, self._tag, self._take = [], "", self._take_newlines_after_open
            return self._take(after)
        return Delta() if self._open.startswith(self._tag) else self.finish()

    def _take_newlines_after_open(self, text: str) -> Delta:
        if body := text.lstrip(_NEWLINES):
            self._take = self._take_reasoning
            return self._take(body)
        return Delta()

    def _take_reasoning(self, text: str) -> Delta:
        cut = self._closing.push(text)
        reasoning = self._without_last_newlines(cut.before)
        if cut.found is None:
            return Delta(reasoning=reasoning)
        self._space, self._take = [], self._take_newlines_after_close
        return Delta(self._take(cut.after).content, reasoning)

    def _take_newlines_after_close(self, text: str) -> Delta:
        if body := text.lstrip(_NEWLINES):
            self._take = self._take_content
        return Delta(body)

    def _take_content(self, text: str) -> Delta:
        return Delta(text)

    def _without_last_newlines(self, text: str) -> str:
        """The newlines held so far and `text`, except the newlines at its end, which are held now."""
        body = text.rstrip(_NEWLINES)
        if not body:
            self._space.append(text)
            return ""
        body, self._space = "".join(self._space) + body, [text[len(body) :]]
        return body


class Splitter(Protocol):
    """Text of one reply in pieces; content, reasoning and perhaps calls out, as far as they are certain."""

    def push(self, text: str) -> Delta: ...

    def finish(self) -> Delta: ...


class ReplyReader:
    """Text -> stop strings -> reasoning -> tool calls. Without any of them text passes unchanged.

    Stop strings are searched in the raw text, so one inside reasoning or inside a call ends the reply too. Once
    `stopped_by` is set no more text is needed; `finish` still returns what was held back.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        reasoning: Splitter | None = None,
        tools: ToolCallParser | None = None,
    ) -> None:
        self._stop = StopStrings(stop)
        self._reasoning = reasoning
        self._tools = tools

    @property
    def stopped_by(self) -> str | None:
        return self._stop.matched

    def push(self, text: str) -> Delta:
        return self._with_calls(self._split(self._stop.push(text)))

    def push_tag(self, tag: str) -> Delta:
        """A control token that the format of replies uses: no stop string goes across it."""
        delta = self._with_calls(self._split(self._stop.finish()))
        return delta if self.stopped_by else delta + self._with_calls(self._split(tag))

    def finish(self) -> Delta:
        split = self._split(self._stop.finish())
        if self._reasoning:
            split += self._reasoning.finish()
        delta = self._with_calls(split)
        last = self._tools.finish() if self._tools else Parsed()
        return delta + Delta(last.content, calls=last.calls)

    def _split(self, text: str) -> Delta:
        return self._reasoning.push(text) if self._reasoning else Delta(text)

    def _with_calls(self, split: Delta) -> Delta:
        if self._tools is None:
            return split
        parsed = self._tools.push(split.content)
        return Delta(parsed.content, split.reasoning, split.calls + parsed.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPiece:
    """What some tokens added to a reply. `calls` are whole calls in OpenAI's form."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[Sampled, ...] = ()

    def __add__(self, other: "ReplyPiece") -> "ReplyPiece":
        """Both in one. Only where `other` follows: a piece does not tell what came first in it."""
        return ReplyPiece(
            content=self.content + other.content,
            reasoning=self.reasoning + other.reasoning,
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
        )

    def follows(self, other: "ReplyPiece") -> bool:
        """Whether the two are of one kind: content, reasoning or calls. One that adds nothing is of any kind."""
        kinds = [[bool(piece.content), bool(piece.reasoning), bool(piece.calls)] for piece in (self, other)]
        return kinds[0] == kinds[1] or not all(map(any, kinds))


@dataclass(slots=True, eq=False)
class AssistantReply:
    """One reply as it is sampled: `take` every batch of events, then `finish`.

    Once `is_stopped`, a stop string has ended the reply and no further token belongs to it.
    """

    tokenizer: Tokenizer
    reader: ReplyReader
    tags: Mapping[int, str] = field(default_factory=dict)  # control tokens that the reader wants to see, as it does
    has_short_ids: bool = False  # of calls: nine letters and digits
    tokens: list[Sampled] = field(default_factory=list)
    num_reasoning: int = 0
    stop_reason: StopReason | None = None  # None where a stop string cut it short
    _detokenizer: Detokenizer = field(init=False)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    @property
    def is_stopped(self) -> bool:
        return self.reader.stopped_by is not None

    def take(self, batch: Sequence[Event]) -> Iterator[ReplyPiece]:
        """What a batch adds, up to a stop string, in as few pieces as keep content, reasoning and calls in order."""
        joined = ReplyPiece()
        for event in batch:
            if isinstance(event, Done):
                self.stop_reason = event.stop_reason
            if not isinstance(event, Sampled):
                continue
            piece = self.push(event)
            if not piece.follows(joined):
                yield joined
                joined = ReplyPiece()
            joined += piece
            if self.is_stopped:
                break
        if joined.tokens:
            yield joined

    def push(self, token: Sampled) -> ReplyPiece:
        self.tokens.append(token)
        text, tag = self._detokenizer.push(token.token), self.tags.get(token.token)
        delta = self.reader.push(text)
        piece = self._piece(delta if tag is None else delta + self.reader.push_tag(tag), (token,))
        self.num_reasoning += bool(piece.reasoning)
        return piece

    def finish(self) -> ReplyPiece:
        """What was held back until the end was certain."""
        held = self.reader.push(self._detokenizer.finish()) if not self.is_stopped else Delta()
        return self._piece(held + self.reader.finish(), ())

    @property
    def finish_reason(self) -> str:
        is_cut = self.stop_reason is StopReason.MAX_TOKENS
        if self._calls and not is_cut:
            return "tool_calls"
        return "length" if is_cut and not self.is_stopped else "stop"

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string, or the token that ended the reply."""
        if self.is_stopped:
            return self.reader.stopped_by
        return self.tokens[-1].token if self.stop_reason in (StopReason.EOS, StopReason.STOP_TOKEN) else None

    @property
    def message(self) -> Message:
        """The reply so far, in normal form."""
        message: Message = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    def _piece(self, delta: Delta, tokens: tuple[Sampled, ...]) -> ReplyPiece:
        calls = tuple(_with_id(call, is_short=self.has_short_ids) for call in delta.calls)
        self._calls += calls
        content, reasoning = without_tags(delta.content), without_tags(delta.reasoning)
        if content:
            self._content.append(content)
        if reasoning:
            self._reasoning.append(reasoning)
        return ReplyPiece(content=content, reasoning=reasoning, calls=calls, tokens=tokens)


def _with_id(call: ToolCall, *, is_short: bool) -> dict[str, Any]:
    return {
        "id": call.id or (secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """What a reply cost. `prefilled_tokens` of the prompt were computed, the others were cached."""

    prompt_tokens: int
    completion_tokens: int
    prefilled_tokens: int
    dropped_tokens: int = 0
    recomputed_tokens: int = 0
    reasoning_tokens: int = 0
    recalled_tokens: int = 0  # of the prompt: quotes of what is out of view
    is_first: bool = True  # of the choices that share a prompt

    @property
    def cached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.prefilled_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnd:
    """The end of one reply: the whole message, its tokens and its usage."""

    message: Message
    finish_reason: str
    tokens: tuple[Sampled, ...]
    usage: TokenUsage
    matched_stop: str | int | None = None
    seed: int = 0

    @classmethod
    def of(cls, reply: AssistantReply, usage: TokenUsage, seed: int) -> "ReplyEnd":
        return cls(
            message=reply.message,
            finish_reason=reply.finish_reason,
            tokens=tuple(reply.tokens),
            usage=usage,
            matched_stop=reply.matched_stop,
            seed=seed,
        )
