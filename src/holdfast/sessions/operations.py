"""Operations on one claimed session. Each runs to its end even if its caller is cancelled; then the session is free."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.errors import (
    Draining,
    Fenced,
    HistoryConflict,
    HoldfastError,
    InvalidArgument,
    JournalFailed,
    RecordUncertain,
    SessionElsewhere,
    SessionFailed,
)
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from holdfast.metrics import Metrics
from holdfast.sessions.capacity import SlabCapacity
from holdfast.sessions.history import PLAIN, GenerationRecord, GivenTokens
from holdfast.sessions.journal.base import (
    Entry,
    HistoryRewound,
    Journal,
    Pinned,
    SessionKind,
    SessionOpened,
    recorded_bytes,
)
from holdfast.sessions.ports import Backend, EventStream
from holdfast.sessions.quotas import OwnerQuotas
from holdfast.sessions.record import TurnRecord, View
from holdfast.sessions.session import Session, opened
from holdfast.sessions.watch import Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

Conclude = Callable[[int], Coroutine[Any, Any, None]]  # gets the backend's length once the work is over


@dataclass(frozen=True, slots=True)
class RewindResult:
    history_length: int
    recomputed_tokens: int


class Operations:
    """What operations share, and how many run: a server that drains waits for them. On one event loop.

    `drop` forgets a session of which the journal may have something else on record than is in memory.
    """

    def __init__(
        self,
        backend: Backend,
        capacity: SlabCapacity,
        journal: Journal,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        quotas: OwnerQuotas,
        watch: Watch,
        drop: Callable[[Session, HoldfastError], None],
        max_reply_tokens: int = 0,
    ) -> None:
        self.backend = backend
        self._drop = drop
        self.capacity = capacity
        self.journal = journal
        self.metrics = metrics
        self.clock = clock
        self.quotas = quotas
        self.watch = watch
        self.max_reply_tokens = max_reply_tokens  # 0: no limit
        self._is_draining = False
        self._num_running = 0
        self._all_idle = asyncio.Event()
        self._all_idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def check_open(self) -> None:
        if self._is_draining:
            raise Draining

    def begin(self) -> None:
        self._num_running += 1
        self._all_idle.clear()

    def finish(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._all_idle.set()

    async def record(self, session: Session, *entries: Entry) -> None:
        """Write entries to the journal, if the session is journaled, and count their bytes for its owner.

        A session that is not ours any more, or of which it is not known what is on record, is dropped.
        """
        if not session.is_kept:
            return
        if session.dropped is not None:
            session.check_here()  # another copy of it may have been read since
        num_bytes = sum(map(recorded_bytes, entries))
        self.count_bytes(session, num_bytes)
        session.num_writes += 1
        try:
            try:
                await self.journal.write(*entries)
            except SessionElsewhere as exc:  # which is no advice where to send a request that was begun here
                raise JournalFailed(
                    f"member {exc.member} has taken over session {session.id}: nothing of this request was recorded; "
                    "send it again"
                ) from exc
        except HoldfastError as exc:  # nothing of it is on record
            self.count_bytes(session, -num_bytes)
            if isinstance(exc, RecordUncertain | Fenced) or isinstance(exc.__cause__, SessionElsewhere):
                self._drop(session, exc)
            raise
        finally:
            session.num_writes -= 1

    def count_bytes(self, session: Session, num_bytes: int) -> None:
        session.num_bytes += num_bytes
        self.quotas.num_bytes[session.owner] += num_bytes

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new and wait for what runs. False where something still ran at the end."""
        self._is_draining = True
        if not self._num_running:
            return True
        try:
            await asyncio.wait_for(self._all_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that goes on though its caller is cancelled; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()):  # a caller that still waits gets it too
            logger.warning("an operation failed: %s", exc)


