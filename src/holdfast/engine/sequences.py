"""All sequences of one engine and the runs on them. No threads and no loops: the owner calls `step` repeatedly."""

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import replace

from holdfast.engine import snapshot as snapshots
from holdfast.engine.interface import Engine
from holdfast.engine.run import Failed, Run
from holdfast.engine.scheduler import Plan, Scheduler
from holdfast.engine.sequence import Sequence, SequenceInfo
from holdfast.engine.slab import Slab, SlabPool
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.speculation import Speculator
from holdfast.engine.step import Outcome, step
from holdfast.engine.update import WeightUpdate, write
from holdfast.errors import HoldfastError, InvalidArgument, SessionBusy, SessionFailed, SessionNotFound
from holdfast.generation import Done, Sampled


class Sequences:
    """Sequences by id. Each has a slab until it is closed, and at most one run at a time."""

    def __init__(
        self, engine: Engine, *, max_batch: int, max_recompute_tokens: int, speculator: Speculator | None = None
    ) -> None:
        self.engine = engine
        self._speculator = speculator
        self.pool = SlabPool(engine.num_slabs, engine.shape)
        self.scheduler = Scheduler(prefill_chunk=engine.shape.prefill_chunk, max_batch=max_batch)
        self.infos: dict[int, SequenceInfo] = {}  # entries are replaced, never changed, so that any thread may read
        self._max_recompute_tokens = max_recompute_tokens
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Run] = {}

    def get(self, sequence_id: int) -> Sequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise SessionNotFound(sequence_id) from None

    def idle(self, sequence_id: int) -> Sequence:
        """The sequence, if a run may be started on it. Raises SessionFailed or SessionBusy otherwise."""
        sequence = self.get(sequence_id)
        if sequence.failure:
            raise SessionFailed(f"sequence {sequence_id} has failed: {sequence.failure}") from sequence.failure
        if sequence_id in self._running:
            raise SessionBusy(f"sequence {sequence_id} is busy")
        return sequence

    # Opening and closing

    def open(self, sequence_id: int, sink: int) -> None:
        self._add(Sequence(sequence_id, self.pool.acquire(sink)))

    def pin(self, sequence_id: int, sink: int) -> None:
        sequence = self.idle(sequence_id)
        if sequence.tokens:
            raise InvalidArgument(f"cannot pin {sink} tokens: the history is not empty")
        self.pool.check(sink)
        self.pool.release(sequence.slab)
        sequence.slab = self.pool.acquire(sink)
        self._publish(sequence)

    def fork(self, sequence_id: int, new_id: int) -> None:
        source = self.idle(sequence_id)
        slab = self.pool.acquire(source.slab.window.sink)
        with self._given_back_on_error(slab):
            self.engine.copy_slab(source.slab, slab)
        slab.length, slab.high = source.slab.length, source.slab.high
        fork = Sequence(new_id, slab, source.tokens)
        fork.reported_dropped = source.reported_dropped
        self._add(fork)

    def restore(self, new_id: int, snapshot: Snapshot, tokens: "array[int]") -> None:
        slab = self.pool.acquire(snapshot.header.sink)
        with self._given_back_on_error(slab):
            snapshots.restore(self.engine, snapshot, slab)
        sequence = Sequence(new_id, slab, tokens)
        sequence.reported_dropped = snapshot.header.reported_dropped
        self._add(sequence)

    @contextlib.contextmanager
    def _given_back_on_error(self, slab: Slab) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.pool.release(slab)
            raise

    def rewind(self, sequence_id: int, length: int, *, is_limited: bool = True) -> int:
        """Forget the tokens from `length` on; returns how many a run must compute again."""
        sequence = self.idle(sequence_id)
        limit = self._max_recompute_tokens if is_limited else len(sequence.tokens)
        recomputed = sequence.rewind(length, max_recompute=limit)
        self._publish(sequence)
        return recomputed

    def close(self, sequence_id: int) -> int:
        """Cancel the run, if there is one, and free the slab; returns the final history length."""
        sequence = self.get(sequence_id)
        if run := self._running.get(sequence_id):
            self._end(run, run.cancelled())
        if sequence.failure:
            self.engine.clear_slab(sequence.slab)
        self.pool.release(sequence.slab)
        if self._speculator:
            self._speculator.forget(sequence_id)
        del self._sequences[sequence_id], self.infos[sequence_id]
        return len(sequence.tokens)

    def discard(self, sequence_id: int) -> None:
        """Close the sequence if it is open."""
        if sequence_id in self._sequences:
            self.close(sequence_id)

    def close_all(self, error: HoldfastError) -> None:
        """Close every sequence; runs in progress fail with `error`."""
        for run in self.scheduler.runs:
            self._end(run, Failed(error))
        for sequence_id in list(self._sequences):
            self.close(sequence_id)

    # Runs

    def start(self, run: Run) -> None:
        self._running[run.sequence.id] = run
        self.scheduler.add(run)
        self._publish(run.sequence)

    def end_finished(self) -> None:
        """End the runs that need no step: cancelled ones, and appends that have nothing to compute."""
        for run in self.scheduler.runs:
            if run.is_cancelled or run.num_to_compute <= 0:
                self._end(run, run.cancelled())

    def step(self) -> int:
        """One engine step; returns how many sequences it served."""
        plan = self.scheduler.plan()
        if self._speculator:
            drafts = self._speculator.drafts([work.run for work in plan.decode])
            works = [work._replace(draft=draft) for work, draft in zip(plan.decode, drafts, strict=True)]
            plan = Plan(works, plan.prefill, self._speculator.max_ahead([work.run for work in works]))
        before = [work.run.num_accepted for work in plan.decode]
        for outcome in step(self.engine, plan):
            self._settle(outcome)
        for work, num in zip(plan.decode, before, strict=True):
            if self._speculator and work.draft:
                self._speculator.learn(work.run, len(work.draft), work.run.num_accepted - num)
        return len(plan.decode) + len(plan.prefill)

    def load_weights(self, update: WeightUpdate, *, version: str, keeps_caches: bool) -> None:
        """Compute with other weights from the next step on. Unless the caches are kept, every sequence computes its
        history again, from the start, when it is next used; one that is running does so at once."""
        write(self.engine, update, version=version, keeps_caches=keeps_caches)
        for sequence in self._sequences.values() if not keeps_caches else ():
            sequence.forget_cache()
            self._publish(sequence)

    def _settle(self, outcome: Outcome) -> None:
        run, result = outcome
        if isinstance(result, Sampled) and (version := self.engine.weight_version):
            result = replace(result, weight_version=version)
        if isinstance(result, HoldfastError):
            self._end(run, Failed(result))
        elif isinstance(result, Sampled) and (reason := run.take(result)):
            self._end(run, run.done(reason))
        else:
            self._publish(run.sequence)

    def _end(self, run: Run, event: Done | Failed) -> None:
        run.is_ended = True
        self.scheduler.remove(run)
        del self._running[run.sequence.id]
        self._publish(run.sequence)
        run.emit(event)

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        slab, length = sequence.slab, len(sequence.tokens)
        self.infos[sequence.id] = SequenceInfo(
            history_length=length,
            computed_length=slab.length,
            num_visible=slab.window.num_visible(length),
            num_dropped=len(slab.window.dropped(length)),
            kv_live_bytes=slab.window.num_visible(slab.length) * self.engine.info.kv_bytes_per_position,
            kv_reserved_bytes=self.engine.kv_reserved_bytes // self.engine.num_slabs,
            inv1_violations=sequence.inv1_violations,
            inv2_violations=sequence.inv2_violations,
            is_busy=sequence.id in self._running,
            failure=str(sequence.failure) if sequence.failure else None,
        )
