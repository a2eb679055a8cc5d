"""Operations on sessions: each is brought to its end whoever still waits, and only then is its session free again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import Draining, SessionFailed
from holdfast.observability.metrics import Metrics
from holdfast.sessions.ports import Backend
from holdfast.sessions.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")

Conclude = Callable[[int], Coroutine[Any, Any, None]]  # learns the backend's length once the work is over


class Operations:
    """On one event loop. Sessions come in entered and awake."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._is_draining = False
        self._num_running = 0
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        self._settling: set[asyncio.Task[None]] = set()

    def check_open(self) -> None:
        if self._is_draining:
            raise Draining("the server is shutting down; try another one")

    def begin(self) -> None:
        self._num_running += 1
        self._all_idle.clear()

    def end(self, session: Session) -> None:
        session.leave()
        self.finish()

    def finish(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._all_idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new, wait for what runs. False where something still ran at the end."""
        self._is_draining = True
        if not self._num_running:
            return True
        try:
            await asyncio.wait_for(self._all_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def carry_out(self, session: Session, work: Coroutine[Any, Any, T], conclude: Conclude) -> T:
        """The result of `work`. A caller who leaves cancels it; `conclude` learns in any case what came of it."""
        task = asyncio.ensure_future(work)

        async def ending() -> None:
            await asyncio.gather(task, return_exceptions=True)
            if not session.gate.is_closed:
                await conclude(self._backend.view(live(session)).history_length)

        try:
            await asyncio.shield(self.settle(session, ending()))
        except asyncio.CancelledError:
            task.cancel()
            raise
        return await task

    def settle(self, session: Session, ending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Bring an operation to its end whoever still waits; only then is the session free again."""

        async def settle() -> None:
            try:
                await ending
                if not session.gate.is_closed:
                    self._check(session)
            finally:
                self.end(session)

        task = asyncio.ensure_future(settle())
        self._settling.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: "asyncio.Task[None]") -> None:
        self._settling.discard(task)
        if not task.cancelled() and (exc := task.exception()):  # whoever still waits for it is told, too
            logger.warning("an operation ended badly: %s", exc)

    def _check(self, session: Session) -> None:
        view = self._backend.view(live(session))
        if view.failure and not session.failure:
            session.failure = view.failure
            for kind in ("inv1", "inv2"):
                if getattr(view, f"{kind}_violations"):
                    self._metrics.invariant_violations.labels(kind).inc()
        try:
            session.check(view.history_length)
        except SessionFailed:
            self._metrics.invariant_violations.labels("inv1").inc()
            raise


def live(session: Session) -> int:
    """The handle of a session that was entered, and so is awake."""
    assert session.handle is not None
    return session.handle
