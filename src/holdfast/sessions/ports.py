"""What sessions need from whoever computes. Backends implement this; sessions know nothing else of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from holdfast.generation import Done, Event, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model behind a backend, as clients may see it."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_hash: str
    chat_template_hash: str
    sink: int
    recent: int
    max_pin: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendView:
    """How a backend sees one session right now. The kv fields are None where the cache is not ours."""

    history_length: int
    num_dropped: int
    kv_live_bytes: int | None
    kv_reserved_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    failure: str | None


class EventStream(Protocol):
    """One generation. Leaving it early cancels, and waits until the backend has stopped."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> list[Event]: ...

    def rest(self) -> list[Event]:
        """Events that nobody has taken; complete once the stream was left."""


class Backend(Protocol):
    """Generation by handle. One operation at a time per handle; the session's gate sees to it."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def capacity(self) -> int:
        """How many sessions can be live at once."""

    async def open(self, *, sink: int) -> int: ...

    async def append(self, handle: int, tokens: Sequence[int]) -> Done:
        """The tokens are in the history once this has begun; cancelling only delays their computation."""

    def generate(self, handle: int, params: SamplingParams, tokens: Sequence[int] = ()) -> EventStream:
        """Append `tokens`, then sample. They are in the history once the stream was entered without an error."""

    async def fork(self, handle: int) -> int: ...

    async def rewind(self, handle: int, length: int) -> int:
        """Forget from `length` on; returns how many tokens had to be computed again."""

    async def close(self, handle: int) -> int:
        """Free what the handle holds, cancelling what runs on it; returns the final history length."""

    def view(self, handle: int) -> BackendView:
        """Never waits for the device."""
