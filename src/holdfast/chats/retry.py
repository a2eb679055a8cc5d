"""Requests that are sent again: how one is recognised, and how it joins the turn that is still in flight."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast.errors import Draining, IdempotencyMismatch, StreamStalled

T = TypeVar("T")

MAX_UNREAD = 1024  # events


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """What tells requests apart. `is_retry`: the client says that it repeats a request, without a key."""

    body_hash: bytes
    key: str = ""
    is_retry: bool = False

    @classmethod
    def of(cls, body: bytes, *, key: str = "", is_retry: bool = False) -> "IdempotencyKey":
        return cls(hashlib.sha256(body).digest(), key, is_retry)

    def repeats(self, earlier: "IdempotencyKey | None") -> bool:
        """Whether this is the request `earlier` again. Raises where the same key comes with another body."""
        if earlier is None:
            return False
        if self.key and self.key == earlier.key:
            if self.body_hash != earlier.body_hash:
                raise IdempotencyMismatch(f"the key {self.key!r} was used for another request on this session")
            return True
        return self.is_retry and not self.key and self.body_hash == earlier.body_hash


class Broadcast(Generic[T]):
    """The events of one task for any number of listeners.

    A listener that joins late gets all events from the first one on; when the last listener leaves, the task is
    cancelled. The task waits for its listeners (`caught_up`), `max_stall_s` in all; 0: no limit.
    """

    def __init__(self, max_stall_s: float = 0.0) -> None:
        self._max_stall_s = max_stall_s
        self._stalled_s = 0.0
        self._num_heard = 0  # events that some listener has asked to go on from
        self._heard = asyncio.Event()
        self._events: list[T] = []
        self._error: BaseException | None = None
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_listeners = 0
        self._is_ending = False
        self._is_over = False  # a little later than the task is done: then its error is known

    @property
    def is_running(self) -> bool:
        """Whether joining still makes sense: the task runs, and nobody has ended it."""
        return self._task is not None and not self._task.done() and not self._is_ending

    def start(self, run: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Run the task that publishes. `on_end` is called when it is over, even if it was cancelled before it began."""
        self._task = asyncio.ensure_future(run)

        def ended(task: "asyncio.Task[None]") -> None:
            self._error = self._error or (Draining() if task.cancelled() else task.exception())
            self._is_over = True
            on_end()
            self._ring()

        self._task.add_done_callback(ended)

    def publish(self, event: T) -> None:
        self._events.append(event)
        self._ring()

    async def caught_up(self) -> None:
        """Returns when the listener that is ahead of all others has few events left. Raises StreamStalled where that
        takes too long: nobody reads."""
        if self._num_behind <= MAX_UNREAD:
            return
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._max_stall_s - self._stalled_s if self._max_stall_s else None):
                while self._num_behind > MAX_UNREAD:
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            raise StreamStalled(
                f"the reply was cancelled: its stream was not read for {self._max_stall_s:g} s (--stream-stall-s)"
            ) from None
        finally:
            self._stalled_s += clock() - started

    @property
    def _num_behind(self) -> int:
        return len(self._events) - self._num_heard

    def abort(self, error: Exception) -> None:
        """End the task now; every listener gets `error`."""
        if self._task is not None and not self._task.done():
            self._error = error
            self._end(self._task)

    async def listen(self) -> AsyncGenerator[T, None]:
        """All events from the first one on, then the error that ended them, if one did."""
        assert self._task is not None
        self._num_listeners += 1
        try:
            index = 0
            while True:
                while index < len(self._events):
                    yield self._events[index]
                    index += 1
                    if index > self._num_heard:
                        self._num_heard = index
                        self._heard.set()
                if self._is_over:
                    break
                await self._bell.wait()
            if self._error is not None:
                raise self._error
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and not self._task.done():
                self._end(self._task)
                await asyncio.gather(self._task, return_exceptions=True)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._is_ending = True
        task.cancel()

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()
