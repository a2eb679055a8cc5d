"""What the two ways to make a reply have in common: our own engine, and an upstream server."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.chat.messages import Message
from holdfast.chat.reply import ReplyPiece
from holdfast.chats.events import ReplyEnd, TurnRequest, TurnResponse
from holdfast.chats.trajectory import PreparedTurn, Trajectory
from holdfast.chats.tree import TurnFacts
from holdfast.generation import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """A reply that is ready to be recorded. `body` is what the client gets, `response` what is kept of it."""

    message: Message
    tokens: tuple[Sampled, ...]
    finish_reason: str
    facts: TurnFacts
    request: bytes
    response: bytes
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: ReplyEnd | None = None  # where the reply's pieces were told as they came


class TurnSource(Protocol):
    def events(
        self, trajectory: Trajectory, prepared: PreparedTurn, asked: TurnRequest
    ) -> AsyncGenerator[ReplyPiece | TurnResponse | TurnResult, None]:
        """The reply as it comes, and at the end what is to be recorded (or what was answered without a record)."""

    async def sync_history(self, trajectory: Trajectory, prepared: PreparedTurn, made: TurnResult) -> None:
        """Bring the session's history to the end of the turn."""
