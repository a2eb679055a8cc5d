"""What is journaled: facts about sessions, each true from the moment it is on disk. Pure data, no I/O.

What a turn's messages, reply, root and facts mean is its writer's business; here they are bytes. Arrays are
int32 tokens (`array("i")`) and float64 logprobs (`array("d")`); they must not change once they were handed over.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import InvalidArgument

SessionKind = Literal["tokens", "chat"]


def _floats() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True)
class ForkedFrom:
    """Where a session comes from. The journal copies `turns` of the source, in order, as turns 1, 2, ... of the fork,
    each below the one before, without their tickets; bodies are shared. Spans are the writer's to write."""

    session_id: str
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A session as its creator asked for it. `sink` is what the backend keeps, `pin_tokens` what the client said."""

    session_id: str
    number: int
    owner: str
    created_at: float
    kind: SessionKind = "tokens"
    label: str = ""
    group: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    sink: int = 0
    pin_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    forked_from: ForkedFrom | None = None


@dataclass(frozen=True, slots=True)
class TokensGiven:
    """Tokens at the end of a history. Two in a row are one span."""

    session_id: str
    tokens: "array[int]"


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """A sampled span, or with `continues` more of the one before; its stop reason is that of its last part."""

    session_id: str
    tokens: "array[int]"
    logprobs: "array[float]"
    sampling_logprobs: "array[float]"
    stop_reason: str | None
    continues: bool = False


@dataclass(frozen=True, slots=True)
class HistoryRewound:
    """The history ends at `length` from here on."""

    session_id: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFields:
    """What a chat turn is on record. `parent` is the number of the turn above, 0 for none; the history after it is
    the parent's path, then `given`, then `sampled`."""

    session_id: str
    number: int
    parent: int
    messages: bytes
    reply: bytes
    root: bytes
    given: "array[int]"
    sampled: "array[int]"
    logprobs: "array[float]" = field(default_factory=_floats)
    sampling_logprobs: "array[float]" = field(default_factory=_floats)
    finish_reason: str = ""
    facts: bytes = b""
    ticket_key: str = ""
    body_hash: bytes = b""
    num_control: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecorded(TurnFields):
    """A chat turn with the bytes that went over the wire."""

    request: bytes = b""
    response: bytes = b""


@dataclass(frozen=True, slots=True)
class TurnDelivered:
    """The reply has reached its client, as far as a server can know."""

    session_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Rewarded:
    """What a turn was worth, or with `turn` None the session. The last one counts."""

    session_id: str
    turn: int | None
    reward: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise InvalidArgument("reward must be a finite number", param="reward")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The backend keeps the first `sink` tokens from here on."""

    session_id: str
    sink: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """`why`: closed, expired or evicted. What is on record stays until it is purged."""

    session_id: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class SessionPurged:
    """Nothing of the session is on record any more."""

    session_id: str


Entry = (
    SessionOpened
    | TokensGiven
    | TokensSampled
    | HistoryRewound
    | TurnRecorded
    | TurnDelivered
    | Rewarded
    | Pinned
    | SessionClosed
    | SessionPurged
)


def num_bytes(entry: Entry) -> int:
    """Roughly what an entry takes in memory until it is on disk."""
    match entry:
        case TurnRecorded():
            parts = (entry.messages, entry.reply, entry.facts, entry.request, entry.response)
            return 256 + sum(map(len, parts)) + 4 * len(entry.given) + 20 * len(entry.sampled)
        case TokensGiven() | TokensSampled():
            return 256 + 20 * len(entry.tokens)
        case _:
            return 256
