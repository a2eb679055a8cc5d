"""The one thread that writes to the journal: everything queued becomes one commit. If it cannot keep up, callers wait.

Knows nothing of databases: `commit` is whatever brings entries to disk.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import SessionElsewhere, StorageUnavailable
from holdfast.sessions.admission import FairSemaphore
from holdfast.sessions.journal.base import Entry, num_bytes

logger = logging.getLogger(__name__)

_MAX_BATCH = 256


class Write(NamedTuple):
    """Entries that belong together. `conclude` gets an exception, or None, on the event loop; notes have none."""

    entries: Sequence[Entry]
    conclude: Callable[[Exception | None], None] | None


Commit = Callable[[Sequence[Sequence[Entry]]], "list[Exception | None]"]


class JournalWriter:
    """`commit` runs in the thread and says for each write what came of it; `check` runs there every `check_s` while
    nothing is written, so that it is known whether writing works before anyone tries."""

    def __init__(
        self,
        commit: Commit,
        *,
        check: Callable[[], None],
        max_queued_bytes: int,
        note_delay_s: float,
        check_s: float,
    ) -> None:
        self._commit = commit
        self._check = check
        self._note_delay_s = note_delay_s
        self._check_s = check_s
        self._room = FairSemaphore(max_queued_bytes)  # bytes; an entry larger than all of it has it to itself
        self._inbox: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._notes: deque[Write] = deque()
        self._reminder: asyncio.TimerHandle | None = None  # of notes that nothing else was written with
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
        self._thread.start()

    async def write(self, entries: Sequence[Entry]) -> None:
        """Returns when the entries are on disk. On one event loop."""
        size = min(sum(map(num_bytes, entries)), self._room.size)
        await self._room.acquire(size)
        if self._is_closed:
            self._room.release(size)
            raise _closed()
        self._loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = self._loop.create_future()

        def conclude(exc: Exception | None) -> None:
            self._room.release(size)  # the caller may have left; the bytes were held until now
            if written.cancelled():
                return
            if exc is None:
                written.set_result(None)
            else:
                written.set_exception(exc)

        self._inbox.put(Write(entries, conclude))
        await written

    def note(self, entries: Sequence[Entry]) -> None:
        """Written along with the next write, or soon. The thread is not woken for it. On one event loop."""
        if self._is_closed:
            raise _closed()
        self._notes.append(Write(entries, None))
        if self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(self._note_delay_s, self._remind)

    def _remind(self) -> None:
        self._reminder = None
        if self._notes:
            self._inbox.put(Write((), None))

    async def close(self) -> bool:
        """Write what is queued, then end. False where that was done before."""
        if self._is_closed:
            return False
        self._is_closed = True
        if self._reminder is not None:
            self._reminder.cancel()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        return True

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take()
            if not batch:
                continue
            try:
                outcomes = self._commit([write.entries for write in batch])
            except Exception as exc:  # without this thread every writer would wait for ever
                logger.exception("the journal failed unexpectedly")
                outcomes = [exc] * len(batch)
            self._tell(batch, outcomes)

    def _tell(self, batch: Sequence[Write], outcomes: Sequence[Exception | None]) -> None:
        """Wake all callers that wait for this commit, with one call into the event loop."""
        told = []
        for write, outcome in zip(batch, outcomes, strict=True):
            if write.conclude is not None:
                told.append((write.conclude, outcome))
            elif outcome is not None and not isinstance(outcome, SessionElsewhere):  # what is known of it is there
                logger.warning("the journal lost %d notes: %s", len(write.entries), outcome)
        if told and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_conclude, told)

    def _take(self) -> tuple[list[Write], bool]:
        """What is there, at least one write or note, and whether there may be more."""
        batch: list[Write] = []
        is_open = True
        while is_open and len(batch) < _MAX_BATCH:
            try:
                item = self._inbox.get_nowait() if batch else self._inbox.get(timeout=self._check_s)
            except queue.Empty:
                if batch:
                    break
                self._check()
                continue
            if item is None:
                is_open = False
            else:
                batch.append(item)
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        return notes + batch, is_open  # a note tells of what is on record, and a write may release its session


def _conclude(told: Sequence[tuple[Callable[[Exception | None], None], Exception | None]]) -> None:
    for conclude, outcome in told:
        conclude(outcome)


def _closed() -> StorageUnavailable:
    return StorageUnavailable("the journal is closed")
