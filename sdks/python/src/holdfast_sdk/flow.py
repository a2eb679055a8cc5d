"""Calls as plain generators, so that waiting and repeating are written once for the sync and the async client.

A flow yields what it wants done (`Call`, `Pause`) and is sent the answer or thrown the error; `wire.py` and
`aio/wire.py` do it. Nothing here touches the network or sleeps.
"""

import itertools
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast_sdk.errors import ConnectionFailed, Draining, HoldfastError, InvalidArgument, SessionBusy

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt at an RPC. `request` is a message, or an iterator of messages where the RPC takes a stream."""

    rpc: str
    request: Any
    deadline: float | None  # on time.monotonic()'s clock

    @property
    def timeout_s(self) -> float | None:
        """What is left of the time, as gRPC wants it."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def has_time_for(self, pause: "Pause") -> bool:
        """Whether anything is left of the time after the pause."""
        return self.timeout_s is None or self.timeout_s > pause.seconds


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = Call | Pause
Flow = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call may take, all its attempts together, and how often it may be sent again."""

    timeout_s: float | None = 60.0
    retries: int = 3

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, or None for no limit, got {self.timeout_s}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, got {self.retries}")

    def call(self, rpc: str, request: Any, timeout_s: float | None = None) -> Call:
        """A call whose time starts now; `timeout_s` overrides the client's."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return Call(rpc, request, None if seconds is None else time.monotonic() + seconds)


def repeat(call: Call, retries: int, lost: list[HoldfastError] | None = None) -> Flow[Any]:
    """The answer to a call that may arrive twice without harm; attempts that got none are added to `lost`.

    A busy session after a lost attempt is most likely that attempt, still running; being refused changed nothing.
    """
    lost = [] if lost is None else lost
    for attempt in itertools.count():
        try:
            return (yield call)
        except (ConnectionFailed, Draining, SessionBusy) as error:
            if isinstance(error, SessionBusy) and not lost:
                raise
            pause = Pause(backoff(attempt))
            if attempt >= retries or not call.has_time_for(pause):
                raise
            lost.append(error)
        yield pause


def backoff(attempt: int) -> float:
    """Seconds to wait after the failed attempt with this number; doubling, and spread so that clients do not meet."""
    return random.uniform(0.5, 1.0) * growing(FIRST_PAUSE_S, LONGEST_PAUSE_S, attempt)


def growing(first_s: float, longest_s: float, attempt: int) -> float:
    """Doubles with every attempt, up to the longest."""
    return float(min(longest_s, first_s * 2 ** min(attempt, 32)))


Built = TypeVar("Built")


def build(message: type[Built], **fields: Any) -> Built:
    """A request with the fields that are not None; a number that does not fit its field is refused here."""
    try:
        return message(**{name: value for name, value in fields.items() if value is not None})
    except (ValueError, OverflowError) as exc:
        raise InvalidArgument(f"a value does not fit the request: {exc}") from exc
