"""The one thread that owns the device, and the async interface to it.

Callers put commands into an inbox, and between two steps the thread executes all of them. Runs start and end between
steps, so cancelling takes effect at the next step. Events go back to each caller's event loop in one batch per step.
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
from holdfast.engine.sequence import Sequence, SequenceInfo
from holdfast.engine.sequences import Sequences
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.speculation import Speculator
from holdfast.engine.step import as_holdfast_error
from holdfast.engine.stream import EventDispatcher, Stream
from holdfast.engine.update import WeightUpdate
from holdfast.errors import Draining, EngineDied, HoldfastError, InvalidArgument, SessionNotFound
from holdfast.generation import Done, SamplingParams

T = TypeVar("T")

OnStep = Callable[[int, float], None]  # number of sequences served, duration in seconds


def ignore_step(num_sequences: int, duration_s: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RewindOutcome:
    history_length: int
    recomputed_tokens: int


class Worker:
    """Runs an engine on a thread. Every method may be called from any thread, coroutines from any event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int = 64,
        max_recompute_tokens: int = 65536,
        speculator: Speculator | None = None,
        on_step: OnStep = ignore_step,
    ) -> None:
        self.engine = engine
        self._sequences = Sequences(
            engine, max_batch=max_batch, max_recompute_tokens=max_recompute_tokens, speculator=speculator
        )
        self._on_step = on_step
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._dispatcher = EventDispatcher()
        self._is_stopping = False
        self._is_computing = False
        self.failure: BaseException | None = None  # why the thread ended, if `stop` was not called
        self._lock = (
            threading.Lock()
        )  # no command may be posted once the thread has emptied its inbox for the last time
        self._thread = threading.Thread(target=self._main, name="holdfast-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel all runs, free all slabs and wait until the thread has ended. Blocks for at most one step."""
        if self._thread.is_alive():
            self._inbox.put(self._begin_stop)
            self._thread.join()

    @property
    def num_free_slabs(self) -> int:
        return self._sequences.pool.num_free

    @property
    def num_busy_cores(self) -> int:
        """How many cores of this machine compute at this moment."""
        return self.engine.num_cores if self._is_computing else 0

    def info(self, sequence_id: int) -> SequenceInfo:
        """The state of the sequence after the last step. Does not wait for the device."""
        try:
            return self._sequences.infos[sequence_id]
        except KeyError:
            raise SessionNotFound(sequence_id) from None

    async def open(self, *, sink: int = 4) -> int:
        """Open an empty sequence with a slab of its own."""
        new_id = next(self._ids)
        return await self._acquire(new_id, lambda: self._sequences.open(new_id, sink))

    async def pin(self, sequence_id: int, sink: int) -> None:
        """Change the sink of a sequence that is still empty."""
        await self._call(lambda: self._sequences.pin(sequence_id, sink))

    async def close(self, sequence_id: int) -> int:
        """Cancel the run, if there is one, and free the slab. Returns the final history length."""
        return await self._call(lambda: self._sequences.close(sequence_id))

    async def append(self, sequence_id: int, tokens: Tokens[int]) -> Done:
        """Add tokens and compute all but the last. If cancelled, the tokens stay and are computed by the next run."""
        if not tokens:
            raise InvalidArgument("append needs at least one token")
        checked = checked_tokens(tokens, self.engine.info.vocab_size)
        return await self._finish(self._stream(sequence_id, lambda sequence: sequence.append(checked)))

    def generate(self, sequence_id: int, params: SamplingParams, tokens: Tokens[int] = ()) -> Stream:
        """Append `tokens`, then sample: a stream of event batches that ends with Done. Leaving it early cancels."""
        params.check_vocabulary(self.engine.info.vocab_size)
        checked = checked_tokens(tokens, self.engine.info.vocab_size)

        def prepare(sequence: Sequence) -> None:
            if not sequence.tokens and not checked:
                raise InvalidArgument("cannot generate from an empty history; append at least one token first")
            sequence.append(checked)

        return self._stream(sequence_id, prepare, params)

    async def rewind(self, sequence_id: int, length: int, *, is_limited: bool = True) -> RewindOutcome:
        """Forget the tokens from `length` on. Computes again what the slab no longer holds."""
        recomputed = await self._call(lambda: self._sequences.rewind(sequence_id, length, is_limited=is_limited))
        if recomputed:
            await self._finish(self._stream(sequence_id, lambda _: None))
        return RewindOutcome(length, recomputed)

    async def fork(self, sequence_id: int) -> int:
        """Open a sequence with the same tokens and a copy of the slab."""
        new_id = next(self._ids)
        return await self._acquire(new_id, lambda: self._sequences.fork(sequence_id, new_id))

    async def snapshot(self, sequence_id: int) -> Snapshot:
        return await self._call(lambda: snapshots.take(self.engine, self._sequences.idle(sequence_id)))

    async def restore(self, snapshot: Snapshot, tokens: Tokens[int]) -> int:
        """Open a sequence that continues `tokens` from the snapshot's keys and values."""
        checked = checked_tokens(tokens, self.engine.info.vocab_size)
        new_id = next(self._ids)

        def restore() -> None:
            snapshots.check(self.engine, snapshot, checked)  # here, where the weights cannot change meanwhile
            self._sequences.restore(new_id, snapshot, checked)

        return await self._acquire(new_id, restore)

    async def load_weights(self, update: WeightUpdate, *, version: str, keeps_caches: bool) -> None:
        """Overwrite the weights between two steps. No run ends; no step begins meanwhile."""
        await self._call(lambda: self._sequences.load_weights(update, version=version, keeps_caches=keeps_caches))

    async def label_weights(self, version: str) -> None:
        """Tokens of the next steps carry this version; the weights stay."""

        def label() -> None:
            self.engine.weight_version = version

        await self._call(label)

    async def tokens(self, sequence_id: int, first: int = 0) -> list[int]:
        """A copy of the history from position `first` on."""

        def copy() -> list[int]:
            return self._sequences.get(sequence_id).tokens[first:].tolist()

        return await self._call(copy)

    # From event loops to the thread

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._is_stopping or not self._thread.is_alive():
                raise Draining("the engine is not running")
            self._inbox.put(command)

    async def _call(self, action: Callable[[], T]) -> T:
        """Run the action on the thread and return its result. A cancelled caller still waits until it has run."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(action())
            except Exception as exc:
                is_fatal = isinstance(exc, EngineDied) or self.engine.is_fatal(exc)
                if is_fatal:
                    self._begin_stop()  # before the caller learns of it: whatever it posts next is refused
                future.set_exception(as_holdfast_error(exc))
                if is_fatal:
                    raise

        self._post(command)
        answer = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.gather(answer, return_exceptions=True)
            raise

    async def _acquire(self, sequence_id: int, action: Callable[[], None]) -> int:
        """Run an action that opens `sequence_id`. If the caller is cancelled, the sequence is closed again."""
        try:
            await self._call(action)
        except asyncio.CancelledError:
            with contextlib.suppress(Draining):
                self._post(lambda: self._sequences.discard(sequence_id))
            raise
        return sequence_id

    def _stream(
        self, sequence_id: int, prepare: Callable[[Sequence], None], params: SamplingParams | None = None
    ) -> Stream:
        """A stream that, when it is entered, prepares the sequence and starts a run on it."""

        def start(stream: Stream) -> None:
            try:
                sequence = self._sequences.idle(sequence_id)
                prepare(sequence)
            except HoldfastError as exc:
                self._dispatcher.send(stream, Failed(exc))
                return
            stream.run = Run(sequence, lambda event: self._dispatcher.send(stream, event), params, stream.has_room)
            self._sequences.start(stream.run)

        return Stream(
            start=lambda stream: self._post(lambda: start(stream)),
            cancel=lambda stream: self._post(stream.cancel_run),
            wake=lambda: self._post(lambda: None),
        )

    async def _finish(self, stream: Stream) -> Done:
        async with stream:
            return await stream.done()

    # On the thread

    def _main(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                self._sequences.end_finished()
                self._is_computing = not self._sequences.scheduler.is_idle
                if self._is_computing:
                    started = time.perf_counter()
                    num_served = self._sequences.step()
                    self._on_step(num_served, time.perf_counter() - started)
                self._dispatcher.flush()
        except BaseException as exc:
            self.failure = exc
            raise
        finally:
            self._abandon()

    def _take_commands(self) -> None:
        """Execute all waiting commands. Blocks for one where there is nothing to compute."""
        is_idle = self._sequences.scheduler.is_idle
        self._is_computing = not is_idle
        try:
            while True:
                self._inbox.get(block=is_idle)()
                is_idle = False
        except queue.Empty:
            pass

    def _begin_stop(self) -> None:
        with self._lock:
            self._is_stopping = True

    def _abandon(self) -> None:
        """End every run and command, so that no caller waits for a thread that has ended."""
        self._begin_stop()
        self._sequences.close_all(Draining("the engine stopped"))
        while not self._inbox.empty():
            self._inbox.get()()
        self._dispatcher.flush()


def checked_tokens(tokens: Tokens[int], vocab_size: int) -> "array[int]":
    """A copy of `tokens`. Raises InvalidArgument for the first that is not an integer of the vocabulary."""
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidArgument(f"token {token!r} at index {index} is not a token id between 0 and {vocab_size - 1}")
    return array("i", tokens)
