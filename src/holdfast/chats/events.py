"""What is asked of a chat and what comes of it, in our own words: no wire format, no tokens to render."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.chat.messages import Message
from holdfast.chat.reply import ReplyPiece
from holdfast.chats.idempotency import IdempotencyKey
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
    """What a reply cost. `prefilled` is what was computed of the prompt, the rest of it cost nothing."""

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
    """The end of one reply: all of it, and what it cost."""

    message: Message
    finish_reason: str
    tokens: tuple[Sampled, ...]
    usage: TokenUsage
    matched_stop: str | int | None = None
    seed: int = 0


ReplyEvent = ReplyPiece | ReplyEnd


class ReplyWriter(Protocol):
    """Writes replies down as clients read them."""

    def whole(self, endings: Sequence[ReplyEnd]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """A turn that is under way. `branched_below`: the number of the turn that it is a retry after, where it is one.

    `writer` is that of the request that began it, so that whoever joins gets the same bytes.
    """

    turn_id: str
    writer: ReplyWriter
    branched_below: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResponse:
    """The turn is on record, and `body` is its whole reply. Comes last, after the reply's own events, if any.

    From an upstream: its status, headers and bytes, and `number` is None where nothing was recorded.
    """

    body: bytes
    number: int | None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_replay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, who writes its reply down, and what tells it from other requests."""

    request: ChatRequest
    writer: ReplyWriter
    ticket: IdempotencyKey


TurnEvent = TurnStarted | ReplyPiece | ReplyEnd | TurnResponse