class Claim:
    """One session that nobody else may write until it is released. Use it as a context, or call `release`."""

    def __init__(self, session: Session, operations: Operations, *, turn_id: str = "") -> None:
        """Claims at once. Raises where the session is closed, busy or failed."""
        session.enter(turn_id)
        operations.begin()
        operations.watch.changed(session)
        self.session = session
        self._operations = operations
        self._settling: asyncio.Task[None] | None = None  # the end of the operation that ran last

    @property
    def history_length(self) -> int:
        return len(self.session.history)

    def check(self, *, kind: SessionKind | None, expected_length: int | None) -> None:
        """Raises where the session is of another kind, or its history has another length."""
        if expected_length is not None and expected_length != self.history_length:
            raise HistoryConflict(expected=expected_length, actual=self.history_length)
        if kind is not None and kind != self.session.kind:
            raise InvalidArgument(f"session {self.session.id} {_USES[self.session.kind]}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        released = self._released()
        if released is not None and kind is not asyncio.CancelledError:  # a caller that was cancelled does not wait
            await asyncio.shield(released)

    async def release(self) -> None:
        """Free the session once everything begun on it has ended, even if the caller is cancelled meanwhile."""
        if (released := self._released()) is not None:
            await asyncio.shield(released)

    def _released(self) -> "asyncio.Task[None] | None":
        """Free the session now, or in a task once the last operation has ended."""
        if self._settling is None or self._settling.done():
            self.release_now()
            return None
        return self._operations.in_background(self._free_when_settled(self._settling))

    async def settled(self) -> None:
        """Returns when nothing that was begun still runs."""
        if self._settling is not None:
            await asyncio.gather(asyncio.shield(self._settling), return_exceptions=True)

    def release_now(self) -> None:
        """Free the session, on which nothing runs."""
        self.session.leave()
        self._operations.finish()
        self._operations.watch.changed(self.session)

    # Operations, one at a time

    def check_room(self) -> None:
        """Raises QuotaExceeded where the owner has as much on record as it may have."""
        if self.session.is_kept:
            self._operations.quotas.check_bytes(self.session.owner)

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """The parameters with `max_tokens` lowered to what one reply may have on this server."""
        limit = self._operations.max_reply_tokens
        return replace(params, max_tokens=limit) if 0 < limit < params.max_tokens else params

    async def append(self, tokens: Sequence[int]) -> Done:
        """Add given tokens and compute them. If the caller disconnects, the appended tokens stay."""
        self.check_room()
        session, before = self.session, self.history_length
        handle = await self.wake()

        async def conclude(backend_length: int) -> None:
            if backend_length == before + len(tokens):
                session.history.give(tokens)
                self._operations.watch.given(session, before, tokens)
                await self._record_since(before)

        return await self._carry_out(self._backend.append(handle, tokens), conclude)

    async def pin(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` in view from now on; only while the history is empty."""
        session = self.session
        self.check(kind=None, expected_length=0)
        handle = await self.wake()

        async def work() -> None:
            await self._backend.pin(handle, num_tokens)
            session.sink = num_tokens

        async def conclude(backend_length: int) -> None:
            if session.sink == num_tokens:
                await self.record(Pinned(session.id, num_tokens))

        await self._carry_out(work(), conclude)

    async def generate(
        self,
        params: SamplingParams,
        tokens: Sequence[int] = (),
        known: GivenTokens = PLAIN,
        *,
        view: View | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Append `tokens`, then sample. Yields batches of events; the last ends with Done, once all is on record.

        Close the generator to cancel; what was given and sampled until then stays.
        """
        self.check_room()
        params = self.bounded(params)
        handle = await self.wake()
        clock, metrics, watch = self._operations.clock, self._operations.metrics, self._operations.watch
        started = last = clock()
        record = GenerationRecord(self.session.history, tokens, known)
        stream: EventStream | None = None
        recording: asyncio.Task[None] | None = None
        try:
            stream = self._backend.generate(handle, params, tokens, view=view)
            await stream.__aenter__()
            async for batch in stream:
                now = clock()
                is_first = not record.num_sampled
                observe_batch(metrics, batch, now - (started if is_first else last), is_first=is_first)
                last = now
                self._take(record, batch)
                if is_first and record.num_sampled:
                    watch.began(now, now - started)
                if isinstance(batch[-1], Done):
                    recording = asyncio.ensure_future(self._record_since(record.start))
                    await asyncio.shield(recording)
                yield batch
        finally:
            await asyncio.shield(self._settle(self._end_generate(record, stream, recording)))

    async def _end_generate(
        self, record: GenerationRecord, stream: EventStream | None, recording: "asyncio.Task[None] | None"
    ) -> None:
        if stream is None:
            return
        await stream.__aexit__(None, None, None)
        rest = stream.rest()
        if rest:
            observe_batch(self._operations.metrics, rest, 0.0, is_first=False)
        if self.session.gate.is_closed:
            return
        if recording is not None:
            await asyncio.gather(recording, return_exceptions=True)
            return
        self._take(record, rest, backend_length=self._backend_length())
        if self.history_length > record.start:
            await self._record_since(record.start)

    def _take(self, record: GenerationRecord, batch: Sequence[Event], backend_length: int | None = None) -> None:
        """Take events into the history, and tell those who listen."""
        watch, before = self._operations.watch, self.history_length
        record.record(batch, backend_length=backend_length)
        if before == record.start < self.history_length:
            watch.given(self.session, before, record.tokens)
        watch.sampled(self.session, batch)

    async def adopt(
        self, given: Sequence[int], sampled: Sequence[Sampled], stop_reason: StopReason, known: GivenTokens = PLAIN
    ) -> None:
        """Take over a turn that was generated elsewhere: tokens that were given, then tokens that were sampled."""
        session, before = self.session, self.history_length
        tokens = [*given, *(token.token for token in sampled)]
        handle = await self.wake()

        async def conclude(backend_length: int) -> None:
            if backend_length == before + len(tokens):
                record = GenerationRecord(session.history, given, known)
                record.record(sampled, backend_length=backend_length)
                record.end(stop_reason)

        await self._carry_out(self._backend.append(handle, tokens), conclude)

    async def rewind(self, length: int, *, is_limited: bool = True) -> RewindResult:
        """Forget the tokens from `length` on."""
        session = self.session
        handle = await self.wake()

        async def conclude(backend_length: int) -> None:
            if backend_length != length:
                return
            try:
                if session.kind == "tokens":
                    await self.record(HistoryRewound(session.id, length))
            except HoldfastError:  # everything stays as it was: what was cut off is computed again
                if session.gate.is_closed:
                    raise
                await self._backend.append(handle, session.history.slice(length, self.history_length))
                raise
            session.history.rewind(length)
            session.num_rewinds += 1
            self._operations.watch.changed(session)

        work = self._backend.rewind(handle, length, is_limited=is_limited)
        return RewindResult(length, await self._carry_out(work, conclude))

    async def replace_history(self, length: int, turns: Sequence[TurnRecord], *, sink: int) -> None:
        """Let the history be its first `length` tokens and then `turns`, which were generated elsewhere. The session
        has no slab afterwards: one that wants it computes its history."""
        session = self.session
        if session.parking is not None:
            await asyncio.shield(session.parking)
        handle, session.handle = session.handle, None
        session.history.rewind(length)
        for turn in turns:
            session.history.repeat(turn)
        session.sink = sink
        if handle is not None:
            await self._backend.close(handle)

    async def fork(self) -> int:
        """The backend's handle of a copy of this session, which is awake. The caller has made room for it."""
        return await self._backend.fork(await self.wake())

    async def read_out(self, *, with_snapshot: bool) -> tuple[SessionOpened, list[Entry], bytes | None]:
        """How the session was opened, its spans, and a snapshot of its cache. A parked session is not woken for it."""
        session = self.session
        try:
            if session.parking is not None:
                await asyncio.shield(session.parking)
            snapshot = await self._operations.capacity.snapshot_of(session) if with_snapshot else None
            self.check_not_closed()
            return opened(session), session.history.entries_since(session.id, 0), snapshot
        except HoldfastError:
            self.check_not_closed()  # a session that was closed meanwhile is reported as closed, whatever else failed
            raise

    async def record(self, *entries: Entry) -> None:
        """Write entries to the journal, if this session is journaled."""
        await self._operations.record(self.session, *entries)

    def check_not_closed(self) -> None:
        """Closing beats everything: an operation overtaken by it fails instead of pretending that all went well."""
        self.session.check_here()

    # Inside

    @property
    def _backend(self) -> Backend:
        return self._operations.backend

    @property
    def num_uncomputed(self) -> int:
        """Tokens of the history that the next generation computes again."""
        self.check_not_closed()
        handle = self.session.handle
        return self._backend.view(handle).num_uncomputed if handle is not None else 0

    def _backend_length(self) -> int:
        assert self.session.handle is not None
        return self._backend.view(self.session.handle).history_length

    async def wake(self) -> int:
        """The backend's handle; a parked session gets a slab first."""
        session = self.session
        if session.parking is not None:  # it was being parked when it was claimed
            await asyncio.shield(session.parking)
        self.check_not_closed()
        if session.handle is None:
            await self._operations.capacity.wake(session)
        assert session.handle is not None
        return session.handle

    async def _carry_out(self, work: Coroutine[Any, Any, T], conclude: Conclude) -> T:
        """The result of `work`. A cancelled caller cancels it; `conclude` learns in any case what came of it."""
        task = asyncio.ensure_future(work)

        async def ending() -> None:
            await asyncio.gather(task, return_exceptions=True)
            if not self.session.gate.is_closed:
                await conclude(self._backend_length())

        try:
            await asyncio.shield(self._settle(ending()))
        except asyncio.CancelledError:
            task.cancel()
            raise
        result = await task
        self.check_not_closed()
        return result

    def _settle(self, ending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        async def settle() -> None:
            await ending
            if not self.session.gate.is_closed:
                self._check_invariants()

        self._settling = self._operations.in_background(settle())
        return self._settling

    def _check_invariants(self) -> None:
        session, metrics = self.session, self._operations.metrics
        assert session.handle is not None
        view = self._backend.view(session.handle)
        if view.failure and not session.failure:
            session.failure = view.failure
            for kind in ("inv1", "inv2"):
                if getattr(view, f"{kind}_violations"):
                    metrics.invariant_violations.labels(kind).inc()
        try:
            session.check(view.history_length)
        except SessionFailed:
            metrics.invariant_violations.labels("inv1").inc()
            raise

    async def _record_since(self, start: int) -> None:
        """Record what the history has gained; where that fails, it has gained nothing."""
        session = self.session
        if session.kind != "tokens":  # its tokens are recorded with its turns
            return
        try:
            await self.record(*session.history.entries_since(session.id, start))
        except HoldfastError:
            if session.gate.is_closed:
                raise
            assert session.handle is not None
            await self._backend.rewind(session.handle, start, is_limited=False)
            session.history.rewind(start)
            self._operations.watch.changed(session)
            raise

    async def _free_when_settled(self, settling: "asyncio.Task[None]") -> None:
        await asyncio.gather(settling, return_exceptions=True)
        self.release_now()


_USES = {
    "chat": "is a chat session: over gRPC it can be read, forked and closed, not written",
    "forest": "is a chat session: over gRPC it can be read, forked and closed, not written",
    "tokens": "is a session of raw tokens: it is written over gRPC",
}


def observe_batch(metrics: Metrics, batch: Sequence[Event], since_s: float, *, is_first: bool) -> None:
    """Tokens that arrived together, `since_s` after the call began or after those before them."""
    num = sum(isinstance(event, Sampled) for event in batch)
    metrics.generated_tokens.inc(num)
    if num and is_first:
        metrics.time_to_first_token.observe(since_s)
    elif num:
        metrics.inter_token.observe(since_s / num)
    if isinstance(done := batch[-1], Done):
        metrics.generate_prefill_tokens.observe(done.prefill_tokens)
        metrics.generate_prefill_duration.observe(done.prefill_duration_s)
        if done.num_proposed:
            metrics.draft_tokens.labels("accepted").inc(done.num_accepted)
            metrics.draft_tokens.labels("rejected").inc(done.num_proposed - done.num_accepted)
