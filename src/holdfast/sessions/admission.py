"""Who may generate now, who waits, who is turned away: first come, first served. On one event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from holdfast.errors import CapacityExhausted, InvalidArgument, QueueTimeout
from holdfast.observability.metrics import Metrics


class _Waiting(NamedTuple):
    num: int
    admitted: "asyncio.Future[None]"


class Admission:
    """At most `max_concurrent` generations at once. `max_queue` 0: nobody waits."""

    def __init__(self, max_concurrent: int, *, max_queue: int, max_wait_s: float, metrics: Metrics) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s
        self._num_admitted = 0
        self._queue: deque[_Waiting] = deque()
        self._metrics = metrics
        metrics.queue_depth.set_function(lambda: float(len(self._queue)))

    @contextlib.asynccontextmanager
    async def admitted(self, num: int = 1) -> AsyncIterator[None]:
        """Places for `num` generations, all at once. Whoever leaves while waiting frees the place in the queue."""
        if num > self._max_concurrent:
            raise InvalidArgument(
                f"n times the number of prompts must be at most {self._max_concurrent} here, got {num}", param="n"
            )
        try:
            await self._enter(num)
        except CapacityExhausted as exc:
            self._metrics.admission.labels("timed_out" if isinstance(exc, QueueTimeout) else "rejected").inc()
            raise
        except asyncio.CancelledError:
            self._metrics.admission.labels("left").inc()
            raise
        self._metrics.admission.labels("admitted").inc()
        try:
            yield
        finally:
            self._num_admitted -= num
            self._admit_next()

    async def _enter(self, num: int) -> None:
        if not self._queue and self._num_admitted + num <= self._max_concurrent:
            self._num_admitted += num
            return
        if len(self._queue) >= self._max_queue:
            raise CapacityExhausted(
                f"{self._num_admitted} generations are running and no more may wait; try again soon"
            )
        waiting = _Waiting(num, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        try:
            async with asyncio.timeout(self._max_wait_s or None):
                await waiting.admitted
        except BaseException as exc:
            if waiting.admitted.done() and not waiting.admitted.cancelled():  # admitted in the same moment
                self._num_admitted -= num
            self._queue = deque(other for other in self._queue if other is not waiting)
            self._admit_next()
            if isinstance(exc, TimeoutError):
                raise QueueTimeout(f"no free place within {self._max_wait_s:g} s; try again later") from exc
            raise

    def _admit_next(self) -> None:
        while self._queue and self._num_admitted + self._queue[0].num <= self._max_concurrent:
            waiting = self._queue.popleft()
            if not waiting.admitted.cancelled():
                self._num_admitted += waiting.num
                waiting.admitted.set_result(None)
