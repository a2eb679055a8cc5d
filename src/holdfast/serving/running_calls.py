"""The calls that an endpoint is answering: a server that stops takes no more of them, and ends those that remain."""

import asyncio
from typing import Any

from holdfast.errors import Draining, NotServing

_END_S = 1.0  # for what is ended to answer


class RunningCalls:
    """Use it as a context around each call: a call that `end` cut off raises Draining instead of CancelledError."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sending: set[asyncio.Task[Any]] = set()
        self._is_open = True
        self._is_ending = False

    def check_open(self) -> None:
        """Raises NotServing where no more calls are taken."""
        if not self._is_open:
            raise NotServing

    def drain(self) -> None:
        """Take no more calls."""
        self._is_open = False

    async def end(self, grace_s: float) -> None:
        """End the calls that are still running after `grace_s`, and wait until they have answered."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        self._is_ending = True
        for task in self._tasks - self._sending:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def begin_sending(self) -> None:
        """The call hands a message to the library that sends it, which is not to be cancelled in the middle of it."""
        self._sending.add(_current_task())

    def finish_sending(self) -> None:
        """Raises Draining where the call was to be ended meanwhile."""
        self._sending.discard(_current_task())
        if self._is_ending:
            raise Draining

    async def __aenter__(self) -> None:
        self._tasks.add(_current_task())

    async def __aexit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        task = _current_task()
        self._tasks.discard(task)
        self._sending.discard(task)
        if isinstance(exc, asyncio.CancelledError) and self._is_ending and not task.uncancel():
            raise Draining from None


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
