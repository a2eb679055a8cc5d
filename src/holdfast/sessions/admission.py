"""Who may generate now, who waits and who is turned away: owners take turns. On one event loop."""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

from holdfast.errors import CapacityExhausted, InvalidArgument, NotServing, Paused, QueueTimeout, QuotaExceeded
from holdfast.metrics import Metrics
from holdfast.sessions.quotas import OwnerQuotas

Waiter = tuple[int, "asyncio.Future[None]"]  # how many places, and who is told


class FairSemaphore:
    """`size` places, taken several at a time, of which one owner gets at most `owner_size`.

    Owners take turns, one request each; the requests of one owner are served first come, first served. Nobody
    overtakes the request whose turn it is: a large one waits until it fits, and whoever comes later waits behind it.
    """

    def __init__(self, size: int, *, owner_size: int = 0) -> None:
        self.size = size
        self.owner_size = min(size, owner_size) if owner_size else size
        self._limits_owners = self.owner_size < size
        self.num_taken = 0
        self._taken: Counter[str] = Counter()  # by owner, where owners have a limit
        self._waiting: OrderedDict[str, deque[Waiter]] = OrderedDict()  # by owner, in the order of their turns

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_at_limit(self, num: int, owner: str) -> bool:
        """Whether it is the owner's own limit that leaves no room for `num`."""
        return self._limits_owners and self._taken[owner] + num > self.owner_size

    def try_acquire(self, num: int, owner: str = "") -> bool:
        """Take `num` places if they are free and nobody has to go first."""
        if self.num_taken + num > self.size or self.is_at_limit(num, owner):
            return False
        if self._waiting and (owner in self._waiting or self._next_owner() is not None):
            return False
        self._take(num, owner)
        return True

    async def acquire(self, num: int, owner: str = "") -> None:
        """Wait for `num` places. A waiter that is cancelled leaves the queue, and gives back what it just got."""
        if self.try_acquire(num, owner):
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((num, admitted))
        try:
            await admitted
        except BaseException:
            if not admitted.done() or admitted.cancelled():
                self._leave(owner, (num, admitted))
            elif admitted.exception() is None:  # admitted at the same moment
                self.release(num, owner)
            raise

    def release(self, num: int, owner: str = "") -> None:
        self._take(-num, owner)
        if self._waiting:
            self._admit()

    def displace(self, owner: str, error: Exception) -> bool:
        """Make room in the queue for one more request of `owner`: the last one of the owner with the longest queue gets
        `error`. False where no queue is longer than the owner's own would be."""
        longest = max(self._waiting.values(), key=len, default=deque[Waiter]())
        if len(longest) <= len(self._waiting.get(owner, ())) + 1:
            return False
        _, last = longest.pop()
        if not last.done():
            last.set_exception(error)
        return True

    def _take(self, num: int, owner: str) -> None:
        self.num_taken += num
        if self._limits_owners:
            self._taken[owner] += num
            if not self._taken[owner]:
                del self._taken[owner]

    def _next_owner(self) -> str | None:
        """Whose turn it is: the first owner whose first request is within the owner's limit."""
        for owner, waiting in list(self._waiting.items()):
            while waiting and waiting[0][1].cancelled():
                waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            elif not self.is_at_limit(waiting[0][0], owner):
                return owner
        return None

    def _leave(self, owner: str, waiter: Waiter) -> None:
        with contextlib.suppress(KeyError, ValueError):  # `_next_owner` may have passed over it already
            self._waiting[owner].remove(waiter)
            if not self._waiting[owner]:
                del self._waiting[owner]
        self._admit()

    def _admit(self) -> None:
        while (owner := self._next_owner()) is not None:
            num, admitted = self._waiting[owner][0]
            if self.num_taken + num > self.size:
                return
            self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            self._take(num, owner)
            admitted.set_result(None)


