"""What a trainer turns while agents work: pause and resume, and which weights are in use."""

import asyncio

from holdfast.errors import Paused


class Control:
    """New turns wait while paused, for at most `max_wait_s`. On one event loop."""

    def __init__(self, *, weight_version: str = "", max_wait_s: float = 60.0) -> None:
        self.weight_version = weight_version
        self._max_wait_s = max_wait_s
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def is_paused(self) -> bool:
        return not self._is_open.is_set()

    def pause(self) -> None:
        self._is_open.clear()

    def resume(self) -> None:
        self._is_open.set()

    async def passed(self) -> None:
        """Returns once turns may begin."""
        if self._is_open.is_set():
            return
        try:
            await asyncio.wait_for(self._is_open.wait(), self._max_wait_s)
        except TimeoutError as exc:
            raise Paused(f"turns are paused, and were for more than {self._max_wait_s:g} s; try again later") from exc
