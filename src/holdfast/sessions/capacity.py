"""Slabs for sessions: who gets one, who is parked to make room, and who is given up where no more may be parked.

A parked session keeps its tokens but no slab. Its snapshot is a shortcut: where that is gone, damaged or of another
model, the history is computed again.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from holdfast.errors import CapacityExhausted, SnapshotMismatch
from holdfast.metrics import Metrics
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.ports import Backend
from holdfast.sessions.session import Session, SessionRegistry
from holdfast.sessions.watch import Watch

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0  # for a request to end, where all sessions are in use


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

    async def share(self, session_ids: Sequence[str]) -> None:
        """Other servers may own these sessions next: their snapshots go where those reach them, if there is a place."""
        if self._snapshots is not None and self._snapshots.is_shared:
            await asyncio.to_thread(self._snapshots.share, session_ids)

    async def find(self, session_id: str) -> None:
        """Look up the snapshots of a forest's conversations that another server has left."""
        if self._snapshots is not None and self._snapshots.is_shared:
            await asyncio.to_thread(self._snapshots.find, conversation_snapshot(session_id, ""))

    async def spill(self) -> None:
        """Bring to disk what is in memory, for a shutdown."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.spill)


def conversation_snapshot(session_id: str, turn: int | str) -> str:
    """Names the snapshot of a conversation of a forest at the end of a turn."""
    return f"{session_id}t{turn}"


GiveUp = Callable[[Session], Awaitable[object]]


class SlabCapacity:
    """`give_up` takes an idle session out of memory: to rest in the journal (`is_kept_elsewhere`), or for good."""

    def __init__(
        self,
        registry: SessionRegistry,
        parking: Parking,
        give_up: GiveUp,
        *,
        max_parked: int,
        watch: Watch,
        is_kept_elsewhere: bool = False,
    ) -> None:
        self._registry = registry
        self._parking = parking
        self._give_up = give_up
        self._watch = watch
        self._max_parked = max_parked
        self._is_kept_elsewhere = is_kept_elsewhere
        self._num_coming = 0  # sessions that have a place among the parked, but are not there yet
        self._num_closing = 0
        self._has_closed = asyncio.Event()
        self._has_left = asyncio.Event()

    def begin_closing(self) -> None:
        """A session was removed, but the backend still has its slab: its place stays taken until `finish_closing`."""
        self._registry.hold_place()
        self._num_closing += 1

    def finish_closing(self) -> None:
        self._registry.release_place()
        self._num_closing -= 1
        self._has_closed.set()

    def left(self) -> None:
        """A request does not need its session any more."""
        self._has_left.set()

    async def opened(self, opening: Callable[[], Coroutine[Any, Any, int]], *, may_evict: bool) -> int:
        """What `opening` gives, once there is room. The place stays claimed: `SessionRegistry.add` fills it."""
        await self._claim_place(may_evict=may_evict)
        try:
            return await opening()
        except BaseException:
            self._registry.release_place()
            raise

    @contextlib.asynccontextmanager
    async def parked_place(self, *, may_exceed: bool = False) -> AsyncIterator[None]:
        """Room for one more session that has no slab; it is to be registered before the context ends. `may_exceed`:
        a cache of a session that has a place does not wait where all others are in use."""
        patience = asyncio.get_running_loop().time() + _PATIENCE_S
        while self._registry.num_parked + self._num_coming >= max(self._max_parked, self._registry.capacity):
            if (longest := self._registry.longest_unused(is_parked=True)) is not None:
                await self._give_up(longest)
                continue
            if may_exceed:
                break
            self._has_left.clear()  # requests that are just ending still hold their sessions
            try:
                async with asyncio.timeout_at(patience):
                    await self._has_left.wait()
            except TimeoutError:
                raise CapacityExhausted("all parked sessions are busy; try again soon or raise --max-parked") from None
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    async def wake(self, session: Session) -> None:
        """A slab for a parked session that the caller has claimed."""
        await self._claim_place(may_evict=True)
        try:
            session.recomputed_tokens = await self._parking.wake(session)
        finally:
            self._registry.release_place()
        self._watch.changed(session)

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
            self._watch.changed(session)

    async def share(self, session_ids: Sequence[str]) -> None:
        """Other servers may own these sessions next."""
        await self._parking.share(session_ids)

    async def find(self, session_id: str) -> None:
        """Look up the snapshots of a forest's conversations that another server has left."""
        await self._parking.find(session_id)

    async def spill(self) -> None:
        """For a shutdown: all snapshots go where the next process finds them."""
        await self._parking.spill()

    def has_snapshot(self, snapshot_id: str) -> bool:
        return self._parking.has_snapshot(snapshot_id)

    async def forget(self, session: Session) -> None:
        """Nobody will wake it any more."""
        await self._parking.forget(session)

    async def _claim_place(self, *, may_evict: bool) -> None:
        """Reserve a slab. Where all are taken an idle session is parked, or given up, but not where another one is
        about to be gone. After every wait all is looked at anew."""
        while True:
            while self._registry.is_full and self._num_closing:
                self._has_closed.clear()
                await self._has_closed.wait()
            if not self._registry.is_full or self._registry.num_parked < self._max_parked:
                break
            self._registry.longest_live()  # which raises where all are busy
            if not (may_evict or self._is_kept_elsewhere):
                raise CapacityExhausted(
                    "all session slots are in use; close a session, or raise --sessions or --max-parked"
                )
            longest = self._registry.longest_unused(is_parked=True) if self._max_parked else None
            longest = longest or self._registry.longest_unused(is_parked=False)
            if longest is None:  # requests hold them all: they are parked, though these are too many
                break
            await self._give_up(longest)
        victim = self._registry.claim_place()
        if victim is not None:
            try:
                await self.park(victim)
            except BaseException:
                self._registry.release_place()
                raise
