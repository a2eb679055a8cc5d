"""Slabs for sessions: who gets one, who is parked for it, and who must go where no more may be parked."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from holdfast.errors import CapacityExhausted
from holdfast.observability.metrics import Metrics
from holdfast.sessions.parking import Parking
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.session import Session

Remove = Callable[[Session, str], Awaitable[object]]


class SlabCapacity:
    """`remove` takes a session out for good, and says why."""

    def __init__(
        self, store: SessionRegistry, parking: Parking, remove: Remove, *, max_parked: int, metrics: Metrics
    ) -> None:
        self._store = store
        self._parking = parking
        self._remove = remove
        self._max_parked = max_parked
        self._metrics = metrics

    async def opened(self, opening: Callable[[], Coroutine[Any, Any, int]], *, may_evict: bool) -> int:
        """What `opening` gives, once there is room. The place stays claimed: `Store.add` fills it."""
        victim = self._store.claim_place()
        try:
            await self._make_room(victim, may_evict=may_evict)
            return await opening()
        except BaseException:
            self._store.release_place()
            raise

    async def wake(self, session: Session) -> None:
        """A slab for a parked session whose gate is ours."""
        victim = self._store.claim_place()
        try:
            await self._make_room(victim, may_evict=True)
            session.recomputed_tokens = await self._parking.wake(session)
        finally:
            self._store.release_place()

    async def admit(self, session: Session, content: bytes | None) -> None:
        """A slab for a session from elsewhere, filled from its snapshot where that fits, and a place in the store."""
        session.recomputed_tokens = await self.opened(lambda: self._parking.revive(session, content), may_evict=True)
        self._store.add(session)

    async def snapshot_of(self, session: Session) -> bytes | None:
        """The cache of a session whose gate is ours, awake or not, where there is a snapshot to be had."""
        return await self._parking.snapshot_of(session)

    async def park(self, session: Session) -> None:
        session.parking = asyncio.ensure_future(self._parking.park(session))
        try:
            await asyncio.shield(session.parking)
        finally:
            session.parking = None

    async def park_all(self) -> None:
        """For a shutdown: all caches that are worth it go where the next process finds them."""
        for session in self._store:
            if session.handle is not None and session.is_kept and not session.is_busy and not session.failure:
                await self.park(session)
        await self._parking.spill()

    async def forget(self, session: Session) -> None:
        """Nobody will wake it any more."""
        await self._parking.forget(session)

    async def _make_room(self, victim: Session | None, *, may_evict: bool) -> None:
        if victim is None:
            return
        if self._store.num_parked < self._max_parked:
            await self.park(victim)
            return
        if not may_evict:
            raise CapacityExhausted("sessions hold all places; close one, or raise --sessions or --max-parked")
        longest = self._store.longest_parked() if self._max_parked else None
        self._metrics.session_evicted.labels("capacity").inc()
        await self._remove(longest or victim, "evicted")
        if longest is not None:
            await self.park(victim)
