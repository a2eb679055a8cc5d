"""Requests to a chat and the events of a turn, without any wire format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.chat.messages import Message
from holdfast.chat.reply import ReplyEnd, ReplyPiece
from holdfast.chats.recall import RecallLimits
from holdfast.chats.retry import IdempotencyKey
from holdfast.generation import SamplingParams


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
    recall: RecallLimits | None = None  # None: as the session's, or the server's settings say
    body: Mapping[str, Any] = field(default_factory=dict)  # as it came, for the record and for upstreams
    num_bytes: int = 0  # of that body


ReplyEvent = ReplyPiece | ReplyEnd


class ReplyWriter(Protocol):
    """Writes replies in the format that the client reads."""

    def whole(self, endings: Sequence[ReplyEnd]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """A turn that has been accepted. `branched_below`: the number of the turn that it branches from, if it is a branch.
    `num_dropped` tells how many tokens of its conversation have left the window by now, `num_recalled` how many of its
    prompt's are quotes of what has.

    `writer` is that of the request that began it, so that a retry that joins gets the same bytes.
    """

    turn_id: str
    writer: ReplyWriter
    num_dropped: Callable[[], int]
    branched_below: int | None = None
    num_recalled: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, the writer of its reply, and the key that tells it from other requests.

    `agent`: the client's own ids of its session, thread or agent. `response_id`: by which it can ask for the reply
    again. Both are recorded.
    """

    request: ChatRequest
    writer: ReplyWriter
    key: IdempotencyKey
    agent: Mapping[str, str] = field(default_factory=dict)
    response_id: str = ""


TurnEvent = TurnStarted | ReplyPiece | ReplyEnd | TurnResponse
