"""New requests for anything but tokens wait a little while requests take more than their share of the computing cores.

Both endpoints run on one event loop. Where tokens are computed on the same cores, every moment of the loop is taken
from them, and clients that send requests as fast as they are answered would take half of a small machine.
"""

import asyncio
import time
from collections.abc import Callable

SHARE = 0.03  # of the cores that compute
_CREDIT_S = 0.02  # CPU time that may be used at once
_LONGEST_S = 0.05  # that a request waits


class Pacing:
    """All methods are called on the event loop, whose CPU time is counted; streams count, and never wait."""

    def __init__(
        self,
        num_busy_cores: Callable[[], int] = lambda: 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        """`num_busy_cores`: how many cores of this machine compute tokens now. Without any nobody waits."""
        self._num_busy_cores = num_busy_cores
        self._clock = clock
        self._used = used
        self._last = clock(), used()  # when the debt was last counted
        self._debt_s = 0.0  # CPU time beyond the share; below 0: credit

    async def wait(self) -> None:
        """Returns when a new request may begin."""
        if (wait_s := self.due_s()) > 0:
            await asyncio.sleep(wait_s)

    def due_s(self) -> float:
        """How long a request that comes now should wait. Mutates: counts the time since the last one."""
        share = SHARE * self._num_busy_cores()
        (then, used_then), self._last = self._last, (self._clock(), self._used())
        if not share:
            self._debt_s = -_CREDIT_S
            return 0.0
        now, used = self._last
        fresh_s = used - used_then - share * (now - then)
        self._debt_s = min(max(self._debt_s + fresh_s, -_CREDIT_S), share * _LONGEST_S)
        return max(0.0, self._debt_s / share)
