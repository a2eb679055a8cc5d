"""One run of events for any number of listeners. Who joins late hears all of it; the last to leave ends it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

T = TypeVar("T")


class Broadcast(Generic[T]):
    """Runs its `events` in a task of its own, from the first listener on."""

    events: AsyncGenerator[T, None]  # set before anyone listens

    def __init__(self) -> None:
        self._heard: list[T] = []
        self._error: Exception | None = None
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_listeners = 0

    @property
    def is_running(self) -> bool:
        """Whether joining still makes sense: someone listens, and nobody has ended it."""
        return self._task is not None and not self._task.done() and self._num_listeners > 0

    def abort(self, error: Exception) -> None:
        """End it now; every listener gets `error`."""
        if self._task is not None and not self._task.done():
            self._error = error
            self._task.cancel()

    async def listen(self) -> AsyncGenerator[T, None]:
        """All events from the first one on, then the error that ended them, if one did."""
        self._num_listeners += 1
        try:
            if self._task is None:
                self._task = asyncio.ensure_future(self._run())
            index = 0
            while True:
                while index < len(self._heard):
                    yield self._heard[index]
                    index += 1
                if self._task.done():
                    break
                await self._bell.wait()
            if self._error is not None:
                raise self._error
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self.events):
                async for event in self.events:
                    self._heard.append(event)
                    self._ring()
        except Exception as exc:  # noqa: BLE001 - raised again by every listener
            self._error = self._error or exc
        finally:
            asyncio.get_running_loop().call_soon(self._ring)  # once the task is done

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()
