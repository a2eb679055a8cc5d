"""Requests to a chat and the events of a turn, without any wire format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.chat.messages import Message
from holdfast.chat.reply import AssistantReply, ReplyPiece
from holdfast.chats.retry import IdempotencyKey
from holdfast.generation import Sampled, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One turn as a client asks for it. `callable_tools`: those of `tools` that the reply may call."""

    messages: list[Message]
    params: SamplingParams
    tools: tuple[Mapping[str, Any], ...] = ()
    callable_tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    may_truncate: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)  # as it came, for the record and for upstreams
    num_bytes: int = 0  # of that body


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """What a reply cost. `prefilled_tokens` of the prompt were computed, the others were cached."""

    prompt_tokens: int
    completion_tokens: int
    prefilled_tokens: int
    dropped_tokens: int = 0
    recomputed_tokens: int = 0
    reasoning_tokens: int = 0
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


ReplyEvent = ReplyPiece | ReplyEnd


class ReplyWriter(Protocol):
    """Writes replies in the format that the client reads."""

    def whole(self, endings: Sequence[ReplyEnd]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """A turn that has been accepted. `branched_below`: the number of the turn that it branches from, if it is a branch.

    `writer` is that of the request that began it, so that a retry that joins gets the same bytes.
    """

    turn_id: str
    writer: ReplyWriter
    branched_below: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResponse:
    """The whole reply as the client gets it. Comes last, after the pieces of a streamed reply.

    `number` is that of the recorded turn, None where nothing was recorded (an upstream's error, or the session was
    closed meanwhile). From an upstream: its status, headers and bytes.
    """

    body: bytes
    number: int | None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_replay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, the writer of its reply, and the key that tells it from other requests."""

    request: ChatRequest
    writer: ReplyWriter
    key: IdempotencyKey


TurnEvent = TurnStarted | ReplyPiece | ReplyEnd | TurnResponse
