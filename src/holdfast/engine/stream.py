"""Events from the engine thread to event loops, with one wake-up per loop and step."""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from holdfast.engine.run import Failed, Run
from holdfast.errors import Draining, HoldfastError
from holdfast.generation import Done, Event

MAX_UNREAD = 1024  # events


class Stream:
    """The events of one run. Entering it starts the run, iterating gives batches of events, leaving it ends the run.

    Leaving early cancels the run and waits for its last event, so the sequence is idle afterwards. A run of which
    `MAX_UNREAD` events are unread computes nothing until they are read.
    """

    def __init__(
        self, start: Callable[["Stream"], None], cancel: Callable[["Stream"], None], wake: Callable[[], None]
    ) -> None:
        self.run: Run | None = None  # owned by the engine thread
        self.loop: asyncio.AbstractEventLoop
        self._start = start
        self._cancel = cancel
        self._wake = wake  # the engine thread, which may wait for room here
        self._num_sent = 0  # written by the engine thread
        self._num_read = 0  # written on the stream's loop
        self._is_waited_for = False
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._error: HoldfastError | None = None
        self._done: Done | None = None
        self._has_started = False

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self._start(self)
        self._has_started = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_started:
            return
        if not self._is_over:
            # A worker that stops sends every stream a last event, so waiting is right in any case.
            with contextlib.suppress(Draining):
                self._cancel(self)
        while not self._is_over:
            await self._arrival()

    def cancel_run(self) -> None:
        """End the run at the next step. Called on the engine thread."""
        if self.run is not None:
            self.run.is_cancelled = True

    def count(self) -> None:
        """One more event is on its way. Called on the engine thread."""
        self._num_sent += 1

    def has_room(self) -> bool:
        """Whether the run may go on. Called on the engine thread. Looks again once it has said that it waits: either
        this sees what was read meanwhile, or whoever read it sees that it is waited for."""
        if self._num_sent - self._num_read < MAX_UNREAD:
            return True
        if self.loop.is_closed():  # nobody will read them
            self.cancel_run()
            return True
        self._is_waited_for = True
        return self._num_sent - self._num_read < MAX_UNREAD

    def deliver(self, events: list[Event | Failed]) -> None:
        """Take events. Called on the stream's own loop."""
        for event in events:
            if isinstance(event, Failed):
                self._error = event.error
            else:
                self._events.append(event)
        if isinstance(last := events[-1], Done):
            self._done = last
        self._arrived.set()

    @property
    def _is_over(self) -> bool:
        return self._done is not None or self._error is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Event]:
        """All events that have arrived, at least one. A failed run raises its error after them."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            await self._arrival()
        return self.rest()

    async def done(self) -> Done:
        """Wait for the final event. The events before it stay for `rest`."""
        while self._done is None:
            if self._error is not None:
                raise self._error
            await self._arrival()
        return self._done

    def rest(self) -> list[Event]:
        """Events that were not consumed; complete once the stream was closed."""
        batch, self._events = self._events, []
        self._num_read += len(batch)
        if self._is_waited_for:
            self._is_waited_for = False
            with contextlib.suppress(Draining):
                self._wake()
        return batch

    async def _arrival(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()


class EventDispatcher:
    """Collects the events of a step and delivers them, one call per event loop. Used by the engine thread only."""

    def __init__(self) -> None:
        self._waiting: dict[Stream, list[Event | Failed]] = {}

    def send(self, stream: Stream, event: Event | Failed) -> None:
        self._waiting.setdefault(stream, []).append(event)
        stream.count()

    def flush(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[Event | Failed]]]] = {}
        for stream, events in self._waiting.items():
            by_loop.setdefault(stream.loop, []).append((stream, events))
        self._waiting.clear()
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, deliveries)
            except RuntimeError:  # the loop is closed, so its streams cannot be read any more
                for stream, _ in deliveries:
                    stream.cancel_run()


def _deliver(deliveries: list[tuple[Stream, list[Event | Failed]]]) -> None:
    for stream, events in deliveries:
        stream.deliver(events)
