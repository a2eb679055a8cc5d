"""Who may generate now, who waits and who is turned away: first come, first served. On one event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from holdfast.errors import CapacityExhausted, Draining, InvalidArgument, Paused, QueueTimeout
from holdfast.metrics import Metrics


class FairSemaphore:
    """`size` places, taken several at a time, first come, first served: a small request never overtakes a large one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def try_acquire(self, num: int) -> bool:
        """Take `num` places if they are free and nobody waits."""
        if self._waiting or self.num_taken + num > self.size:
            return False
        self.num_taken += num
        return True

    async def acquire(self, num: int) -> None:
        """Wait for `num` places. A waiter that is cancelled leaves the queue, and gives back what it just got."""
        if self.try_acquire(num):
            return
        waiter = (num, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter[1]
        except BaseException:
            if waiter[1].done() and not waiter[1].cancelled():  # admitted at the same moment
                self.release(num)
            else:
                with contextlib.suppress(ValueError):  # `_admit` may have passed over it already
                    self._waiting.remove(waiter)
                self._admit()
            raise

    def release(self, num: int) -> None:
        self.num_taken -= num
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self.num_taken + self._waiting[0][0] <= self.size):
            num, admitted = self._waiting.popleft()
            if not admitted.cancelled():
                self.num_taken += num
                admitted.set_result(None)


class Admission:
    """At most `max_concurrent` generations at once. `max_queue` 0: nobody waits.

    While paused nothing new begins; requests wait for at most `max_pause_s`.
    """

    def __init__(
        self, max_concurrent: int, *, max_queue: int, max_wait_s: float, max_pause_s: float = 60.0, metrics: Metrics
    ) -> None:
        self._places = FairSemaphore(max_concurrent)
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s
        self._max_pause_s = max_pause_s
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_draining = False
        self._entering: set[asyncio.Task[object]] = set()
        self._metrics = metrics
        metrics.queue_depth.set_function(lambda: float(self._places.num_waiting))

    @property
    def is_paused(self) -> bool:
        return not self._is_open.is_set()

    def pause(self) -> None:
        self._is_open.clear()

    def resume(self) -> None:
        self._is_open.set()

    def drain(self) -> None:
        """Admit nobody from now on; whoever waits gets Draining."""
        self._is_draining = True
        for task in self._entering:
            task.cancel()

    @contextlib.asynccontextmanager
    async def admitted(self, num: int = 1) -> AsyncIterator[None]:
        """Places for `num` generations, all at once. A caller that leaves while it waits leaves the queue."""
        if num > self._places.size:
            raise InvalidArgument(
                f"n times the number of prompts must be at most {self._places.size} here, got {num}", param="n"
            )
        if self._is_draining:
            raise Draining
        task = asyncio.current_task()
        assert task is not None
        self._entering.add(task)
        try:
            await self._enter(num)
        except CapacityExhausted as exc:
            self._metrics.admission.labels("timed_out" if isinstance(exc, QueueTimeout) else "rejected").inc()
            raise
        except asyncio.CancelledError:
            self._metrics.admission.labels("left").inc()
            if self._is_draining and not task.uncancel():  # it was cancelled by `drain` alone
                raise Draining from None
            raise
        finally:
            self._entering.discard(task)
        self._metrics.admission.labels("admitted").inc()
        try:
            yield
        finally:
            self._places.release(num)

    async def _enter(self, num: int) -> None:
        """Returns with `num` places, at a moment when generations may begin; a pause gives the places to nobody."""
        while True:
            await self._resumed()
            await self._take(num)
            if not self.is_paused:
                return
            self._places.release(num)

    async def _resumed(self) -> None:
        if not self.is_paused:
            return
        try:
            await asyncio.wait_for(self._is_open.wait(), self._max_pause_s)
        except TimeoutError as exc:
            raise Paused(f"generation has been paused for more than {self._max_pause_s:g} s; try again later") from exc

    async def _take(self, num: int) -> None:
        if self._places.try_acquire(num):
            return
        if self._places.num_waiting >= self._max_queue:
            raise CapacityExhausted(
                f"{self._places.num_taken} generations are running and the queue is full; try again soon"
            )
        try:
            async with asyncio.timeout(self._max_wait_s or None):
                await self._places.acquire(num)
        except TimeoutError as exc:
            raise QueueTimeout(f"no free place within {self._max_wait_s:g} s; try again later") from exc
