"""Sessions without a slab: how their keys and values leave it, and how they come back.

A parked session keeps its tokens. Its snapshot is a shortcut: where it is gone, damaged or of another model, the
history is computed again.
"""

import asyncio
import logging

from holdfast.errors import SnapshotMismatch
from holdfast.observability.metrics import Metrics
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.ports import Backend
from holdfast.sessions.session import Session

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
            await asyncio.to_thread(self._snapshots.put, session.id, content)
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
                logger.warning("session %s is computed again: %s", session.id, exc)
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
        return None if self._snapshots is None else await asyncio.to_thread(self._snapshots.get, session.id)

    async def forget(self, session: Session) -> None:
        """Nobody will ask for its snapshot any more."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.delete, session.id)

    async def spill(self) -> None:
        """Bring to disk what is in memory, for a shutdown."""
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.spill)
