"""One assistant's reply as it is sampled: tokens in, deltas out, the whole message at the end."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from holdfast.chat.detokenize import Detokenizer
from holdfast.chat.messages import Message
from holdfast.chat.reply import Delta, ReplyReader
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chat.tool_calls import ToolCall
from holdfast.generation import Sampled, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPiece:
    """What some tokens added to a reply. `calls` are in OpenAI's form, each whole."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[Sampled, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(slots=True, eq=False)
class AssistantReply:
    """Push every sampled token; once `is_stopped`, the reply is complete and no further token belongs to it."""

    tokenizer: Tokenizer
    reader: ReplyReader
    tokens: list[Sampled] = field(default_factory=list)
    num_reasoning: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    @property
    def is_stopped(self) -> bool:
        return self.reader.stopped_by is not None

    def push(self, token: Sampled) -> ReplyPiece:
        self.tokens.append(token)
        piece = self._piece(self.reader.push(self._detokenizer.push(token.token)), (token,))
        self.num_reasoning += bool(piece.reasoning)
        return piece

    def finish(self) -> ReplyPiece:
        """What was held back until the end was certain."""
        held = self.reader.push(self._detokenizer.finish()) if not self.is_stopped else Delta()
        last = self.reader.finish()
        return self._piece(
            Delta(held.content + last.content, held.reasoning + last.reasoning, held.calls + last.calls), ()
        )

    def finish_reason(self, reason: StopReason | None) -> str:
        if self._calls and reason is not StopReason.MAX_TOKENS:
            return "tool_calls"
        return "length" if reason is StopReason.MAX_TOKENS and not self.is_stopped else "stop"

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
        calls = tuple(_with_id(call) for call in delta.calls)
        self._calls += calls
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        return ReplyPiece(content=delta.content, reasoning=delta.reasoning, calls=calls, tokens=tokens)


def _with_id(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
