"""Which sessions are in memory: read from the journal when they are asked for, put to rest when others need the room.

A session that rests is in the journal alone, perhaps with a snapshot. Without a journal all sessions are in memory.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.errors import (
    Draining,
    Fenced,
    HoldfastError,
    RecordUncertain,
    SessionElsewhere,
    SessionNotFound,
)
from holdfast.metrics import Metrics
from holdfast.sessions.capacity import SlabCapacity
from holdfast.sessions.journal.base import Journal, SessionClosed, SessionRested, StoredSession
from holdfast.sessions.ports import Backend
from holdfast.sessions.session import Session, SessionRegistry, restored, without_gap
from holdfast.sessions.watch import Watch

logger = logging.getLogger(__name__)

_now = time.time

# Called in a thread with a session that was read; what it returns is called on the event loop when that is in memory.
OnLoaded = Callable[[StoredSession], Callable[[], None]]

_LOADS_AT_ONCE = 8  # each holds a whole session that is not yet counted
_RESTED_AT_ONCE = 256  # sessions in one commit
_EXPIRED_AT_ONCE = 256
_LOOK_S = 0.02  # how often it is looked whether a session is free by now

NOT_OURS = (RecordUncertain, SessionElsewhere, Fenced)  # what is in memory may not be what is on record


class Residence:
    """On one event loop. `on_left` learns the id of each session that is in memory no more."""

    def __init__(
        self,
        registry: SessionRegistry,
        journal: Journal,
        backend: Backend,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        watch: Watch,
        on_loaded: OnLoaded,
        on_left: Callable[[str], None],
    ) -> None:
        self.capacity: SlabCapacity
        self._registry = registry
        self._journal = journal
        self._backend = backend
        self._metrics = metrics
        self._clock = clock
        self._watch = watch
        self._on_loaded = on_loaded
        self._on_left = on_left
        self._loads = asyncio.Semaphore(_LOADS_AT_ONCE)
        self._loading: dict[tuple[str, str], asyncio.Future[None]] = {}  # by session and owner
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_closing = False
        self._started_at = _now()

    @contextlib.asynccontextmanager
    async def using(self, session_id: str, owner: str) -> AsyncIterator[None]:
        """The owner's session is in memory for as long as the context lasts. Raises SessionNotFound, or
        SessionElsewhere where another member of the cluster owns it."""
        with self.held(await self._found(session_id, owner)):
            yield

    @contextlib.contextmanager
    def held(self, session: Session) -> Iterator[None]:
        """A session in memory stays there."""
        session.num_users += 1
        try:
            yield
        finally:
            session.num_users -= 1
            self.capacity.left()

    async def _found(self, session_id: str, owner: str) -> Session:
        while True:
            if (leaving := self._leaving.get(session_id)) is not None:
                await asyncio.wait([leaving])
                continue
            if (session := self._registry.find(session_id, owner)) is not None:
                return session
            if not self._journal.keeps_bodies:
                raise SessionNotFound(session_id)
            key = (session_id, owner)
            if key not in self._loading:  # of several who ask at once, one reads it
                self._loading[key] = self._task(self._load(session_id, owner))
                self._loading[key].add_done_callback(partial(self._loaded, key))
            await asyncio.shield(self._loading[key])

    def _loaded(self, key: tuple[str, str], loading: "asyncio.Future[None]") -> None:
        del self._loading[key]

    async def _load(self, session_id: str, owner: str) -> None:
        started = time.perf_counter()
        if self._is_closing:
            raise Draining
        async with self.capacity.parked_place(), self._loads:
            try:
                stored = without_gap(await self._journal.acquire(session_id, owner))
            except SessionNotFound as gone:
                if gone.detail != "unknown":
                    self._registry.remember(session_id, owner, gone.detail)
                raise
            if stored.failure:
                logger.error("session %s: %s", session_id, stored.failure)
            if stored.opened.kind == "forest":
                await self.capacity.find(session_id)
            session, on_recorded = await asyncio.to_thread(self._rebuilt, stored)  # long ones take a while
            self._registry.add_parked(session)
            on_recorded()
        self._watch.changed(session)
        self._metrics.session_total.labels("loaded").inc()
        self._metrics.session_load.observe(time.perf_counter() - started)

    def _rebuilt(self, stored: StoredSession) -> tuple[Session, Callable[[], None]]:
        return restored(stored, self._clock), self._on_loaded(stored)

    async def rest(self, sessions: Sequence[Session]) -> None:
        """Let idle sessions leave the memory. Raises JournalFailed where that cannot be noted: they stay, parked."""
        if not sessions:
            return
        leaving = [cache for session in sessions for cache in self._registry.caches_of(session.id)]
        leaving = [*sessions, *(cache for cache in leaving if not cache.is_leaving)]
        task = self._task(self._rest(sessions, leaving))
        for session in leaving:
            session.is_leaving = True
            self._leaving[session.id] = task
        await asyncio.shield(task)

    async def _rest(self, sessions: Sequence[Session], leaving: Sequence[Session]) -> None:
        try:
            for session in leaving:
                if session.parking is not None:
                    await asyncio.gather(asyncio.shield(session.parking), return_exceptions=True)
                if session.handle is not None and not session.gate.is_closed:  # its forest may drop a cache meanwhile
                    await self.capacity.park(session)
            await self.capacity.share([session.id for session in sessions])  # before others may have them
            await self._note_rested([session for session in sessions if session.is_kept])
            for session in leaving:
                if not session.gate.is_closed:
                    self._leave(session, "rested")
        finally:
            for session in leaving:
                session.is_leaving = False
                self._leaving.pop(session.id, None)

    async def _note_rested(self, sessions: Sequence[Session]) -> None:
        if not sessions:
            return
        now = _now()
        try:
            await self._journal.write(*(SessionRested(s.id, now - s.idle_s, s.summary) for s in sessions))
            await self._journal.release([session.id for session in sessions])
        except NOT_OURS:  # what is not ours may go all the same, but the others are to be noted
            if len(sessions) > 1:
                for session in sessions:
                    await self._note_rested([session])

    def _leave(self, session: Session, why: str) -> None:
        self._registry.discard(session)
        self._on_left(session.id)
        self._watch.left(session, is_moved=self._journal.members is not None)
        if session.is_kept:
            self._metrics.session_total.labels(why).inc()

    def drop(self, session: Session, error: HoldfastError) -> None:
        """Forget a session of which the journal may know something else; whoever uses it gets the error. The next
        request reads it again."""
        if session.gate.is_closed:
            return
        caches = self._registry.caches_of(session.id)
        self.closing(session.id, self._task(self._written(session)))
        for one in (session, *caches):
            if one.gate.is_closed:
                continue
            one.dropped = error
            self._leave(one, "dropped")
            if one.handle is not None:
                self.capacity.begin_closing()
                self._task(self._free(one))

    async def _written(self, session: Session) -> None:
        """What others write of the session is on record: only then it may be read again."""
        while session.num_writes:  # noqa: ASYNC110 - seldom, and for a moment
            await asyncio.sleep(_LOOK_S)

    async def _free(self, session: Session) -> None:
        """Free the slab of a session that was dropped."""
        try:
            if session.parking is not None:
                await asyncio.gather(asyncio.shield(session.parking), return_exceptions=True)
            if session.handle is not None:
                await self._backend.close(session.handle)
        finally:
            self.capacity.finish_closing()

    def closing(self, session_id: str, work: "asyncio.Future[None]") -> None:
        """While `work` closes the session for good, whoever asks for it waits."""
        self._leaving[session_id] = work
        work.add_done_callback(lambda _: self._leaving.pop(session_id, None))

    async def hand_over(self, timeout_s: float) -> None:
        """Put all sessions to rest as soon as nobody uses them, and load none from now on. What is in use after
        `timeout_s` is dropped. Afterwards no session is in memory."""
        self._is_closing = True
        deadline = self._clock() + timeout_s
        while sessions := [session for session in self._registry if session.is_kept]:
            free = [session for session in sessions if self._registry.may_go(session)][:_RESTED_AT_ONCE]
            is_late = self._clock() >= deadline
            try:
                await self.rest(free)
            except HoldfastError as exc:  # nothing is lost: all of it is on record
                logger.warning("%d sessions leave the memory without a note in the journal: %s", len(free), exc)
                is_late = True
            for session in sessions:
                if not session.is_leaving and (is_late or (session.failure and session.is_idle)):
                    self.drop(session, Draining())
            if not free:
                await asyncio.sleep(_LOOK_S)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.capacity.spill()

    async def expire(self, idle_s: float) -> None:
        """Close sessions that have rested for so long; those that a crash left count from when this server started."""
        now = _now()
        if not self._journal.keeps_bodies or self._started_at > now - idle_s:
            return
        limit = len(self._registry) + _EXPIRED_AT_ONCE
        for session_id, owner in await self._journal.rested(now - idle_s, limit):
            is_here = session_id in self._leaving or (session_id, owner) in self._loading
            with contextlib.suppress(SessionNotFound, SessionElsewhere):
                if not is_here and self._registry.find(session_id, owner) is None:
                    task = self._task(self._expire(session_id, owner))
                    self.closing(session_id, task)
                    await asyncio.shield(task)

    async def _expire(self, session_id: str, owner: str) -> None:
        session = restored(replace(await self._journal.acquire(session_id, owner), steps=()), self._clock)
        await self._journal.write(SessionClosed(session_id, "expired", _now()))
        self._registry.remember(session_id, owner, "expired")
        self._metrics.session_total.labels("expired").inc()
        await self.capacity.forget(session)

    def _task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it
