"""The one thread that owns the device, and the async interface to it.

Callers put commands into an inbox; between two steps the thread takes all of them. Sequences join and
leave between steps, so cancelling takes effect at the next one. Events travel back to each caller's
event loop in one batch a step.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from holdfast.engine import snapshot as snapshots
from holdfast.engine.interface import Engine
from holdfast.engine.run import Failed, Run
from holdfast.engine.scheduler import Scheduler
from holdfast.engine.sequence import Sequence, SequenceInfo
from holdfast.engine.slab import SlabPool
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.step import Outcome, step
from holdfast.engine.stream import Mailroom, Stream
from holdfast.errors import (
    Draining,
    HoldfastError,
    InvalidArgument,
    SessionBusy,
    SessionFailed,
    SessionNotFound,
)
from holdfast.generation import Done, Sampled, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rewound:
    history_length: int
    recomputed_tokens: int


OnStep = Callable[[int, float], None]  # sequences served, seconds taken


def ignore_step(num_sequences: int, duration_s: float) -> None:
    pass


class Worker:
    """Start it, use its coroutines from any event loop, stop it. Every method is safe from any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int = 64,
        max_recompute_tokens: int = 65536,
        on_step: OnStep = ignore_step,
    ) -> None:
        self.engine = engine
        self._on_step = on_step
        self._pool = SlabPool(engine.num_slabs, engine.shape)
        self._scheduler = Scheduler(prefill_chunk=engine.shape.prefill_chunk, max_batch=max_batch)
        self._max_recompute_tokens = max_recompute_tokens
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Run] = {}
        self._infos: dict[int, SequenceInfo] = {}
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mailroom = Mailroom()
        self._is_stopping = False
        self._lock = threading.Lock()  # orders `_call` against the thread's last look at the inbox
        self._thread = threading.Thread(target=self._main, name="holdfast-engine", daemon=True)

    # What callers see

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs, free all slabs, end the thread. Blocks for at most one step."""
        if self._thread.is_alive():
            self._inbox.put(self._begin_stop)
            self._thread.join()

    @property
    def num_free_slabs(self) -> int:
        return self._pool.num_free

    def info(self, sequence_id: int) -> SequenceInfo:
        """How the sequence stood after the last step. Never waits for the device."""
        try:
            return self._infos[sequence_id]
        except KeyError:
            raise SessionNotFound(sequence_id) from None

    async def open(self, *, sink: int = 4) -> int:
        """A new, empty sequence on a slab of its own."""
        sequence_id = next(self._ids)
        return await self._acquire(sequence_id, lambda: self._open(sequence_id, sink))

    async def close(self, sequence_id: int) -> int:
        """Free the slab; a run in progress is cancelled first. Returns the final history length."""
        return await self._call(lambda: self._close(sequence_id))

    async def append(self, sequence_id: int, tokens: Tokens[int]) -> Done:
        """Add tokens and compute all but the last. Cancelled: the tokens stay, computing resumes later."""
        if not tokens:
            raise InvalidArgument("append needs at least one token")
        checked = checked_tokens(tokens, self.engine.info.vocab_size)
        return await self._finish(self._stream(sequence_id, lambda sequence: sequence.append(checked)))

    def generate(self, sequence_id: int, params: SamplingParams, tokens: Tokens[int] = ()) -> Stream:
        """Append `tokens`, then sample: a stream of event batches, ending with Done. Leaving it early cancels."""
        params.check_vocabulary(self.engine.info.vocab_size)
        checked = checked_tokens(tokens, self.engine.info.vocab_size)

        def prepare(sequence: Sequence) -> None:
            if not sequence.tokens and not checked:
                raise InvalidArgument("cannot generate from an empty history; append at least one token first")
            sequence.append(checked)

        return self._stream(sequence_id, prepare, params)

    async def rewind(self, sequence_id: int, length: int) -> Rewound:
        """Forget the tokens from `length` on. What the slab no longer holds is computed again."""
        recomputed = await self._call(lambda: self._rewind(sequence_id, length))
        if recomputed:
            await self._finish(self._stream(sequence_id, lambda _: None))
        return Rewound(length, recomputed)

    async def fork(self, sequence_id: int) -> int:
        """A new sequence with the same tokens and a copy of the slab."""
        new_id = next(self._ids)
        return await self._acquire(new_id, lambda: self._fork(sequence_id, new_id))

    async def snapshot(self, sequence_id: int) -> Snapshot:
        return await self._call(lambda: snapshots.take(self.engine, self._idle(sequence_id)))

    async def restore(self, snapshot: Snapshot, tokens: Tokens[int]) -> int:
        """A new sequence that continues `tokens` from the snapshot's keys and values."""
        checked = checked_tokens(tokens, self.engine.info.vocab_size)
        snapshots.check(self.engine, snapshot, checked)
        new_id = next(self._ids)
        return await self._acquire(new_id, lambda: self._restore(new_id, snapshot, checked))

    async def tokens(self, sequence_id: int, first: int = 0) -> list[int]:
        """A copy of the history from position `first` on."""

        def copy() -> list[int]:
            return self._get(sequence_id).tokens[first:].tolist()

        return await self._call(copy)

    # Bridges between loops and the thread

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._is_stopping or not self._thread.is_alive():
                raise Draining("the engine is not running")
            self._inbox.put(command)

    async def _call(self, action: Callable[[], T]) -> T:
        """The action's result. Once posted it is carried out, whether or not the caller still waits."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(action())
            except HoldfastError as exc:
                future.set_exception(exc)

        self._post(command)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def _acquire(self, sequence_id: int, action: Callable[[], None]) -> int:
        """Run an action that opens `sequence_id`; a caller who left meanwhile leaves no slab behind."""
        try:
            await self._call(action)
        except asyncio.CancelledError:
            with contextlib.suppress(Draining):
                self._post(lambda: self._discard(sequence_id))
            raise
        return sequence_id

    def _stream(
        self, sequence_id: int, prepare: Callable[[Sequence], None], params: SamplingParams | None = None
    ) -> Stream:
        """A stream that, when entered, prepares the sequence and then runs it."""

        def start(stream: Stream) -> None:
            try:
                sequence = self._idle(sequence_id)
                prepare(sequence)
            except HoldfastError as exc:
                self._mailroom.send(stream, Failed(exc))
                return
            stream.run = Run(sequence, lambda event: self._mailroom.send(stream, event), params)
            self._running[sequence_id] = stream.run
            self._scheduler.add(stream.run)
            self._publish(sequence)

        return Stream(
            start=lambda stream: self._post(lambda: start(stream)),
            cancel=lambda stream: self._post(stream.cancel_run),
        )

    async def _finish(self, stream: Stream) -> Done:
        async with stream:
            return await stream.done()

    # On the thread

    def _main(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                self._end_finished()
                if len(self._scheduler):
                    self._step()
                self._mailroom.flush()
        finally:
            self._abandon()

    def _step(self) -> None:
        started = time.perf_counter()
        plan = self._scheduler.plan()
        for outcome in step(self.engine, plan):
            self._settle(outcome)
        self._on_step(len(plan.decode) + len(plan.prefill), time.perf_counter() - started)

    def _take_commands(self) -> None:
        """All commands that wait; blocks for one where there is nothing to compute."""
        is_idle = not len(self._scheduler)
        try:
            while True:
                self._inbox.get(block=is_idle)()
                is_idle = False
        except queue.Empty:
            pass

    def _end_finished(self) -> None:
        """Runs that were cancelled, and appends whose one token stays pending, need no step."""
        for run in self._scheduler.runs:
            if run.is_cancelled or run.num_to_compute <= 0:
                self._end(run, run.cancelled())

    def _settle(self, outcome: Outcome) -> None:
        run, result = outcome
        if isinstance(result, HoldfastError):
            self._end(run, Failed(result))
        elif isinstance(result, Sampled) and (reason := run.take(result)):
            self._end(run, run.done(reason))
        else:
            self._publish(run.sequence)

    def _end(self, run: Run, event: Done | Failed) -> None:
        self._scheduler.remove(run)
        del self._running[run.sequence.id]
        self._publish(run.sequence)
        run.emit(event)

    def _publish(self, sequence: Sequence) -> None:
        slab, info, length = sequence.slab, self.engine.info, len(sequence.tokens)
        self._infos[sequence.id] = SequenceInfo(
            history_length=length,
            computed_length=slab.length,
            window_size=slab.window.size,
            num_visible=slab.window.num_visible(length),
            num_dropped=len(slab.window.dropped(length)),
            kv_live_bytes=slab.window.num_visible(slab.length) * info.kv_bytes_per_position,
            kv_reserved_bytes=self.engine.kv_reserved_bytes // self.engine.num_slabs,
            inv1_violations=sequence.inv1_violations,
            inv2_violations=sequence.inv2_violations,
            is_busy=sequence.id in self._running,
            failure=str(sequence.failure) if sequence.failure else None,
        )

    def _get(self, sequence_id: int) -> Sequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise SessionNotFound(sequence_id) from None

    def _idle(self, sequence_id: int) -> Sequence:
        sequence = self._get(sequence_id)
        if sequence.failure:
            raise SessionFailed(f"sequence {sequence_id} has failed: {sequence.failure}") from sequence.failure
        if sequence_id in self._running:
            raise SessionBusy(f"sequence {sequence_id} is busy")
        return sequence

    def _adopt(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        self._publish(sequence)

    def _open(self, sequence_id: int, sink: int) -> None:
        self._adopt(Sequence(sequence_id, self._pool.acquire(sink)))

    def _close(self, sequence_id: int) -> int:
        sequence = self._get(sequence_id)
        if run := self._running.get(sequence_id):
            self._end(run, run.cancelled())
        if sequence.failure:
            self.engine.clear_slab(sequence.slab)
        self._pool.release(sequence.slab)
        del self._sequences[sequence_id], self._infos[sequence_id]
        return len(sequence.tokens)

    def _discard(self, sequence_id: int) -> None:
        if sequence_id in self._sequences:
            self._close(sequence_id)

    def _rewind(self, sequence_id: int, length: int) -> int:
        sequence = self._idle(sequence_id)
        recomputed = sequence.rewind(length, max_recompute=self._max_recompute_tokens)
        self._publish(sequence)
        return recomputed

    def _fork(self, sequence_id: int, new_id: int) -> None:
        source = self._idle(sequence_id)
        slab = self._pool.acquire(source.slab.window.sink)
        self.engine.copy_slab(source.slab, slab)
        slab.length, slab.high = source.slab.length, source.slab.high
        fork = Sequence(new_id, slab, source.tokens)
        fork.reported_dropped = source.reported_dropped
        self._adopt(fork)

    def _restore(self, new_id: int, snapshot: Snapshot, tokens: "array[int]") -> None:
        slab = self._pool.acquire(snapshot.header.sink)
        snapshots.restore(self.engine, snapshot, slab)
        sequence = Sequence(new_id, slab, tokens)
        sequence.reported_dropped = snapshot.header.reported_dropped
        self._adopt(sequence)

    def _begin_stop(self) -> None:
        with self._lock:
            self._is_stopping = True

    def _abandon(self) -> None:
        """The thread ends, on purpose or not: nobody is left waiting."""
        with self._lock:
            self._is_stopping = True
        for run in self._scheduler.runs:
            self._end(run, Failed(Draining("the engine stopped")))
        for sequence_id in list(self._sequences):
            self._close(sequence_id)
        while not self._inbox.empty():
            self._inbox.get()()
        self._mailroom.flush()


def checked_tokens(tokens: Tokens[int], vocab_size: int) -> "array[int]":
    """A copy of `tokens`; refuses the first that is no integer of the vocabulary."""
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidArgument(f"token {token!r} at index {index} is not an id of the vocabulary of {vocab_size}")
    return array("i", tokens)
