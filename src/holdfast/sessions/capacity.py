"""Slabs for sessions: who gets one, who is parked to make room, and who is evicted where no more may be parked.

A parked session keeps its tokens but no slab. Its snapshot is a shortcut: where that is gone, damaged or of another
model, the history is computed again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from holdfast.errors import CapacityExhausted, SnapshotMismatch
from holdfast.metrics import Metrics
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.ports import Backend
from holdfast.sessions.session import Session, SessionRegistry

logger = logging.getLogger(__name__)


class Parking:
    def __init__(self, backend: Backend, snapshots: SnapshotStore | None, metrics: Metrics) -> None:
        self._backend = backend
        self._snapshots = snapshots
        self._metrics = metrics

    async def park(self, session: Session) -> None:
        """Free the session's slab. Nobody else may use the session meanwhile."""
        handle = session.handle
        assert handle is not None
        wants = self._snapshots is not None and len(session.history) > 0
        content = await self._backend.snapshot(handle) if wants else None
        if content is not None and self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.put, session.snapshot_id, content)
        session.handle = None
        await self._backend.close(handle)

    async def wake(self, session: Session) -> int:
        """Give the session a slab again, for which there must be room; how many tokens were computed for it."""
        recomputed = await self.revive(session, await self.snapshot_of(session))
        if len(session.history):
            self._metrics.session_woken.labels("recomputed" if recomputed else "snapshot").inc()
        return recomputed

    async def revive(self, session: Session, content: bytes | None) -> int:
        """The same from a given snapshot, or without one."""
        tokens = session.history.tokens
        if not tokens:
            session.handle = await self._backend.open(sink=session.sink)
            return 0
        if content is not None:
            try:
                session.handle = await self._backend.restore(content, tokens)
                return 0
            except SnapshotMismatch as exc:
                logger.warning("the history of session %s is computed again: %s", session.id, exc)
        handle = await self._backend.open(sink=session.sink)
        try:
            await self._backend.append(handle, tokens)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._backend.close(handle)))
            raise
        session.handle = handle
        return len(tokens)

    async def snapshot_of(self, session: Session) -> bytes | None:
        """What its cache is at this moment, or was when it was parked. Nobody else may use the session meanwhile."""
        if not len(session.history):
            return None
        if session.handle is not None:
            return await self._backend.snapshot(session.handle)
        return None if self._snapshots is None else await asyncio.to_thread(self._snapshots.get, session.snapshot_id)

    async def forget(self, session: Session) -> None:
        """Nobody will ask for its snapshot any more."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.delete, session.snapshot_id)
            if session.kind == "forest":
                await asyncio.to_thread(self._snapshots.delete_all, conversation_snapshot(session.id, ""))

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._snapshots is not None and snapshot_id in self._snapshots

    async def spill(self) -> None:
        """Bring to disk what is in memory, for a shutdown."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.spill)


def conversation_snapshot(session_id: str, turn: int | str) -> str:
    """Names the snapshot of a conversation of a forest at the end of a turn."""
    return f"{session_id}t{turn}"


Remove = Callable[[Session, str], Awaitable[object]]


class SlabCapacity:
    """`remove` takes a session out for good, and says why."""

    def __init__(
        self, registry: SessionRegistry, parking: Parking, remove: Remove, *, max_parked: int, metrics: Metrics
    ) -> None:
        self._registry = registry
        self._parking = parking
        self._remove = remove
        self._max_parked = max_parked
        self._metrics = metrics
        self._num_closing = 0
        self._has_closed = asyncio.Event()

    def begin_closing(self) -> None:
        """A session was removed, but the backend still has its slab: its place stays taken until `finish_closing`."""
        self._registry.hold_place()
        self._num_closing += 1

    def finish_closing(self) -> None:
        self._registry.release_place()
        self._num_closing -= 1
        self._has_closed.set()

    async def opened(self, opening: Callable[[], Coroutine[Any, Any, int]], *, may_evict: bool) -> int:
        """What `opening` gives, once there is room. The place stays claimed: `SessionRegistry.add` fills it."""
        victim = await self._claimed_place()
        try:
            await self._make_room(victim, may_evict=may_evict)
            return await opening()
        except BaseException:
            self._registry.release_place()
            raise

    async def make_parked_room(self) -> None:
        """Room for one more session that has no slab."""
        if self._registry.num_parked >= max(self._max_parked, self._registry.capacity):
            longest = self._registry.longest_parked()
            if longest is None:
                raise CapacityExhausted("all parked sessions are busy; try again soon or raise --max-parked")
            self._metrics.session_evicted.labels("capacity").inc()
            await self._remove(longest, "evicted")

    async def wake(self, session: Session) -> None:
        """A slab for a parked session that the caller has claimed."""
        victim = await self._claimed_place()
        try:
            await self._make_room(victim, may_evict=True)
            session.recomputed_tokens = await self._parking.wake(session)
        finally:
            self._registry.release_place()

    async def admit(self, session: Session, content: bytes | None) -> None:
        """A slab for a session from elsewhere, filled from its snapshot where that fits, and a place in the store."""
        session.recomputed_tokens = await self.opened(lambda: self._parking.revive(session, content), may_evict=True)
        self._registry.add(session)

    async def snapshot_of(self, session: Session) -> bytes | None:
        """The cache of a session that the caller has claimed, live or parked; None where there is no snapshot."""
        return await self._parking.snapshot_of(session)

    async def park(self, session: Session) -> None:
        session.parking = asyncio.ensure_future(self._parking.park(session))
        try:
            await asyncio.shield(session.parking)
        finally:
            session.parking = None

    async def park_all(self) -> None:
        """For a shutdown: all caches that are worth it go where the next process finds them."""
        for session in self._registry:
            is_kept = session.is_kept or session.cache_of
            if session.handle is not None and is_kept and not session.is_busy and not session.failure:
                await self.park(session)
        await self._parking.spill()

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._parking.has_snapshot(snapshot_id)

    async def forget(self, session: Session) -> None:
        """Nobody will wake it any more."""
        await self._parking.forget(session)

    async def _claimed_place(self) -> Session | None:
        """As `SessionRegistry.claim_place`, but no session has to make room where another one is about to be gone."""
        while self._registry.is_full and self._num_closing:
            self._has_closed.clear()
            await self._has_closed.wait()
        return self._registry.claim_place()

    async def _make_room(self, victim: Session | None, *, may_evict: bool) -> None:
        if victim is None:
            return
        if self._registry.num_parked < self._max_parked:
            await self.park(victim)
            return
        if not may_evict:
            raise CapacityExhausted(
                "all session slots are in use; close a session, or raise --sessions or --max-parked"
            )
        longest = self._registry.longest_parked() if self._max_parked else None
        self._metrics.session_evicted.labels("capacity").inc()
        await self._remove(longest or victim, "evicted")
        if longest is not None:
            await self.park(victim)
