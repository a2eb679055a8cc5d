"""Grammars compiled in few threads of their own: owners take turns, and a client that leaves takes its work with it.

On one event loop. Compiling a hostile schema takes seconds, so nothing else may wait for these threads.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

from holdfast.chat.grammar import Compilation, Grammars, Trial
from holdfast.errors import CapacityExhausted, QueueTimeout
from holdfast.generation import Constraint

_NUM_THREADS, _MAX_RUNNING = 3, 2  # grammars that are compiled at the same time: of all owners, of one
_MAX_QUEUE, _MAX_WAITING = 256, 32  # that wait: of all owners, of one
_MAX_WAIT_S = 30.0


class GrammarQueue:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first
        self._jobs: dict[str, _Job] = {}  # by the text of the grammar

    async def compiled(self, owner: str, compilation: Compilation) -> Constraint:
        """The compiled grammar. Equal grammars are compiled once; when nobody waits for one any more, it is dropped.

        CapacityExhausted if too many are waiting.
        """
        if kept := self._grammars.kept(compilation):
            return kept
        key = compilation.grammar
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(asyncio.ensure_future(self._run(owner, compilation)))
        job.num_callers += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.num_callers -= 1
            if not job.num_callers and self._jobs.get(key) is job:
                del self._jobs[key]
                job.task.cancel()

    async def _run(self, owner: str, compilation: Compilation) -> Constraint:
        await self._enter(owner)
        trial = Trial(owner)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, self._grammars.compiled, compilation, trial)
        running.add_done_callback(lambda ended: self._leave(owner, ended))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            trial.cancel()
            raise

    async def _enter(self, owner: str) -> None:
        waiting = self._waiting.get(owner, deque())
        if len(waiting) >= _MAX_WAITING or sum(map(len, self._waiting.values())) >= _MAX_QUEUE:
            raise CapacityExhausted("too many schemas are waiting to be compiled; try again soon")
        place = asyncio.get_running_loop().create_future()
        waiting.append(place)
        self._waiting[owner] = waiting
        self._admit()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await place
        except (asyncio.CancelledError, TimeoutError) as exc:
            if not place.cancelled():  # admitted at the same moment
                self._leave(owner)
            elif place in waiting:
                waiting.remove(place)
                if not waiting:
                    del self._waiting[owner]
            if isinstance(exc, TimeoutError):
                raise QueueTimeout(f"the schema was not compiled within {_MAX_WAIT_S:g} s; try again later") from exc
            raise

    def _leave(self, owner: str, ended: "asyncio.Future[Constraint] | None" = None) -> None:
        if ended is not None and not ended.cancelled():
            ended.exception()  # whoever waited for it may be gone
        self._running -= Counter([owner])
        self._admit()

    def _admit(self) -> None:
        """Give the free places to those who wait, one owner after the other."""
        while self._running.total() < _NUM_THREADS:
            owner = next((name for name in self._waiting if self._running[name] < _MAX_RUNNING), None)
            if owner is None:
                return
            self._waiting.move_to_end(owner)
            place = self._waiting[owner].popleft()
            if not place.cancelled():
                self._running[owner] += 1
                place.set_result(None)
            if not self._waiting[owner]:
                del self._waiting[owner]


class _Job:
    def __init__(self, task: "asyncio.Task[Constraint]") -> None:
        self.task = task
        self.num_callers = 0
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