class Admission:
    """At most `max_concurrent` generations at once. `max_queue` 0: nobody waits.

    While paused nothing new begins; requests wait for at most `max_pause_s`.
    """

    def __init__(
        self,
        max_concurrent: int,
        *,
        max_queue: int,
        max_wait_s: float,
        max_pause_s: float = 60.0,
        quotas: OwnerQuotas | None = None,
        metrics: Metrics,
    ) -> None:
        self._quotas = quotas or OwnerQuotas()
        self._places = FairSemaphore(max_concurrent, owner_size=self._quotas.max_running)
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s
        self._max_pause_s = max_pause_s
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_draining = False
        self._entering: set[asyncio.Task[object]] = set()
        self._num_waiting: Counter[str] = Counter()  # by owner, for a place or for the end of a pause
        self._metrics = metrics
        metrics.queue_depth.set_function(lambda: float(self._places.num_waiting))

    @property
    def num_running(self) -> int:
        return self._places.num_taken

    @property
    def num_waiting(self) -> int:
        return self._places.num_waiting

    @property
    def is_paused(self) -> bool:
        return not self._is_open.is_set()

    def pause(self) -> None:
        self._is_open.clear()

    def resume(self) -> None:
        self._is_open.set()

    def drain(self) -> None:
        """Admit nobody from now on; whoever waits gets NotServing."""
        self._is_draining = True
        for task in self._entering:
            task.cancel()

    @contextlib.asynccontextmanager
    async def admitted(self, num: int = 1, *, owner: str = "") -> AsyncIterator[None]:
        """Places for `num` generations, all at once. A caller that leaves while it waits leaves the queue."""
        if num > (limit := self._places.owner_size):
            by = " (--owner-max-running)" if limit == self._quotas.max_running else ""
            raise InvalidArgument(
                f"n times the number of prompts must be at most {limit} here{by}, got {num}", param="n"
            )
        if self._is_draining:
            raise NotServing
        task = asyncio.current_task()
        assert task is not None
        self._entering.add(task)
        try:
            await self._enter(num, owner)
        except CapacityExhausted as exc:
            self._metrics.admission.labels("timed_out" if isinstance(exc, QueueTimeout) else "rejected").inc()
            raise
        except asyncio.CancelledError:
            self._metrics.admission.labels("left").inc()
            if self._is_draining and not task.uncancel():  # it was cancelled by `drain` alone
                raise NotServing from None
            raise
        finally:
            self._entering.discard(task)
        self._metrics.admission.labels("admitted").inc()
        try:
            yield
        finally:
            self._places.release(num, owner)

    async def _enter(self, num: int, owner: str) -> None:
        """Returns with `num` places, at a moment when generations may begin; a pause gives the places to nobody."""
        if not self.is_paused and self._places.try_acquire(num, owner):
            return
        self._quotas.check_queued(owner, self._num_waiting[owner])
        self._num_waiting[owner] += 1
        try:
            while True:
                await self._resumed()
                await self._take(num, owner)
                if not self.is_paused:
                    return
                self._places.release(num, owner)
        finally:
            self._num_waiting[owner] -= 1
            if not self._num_waiting[owner]:
                del self._num_waiting[owner]

    async def _resumed(self) -> None:
        if not self.is_paused:
            return
        try:
            await asyncio.wait_for(self._is_open.wait(), self._max_pause_s)
        except TimeoutError as exc:
            raise Paused(f"generation has been paused for more than {self._max_pause_s:g} s; try again later") from exc

    async def _take(self, num: int, owner: str) -> None:
        if self._places.try_acquire(num, owner):
            return
        if self._places.num_waiting >= self._max_queue:
            if not self._max_queue and self._places.is_at_limit(num, owner):
                raise QuotaExceeded("generations at once", "--owner-max-running", self._places.owner_size)
            refused = CapacityExhausted(
                f"{self._places.num_taken} generations are running and the queue is full; try again soon"
            )
            if not self._places.displace(owner, refused):
                raise refused
        try:
            async with asyncio.timeout(self._max_wait_s or None):
                await self._places.acquire(num, owner)
        except TimeoutError as exc:
            raise QueueTimeout(f"no free place within {self._max_wait_s:g} s; try again later") from exc
