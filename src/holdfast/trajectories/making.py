"""What the two ways to make a reply have in common: our own engine, and an upstream server."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.chat.answer import Piece
from holdfast.chat.messages import Message
from holdfast.generation import Sampled
from holdfast.trajectories.replies import Asked, Ending, Recorded
from holdfast.trajectories.trajectory import Prepared, Trajectory
from holdfast.trajectories.tree import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A reply that is ready to be recorded. `body` is what the client gets, `response` what is kept of it."""

    message: Message
    tokens: tuple[Sampled, ...]
    finish_reason: str
    facts: Facts
    request: bytes
    response: bytes
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending | None = None  # where the reply's pieces were told as they came


class Making(Protocol):
    def events(
        self, trajectory: Trajectory, prepared: Prepared, asked: Asked
    ) -> AsyncGenerator[Piece | Recorded | Made, None]:
        """The reply as it comes, and at the end what is to be recorded (or what was answered without a record)."""

    async def hold(self, trajectory: Trajectory, prepared: Prepared, made: Made) -> None:
        """Bring the session's history to the end of the turn."""
