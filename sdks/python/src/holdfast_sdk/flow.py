"""Calls as plain generators, so that waiting and repeating are written once for the sync and the async client.

A flow yields what it wants done (`Call`, `Pause`) and is sent the answer or thrown the error; `wire.py` and
`aio/wire.py` do it. Nothing here touches the network or sleeps.
"""

import itertools
import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast_sdk.errors import (
    ConnectionFailed,
    Draining,
    Fenced,
    HoldfastError,
    InvalidArgument,
    SessionBusy,
    SessionElsewhere,
)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
GONE = (ConnectionFailed, Draining, Fenced, SessionElsewhere)  # another address may do better


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
    """How long a call may take, all its attempts together, and how often it may be sent again: each of `retries` more
    rounds goes once through all addresses."""

    timeout_s: float | None = 60.0
    retries: int = 3
    num_addresses: int = 1

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, or None for no limit, got {self.timeout_s}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, got {self.retries}")

    def call(self, rpc: str, request: Any, timeout_s: float | None = None) -> Call:
        """A call whose time starts now; `timeout_s` overrides the client's."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return Call(rpc, request, None if seconds is None else time.monotonic() + seconds)


def repeat(call: Call, limits: Limits, lost: list[HoldfastError] | None = None) -> Flow[Any]:
    """The answer to a call that may arrive twice without harm; attempts that may have arrived are added to `lost`.

    A busy session after a lost attempt is most likely that attempt, still running; being refused changed nothing.
    """
    lost = [] if lost is None else lost
    return _attempts(call, limits, lambda error: isinstance(error, (*GONE, SessionBusy) if lost else GONE), lost)


def once(call: Call, limits: Limits) -> Flow[Any]:
    """The answer to a call that must not be carried out twice: it is sent again only where nobody had begun it."""
    return _attempts(call, limits, lambda error: error.is_untouched, [])


def _attempts(
    call: Call, limits: Limits, is_safe: Callable[[HoldfastError], bool], lost: list[HoldfastError]
) -> Flow[Any]:
    """Each attempt goes to the address in use, which is the next one after an address that is gone. Where there is
    none that was not tried in this round, wait."""
    for attempt in itertools.count(1):
        try:
            return (yield call)
        except HoldfastError as error:
            if not is_safe(error):
                raise
            rounds, rest = divmod(attempt, limits.num_addresses)
            must_wait = not rest or isinstance(error, SessionBusy)
            pause = Pause(backoff(max(0, rounds - 1)) if must_wait else 0)
            if rounds > limits.retries or not call.has_time_for(pause):
                raise
            if not error.is_untouched:
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
