"""The worker on the fake engine: who moves when, who fails, what is left behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.engine import stream as stream_module
from holdfast.engine.interface import Row
from holdfast.engine.run import Run
from holdfast.engine.scheduler import Scheduler
from holdfast.engine.sequences import Sequences
from holdfast.engine.slab import Slab, SlabShape
from holdfast.engine.snapshot import decode, encode
from holdfast.engine.stream import Stream
from holdfast.engine.worker import Worker
from holdfast.errors import (
    CapacityExhausted,
    Draining,
    InvalidArgument,
    InvariantViolated,
    NonFiniteLogits,
    RecomputeTooLong,
    SessionBusy,
    SessionFailed,
    SessionNotFound,
    SnapshotMismatch,
)
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason, Truncated
from holdfast.testing.fake_engine import FakeEngine

SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8, rewind_tokens=8)
POISON, NAN = 60, 61


class WatchedEngine(FakeEngine):
    """Keeps the rows of every forward, raises on POISON, gives NaN on NAN, can be held before a forward.

    `tamper` is called with every slab after a forward, for tests that corrupt the bookkeeping.
    """

    def __init__(self, *, num_slabs: int = 4, shape: SlabShape = SHAPE, fingerprint: str = "fake") -> None:
        super().__init__(num_slabs=num_slabs, shape=shape, fingerprint=fingerprint)
        self.gate = threading.Event()
        self.gate.set()
        self.forwards: list[list[tuple[int, int, int]]] = []  # (slot, start, number of tokens)
        self.tamper: Callable[[Slab], None] = lambda slab: None

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.gate.wait()
        self.forwards.append([(row.slab.slot, row.slab.length, len(row.tokens)) for row in rows])
        logits = super().forward(rows)
        end = 0
        for row in rows:
            end += row.num_logits
            if POISON in row.tokens:
                raise FloatingPointError("poison")
            if NAN in row.tokens and row.num_logits:
                logits[end - 1] = np.nan
            self.tamper(row.slab)
        return logits


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(WatchedEngine())
    worker.start()
    yield worker
    worker.stop()


def engine_of(worker: Worker) -> WatchedEngine:
    assert isinstance(worker.engine, WatchedEngine)
    return worker.engine


def greedy(max_tokens: int = 5, **options: object) -> SamplingParams:
    bias = dict.fromkeys((POISON, NAN), -1000.0)  # neither trap is sampled by chance
    return SamplingParams(**{"seed": 0, "max_tokens": max_tokens, "temperature": 0, "logit_bias": bias} | options)  # type: ignore[arg-type]


async def collect(stream: Stream) -> list[Event]:
    async with stream:
        return [event async for batch in stream for event in batch]


async def generate(worker: Worker, sequence: int, max_tokens: int = 5, **options: object) -> list[int]:
    events = await collect(worker.generate(sequence, greedy(max_tokens, **options)))
    return [event.token for event in events if isinstance(event, Sampled)]


async def test_a_turn_forwards_exactly_the_new_tokens_and_the_pending_one(worker: Worker) -> None:
    sequence = await worker.open()
    for turn, appended in enumerate([11, 1, 30, 2]):
        forwarded = worker.info(sequence).computed_length
        await worker.append(sequence, [1] * appended)
        events = await collect(worker.generate(sequence, greedy()))
        done = events[-1]
        assert isinstance(done, Done)
        pending = 1 if turn else 0
        before_first_token = worker.info(sequence).computed_length - forwarded - (done.num_generated - 1)
        assert before_first_token == appended + pending
        assert worker.info(sequence).history_length - worker.info(sequence).computed_length == 1


async def test_events_tell_the_whole_story(worker: Worker) -> None:
    sequence = await worker.open()
    appended = await worker.append(sequence, list(range(10)))
    assert (appended.stop_reason, appended.prefill_tokens, appended.history_length) == (None, 9, 10)
    events = await collect(worker.generate(sequence, greedy(6, seed=3)))
    tokens = [event.token for event in events if isinstance(event, Sampled)]
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.stop_reason, done.num_generated, done.history_length) == (StopReason.MAX_TOKENS, 6, 16)
    assert (done.prefill_tokens, done.seed) == (1, 3)
    assert await worker.tokens(sequence) == [*range(10), *tokens]
    assert await worker.tokens(sequence, 10) == tokens


@pytest.mark.parametrize(
    ("field", "reason"), [("eos_token_ids", StopReason.EOS), ("stop_token_ids", StopReason.STOP_TOKEN)]
)
async def test_end_tokens_are_streamed_recorded_and_counted(worker: Worker, field: str, reason: StopReason) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1, 2, 3])
    fork = await worker.fork(sequence)
    free = await generate(worker, sequence, 8)
    events = await collect(worker.generate(fork, greedy(8, **{field: frozenset({free[3]})})))
    expected = free[: free.index(free[3]) + 1]
    assert [event.token for event in events if isinstance(event, Sampled)] == expected
    assert isinstance(events[-1], Done)
    assert (events[-1].stop_reason, events[-1].num_generated) == (reason, len(expected))
    assert (await worker.tokens(fork))[3:] == expected


async def test_leaving_the_window_is_told_before_the_first_token_and_when_it_begins(worker: Worker) -> None:
    sequence = await worker.open(sink=2)  # window of 18
    told: list[Truncated] = []

    async def turn(num_appended: int, num_generated: int) -> list[Event]:
        await worker.append(sequence, [1] * num_appended)
        events = await collect(worker.generate(sequence, greedy(num_generated)))
        told.extend(event for event in events if isinstance(event, Truncated))
        return events

    first = await turn(10, 4)
    assert told == []
    second = await turn(2, 6)  # 14 + 2 fit, the third sampled token pushes one out
    assert [type(event) for event in second] == [
        Sampled,
        Sampled,
        Sampled,
        Truncated,
        Sampled,
        Sampled,
        Sampled,
        Done,
    ]
    third = await turn(9, 1)
    assert [type(event) for event in third] == [Truncated, Sampled, Done]
    assert len(first) == 5
    last = await turn(1, 1)
    assert isinstance(last[-1], Done)
    ranges = [position for event in told for position in range(event.first, event.end)]
    assert ranges == list(range(2, 2 + len(ranges)))
    info = worker.info(sequence)
    assert len(ranges) + 1 == info.num_dropped == info.history_length - info.num_visible  # the last token's is due next


async def test_a_long_prompt_never_stalls_running_streams_by_more_than_a_chunk(worker: Worker) -> None:
    talker, reader = await worker.open(), await worker.open()
    await worker.append(talker, [1, 2])
    engine = engine_of(worker)
    engine.forwards.clear()
    engine.gate.clear()
    async with worker.generate(talker, greedy(60)) as stream:
        reading = asyncio.create_task(worker.append(reader, [5] * 300))
        await asyncio.sleep(0)  # both wait for the device now
        engine.gate.set()
        assert (await stream.done()).num_generated == 60
        await reading
    sizes = [[num for _, _, num in rows] for rows in engine.forwards]
    assert max(map(max, sizes)) == SHAPE.prefill_chunk
    chunks = [i for i, size in enumerate(sizes) if size == [SHAPE.prefill_chunk]]
    assert len(chunks) == 37
    assert all(sizes[i - 1] == [1] for i in chunks)  # the talker moved before each of them


async def test_prompts_take_turns_so_a_short_one_overtakes_a_long_one(worker: Worker) -> None:
    long, short = await worker.open(), await worker.open()
    done: list[str] = []
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(worker.append(long, [1] * 4000))
        await asyncio.sleep(0)
        quick = group.create_task(worker.append(short, [2] * 20))
        slow.add_done_callback(lambda task: done.append("slow"))
        quick.add_done_callback(lambda task: done.append("quick"))
    assert done == ["quick", "slow"]


def test_short_prompts_that_come_together_end_in_the_order_in_which_they_came() -> None:
    sequences = Sequences(WatchedEngine(), max_batch=64, max_recompute_tokens=0)
    first_tokens: list[int] = []
    for number in range(4):
        sequences.open(number, 4)
        sequences.get(number).append([1] * 6)  # a chunk has 8
        sequences.start(Run(sequences.get(number), lambda event, n=number: first_tokens.append(n), greedy(1)))
    num_steps = 0
    while len(sequences.scheduler):
        sequences.end_finished()
        sequences.step()
        num_steps += 1
    assert list(dict.fromkeys(first_tokens)) == [0, 1, 2, 3]
    assert num_steps == 3


async def test_neighbours_do_not_change_the_tokens(worker: Worker) -> None:
    sequences = [await worker.open() for _ in range(4)]
    prompts = [[n] * (3 + 5 * n) for n in range(1, 5)]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        await worker.append(sequence, prompt)
    together = await asyncio.gather(*(generate(worker, sequence, 40) for sequence in sequences))
    for sequence, prompt, tokens in zip(sequences, prompts, together, strict=True):
        await worker.rewind(sequence, len(prompt))
        assert await generate(worker, sequence, 40) == tokens
    batch_sizes = {len(rows) for rows in engine_of(worker).forwards}
    assert 4 in batch_sizes


async def test_more_runs_than_the_batch_holds_all_move_on() -> None:
    worker = Worker(WatchedEngine(), max_batch=2)
    worker.start()
    sequences = [await worker.open() for _ in range(4)]
    for sequence in sequences:
        await worker.append(sequence, [1, 2])
    results = await asyncio.gather(*(generate(worker, sequence, 9) for sequence in sequences))
    assert [len(tokens) for tokens in results] == [9] * 4
    assert max(len(rows) for rows in engine_of(worker).forwards) == 2
    worker.stop()


async def test_a_run_whose_events_are_not_read_waits_and_goes_on_with_the_same_tokens(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNREAD", 10)
    sequences = [await worker.open() for _ in range(3)]
    for sequence in sequences:
        await worker.append(sequence, [1, 2, 3])
    expected = await generate(worker, sequences[0], 60)
    async with worker.generate(sequences[1], greedy(60)) as unread:
        await asyncio.wait_for(generate(worker, sequences[2], 200), 60)  # a neighbour is not held up
        assert worker.info(sequences[1]).history_length == 3 + 10
        await asyncio.sleep(0)
        events = [event async for batch in unread for event in batch]
    assert [event.token for event in events if isinstance(event, Sampled)] == expected
    assert isinstance(events[-1], Done)


async def test_a_run_that_waits_for_its_reader_is_cancelled_and_closed_like_any_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNREAD", 4)
    left, closed = [await worker.open() for _ in range(2)]
    for sequence in (left, closed):
        await worker.append(sequence, [1, 2, 3])

    async def is_held(sequence: int) -> None:
        while worker.info(sequence).history_length < 3 + 4:
            await asyncio.sleep(0.001)

    async with worker.generate(left, greedy(1000)):
        await is_held(left)
    assert worker.info(left).history_length == 3 + 4
    async with worker.generate(closed, greedy(1000)) as stream:
        await is_held(closed)
        await worker.close(closed)
        events = [event async for batch in stream for event in batch]
    assert isinstance(events[-1], Done)
    assert events[-1].stop_reason is StopReason.CANCELLED


async def test_leaving_a_stream_cancels_at_the_next_step(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1, 2, 3])
    streamed: list[int] = []
    async with worker.generate(sequence, greedy(100_000)) as stream:
        async for batch in stream:
            streamed += [event.token for event in batch if isinstance(event, Sampled)]
            if len(streamed) > 3:
                break
    info = worker.info(sequence)
    assert not info.is_busy
    assert (await worker.tokens(sequence))[3 : 3 + len(streamed)] == streamed
    assert len(await generate(worker, sequence, 4)) == 4


async def test_a_cancelled_task_leaves_its_sequence_usable(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1])
    task = asyncio.create_task(generate(worker, sequence, 100_000))
    while not worker.info(sequence).is_busy:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not worker.info(sequence).is_busy
    assert len(await generate(worker, sequence, 3)) == 3


async def test_a_cancelled_append_keeps_the_history_and_resumes(worker: Worker) -> None:
    sequence, undisturbed = await worker.open(), await worker.open()
    prompt = [token % 7 for token in range(5000)]
    engine = engine_of(worker)
    engine.tamper = lambda slab: engine.gate.clear()  # held after the first forward
    task = asyncio.create_task(worker.append(sequence, prompt))
    while worker.info(sequence).computed_length == 0:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    engine.tamper = lambda slab: None
    engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    info = worker.info(sequence)
    assert info.history_length == 5000
    assert info.computed_length < 4999
    await worker.append(undisturbed, prompt)
    assert await generate(worker, sequence) == await generate(worker, undisturbed)


async def test_a_raising_model_fails_only_the_culprit(worker: Worker) -> None:
    healthy, sick, twin = [await worker.open() for _ in range(3)]
    await worker.append(healthy, [1, 2, 3])
    await worker.append(twin, [1, 2, 3])
    await worker.append(sick, [4, POISON])
    tasks = [asyncio.create_task(generate(worker, sequence, 30)) for sequence in (healthy, sick)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], SessionFailed)
    assert isinstance(results[1].__cause__, FloatingPointError)
    assert results[0] == await generate(worker, twin, 30)
    assert await worker.tokens(sick) == [4, POISON]
    await worker.rewind(sick, 1)
    assert len(await generate(worker, sick, 3)) == 3  # nothing was committed, so it goes on


async def test_logits_that_are_not_finite_fail_the_sequence_for_good(worker: Worker) -> None:
    healthy, sick = await worker.open(), await worker.open()
    await worker.append(healthy, [1, 2, 3])
    await worker.append(sick, [4, NAN])
    results = await asyncio.gather(generate(worker, healthy, 10), generate(worker, sick, 10), return_exceptions=True)
    assert isinstance(results[0], list)
    assert isinstance(results[1], NonFiniteLogits)
    assert "not finite" in (worker.info(sick).failure or "")
    with pytest.raises(SessionFailed, match="has failed"):
        await worker.append(sick, [1])
    assert await worker.close(sick) == 2


async def test_a_broken_invariant_fails_loudly_and_is_counted(worker: Worker) -> None:
    sequence, other = await worker.open(), await worker.open()
    await worker.append(sequence, [1, 2, 3])
    await worker.append(other, [1, 2, 3])
    engine = engine_of(worker)

    def advance(slab: Slab) -> None:
        slab.length += 1  # a token that the history does not have

    def forget(slab: Slab) -> None:
        slab.high = 0  # as if the slab had gone back

    engine.tamper = advance
    with pytest.raises(InvariantViolated, match="INV-1"):
        await generate(worker, sequence)
    assert worker.info(sequence).inv1_violations == 1
    with pytest.raises(SessionFailed):
        await generate(worker, sequence)
    engine.tamper = forget
    with pytest.raises(InvariantViolated, match="INV-2"):
        await generate(worker, other)
    assert worker.info(other).inv2_violations == 1


async def test_one_operation_at_a_time(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1])
    async with worker.generate(sequence, greedy(100_000)) as stream:
        await anext(stream)
        for attempt in (
            worker.append(sequence, [1]),
            generate(worker, sequence),
            worker.rewind(sequence, 0),
            worker.fork(sequence),
            worker.snapshot(sequence),
        ):
            with pytest.raises(SessionBusy):
                await attempt
        assert await anext(stream)


async def test_closing_in_mid_stream_ends_it_and_frees_the_slab(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1])
    async with worker.generate(sequence, greedy(100_000)) as stream:
        await anext(stream)
        await worker.close(sequence)
        assert (await stream.done()).stop_reason == StopReason.CANCELLED
    assert worker.num_free_slabs == 4
    with pytest.raises(SessionNotFound):
        worker.info(sequence)
    for attempt in (worker.append(sequence, [1]), worker.close(sequence), worker.tokens(sequence)):
        with pytest.raises(SessionNotFound):
            await attempt


async def test_bad_input_changes_nothing(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1, 2])
    before = worker.info(sequence)
    for tokens in ([], [64], [-1], [1, 2**40], [True], [1.0], ["a"], [None]):
        with pytest.raises(InvalidArgument):
            await worker.append(sequence, tokens)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="outside the vocabulary"):
        worker.generate(sequence, greedy(stop_token_ids=frozenset({64})))
    for length in (-1, 3):
        with pytest.raises(InvalidArgument, match="cannot rewind"):
            await worker.rewind(sequence, length)
    with pytest.raises(InvalidArgument, match="cannot pin 5"):
        await worker.open(sink=5)
    assert worker.info(sequence) == before
    assert worker.num_free_slabs == 3
    empty = await worker.open()
    with pytest.raises(InvalidArgument, match="empty history"):
        await generate(worker, empty)


async def test_slabs_run_out_politely(worker: Worker) -> None:
    sequences = [await worker.open() for _ in range(4)]
    with pytest.raises(CapacityExhausted):
        await worker.open()
    with pytest.raises(CapacityExhausted):
        await worker.fork(sequences[0])
    await worker.close(sequences[0])
    await worker.open()


async def test_rewinding_gives_the_same_future(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [3, 1, 4, 1, 5])
    tokens = await generate(worker, sequence, 6)
    free = await worker.rewind(sequence, 5)
    assert (free.history_length, free.recomputed_tokens) == (5, 0)
    assert await generate(worker, sequence, 6) == tokens
    await worker.append(sequence, [2] * 100)
    far = await worker.rewind(sequence, 11)
    assert far.recomputed_tokens == 11
    assert (await worker.tokens(sequence))[5:] == tokens
    await worker.rewind(sequence, 5)
    assert await generate(worker, sequence, 6) == tokens
    await worker.rewind(sequence, 0)
    assert worker.info(sequence).history_length == 0


async def test_a_recompute_beyond_the_limit_is_refused() -> None:
    worker = Worker(WatchedEngine(), max_recompute_tokens=50)
    worker.start()
    sequence = await worker.open()
    await worker.append(sequence, [1] * 300)
    with pytest.raises(RecomputeTooLong, match="cannot rewind to 100"):
        await worker.rewind(sequence, 100)
    assert worker.info(sequence).history_length == 300
    assert (await worker.rewind(sequence, 50)).recomputed_tokens == 50
    worker.stop()


async def test_forks_go_their_own_way(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [7] * 40)
    fork = await worker.fork(sequence)
    options = {"temperature": 1.0, "max_tokens": 12}
    one = await generate(worker, sequence, choice=0, **options)
    two = await generate(worker, fork, choice=1, **options)
    assert one != two
    assert (await worker.tokens(fork))[:40] == [7] * 40


async def test_a_snapshot_continues_elsewhere_with_the_same_tokens(worker: Worker) -> None:
    sequence = await worker.open(sink=3)
    await worker.append(sequence, [token % 11 for token in range(90)])
    data = encode(await worker.snapshot(sequence))
    history = await worker.tokens(sequence)
    expected = await generate(worker, sequence, 20)
    other = Worker(WatchedEngine())
    other.start()
    restored = await other.restore(decode(data), history)
    assert await generate(other, restored, 20) == expected
    assert (await other.rewind(restored, 100)).recomputed_tokens == 0
    other.stop()


async def test_a_snapshot_that_does_not_fit_is_refused_by_name(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, list(range(30)))
    snapshot = await worker.snapshot(sequence)
    history = await worker.tokens(sequence)
    with pytest.raises(SnapshotMismatch, match="another history"):
        await worker.restore(snapshot, [*history[:-2], 0, 0])
    with pytest.raises(SnapshotMismatch, match="another history"):
        await worker.restore(snapshot, [9, *history[1:]])
    cases = {
        "model": WatchedEngine(fingerprint="other"),
        "recent": WatchedEngine(shape=SlabShape(recent=17, max_pin=4, prefill_chunk=8, rewind_tokens=8)),
        "larger slab": WatchedEngine(shape=SlabShape(recent=16, max_pin=0, prefill_chunk=1, rewind_tokens=0)),
    }
    for what, engine in cases.items():
        other = Worker(engine)
        other.start()
        with pytest.raises(SnapshotMismatch, match=what):
            await other.restore(snapshot, history)
        assert other.num_free_slabs == 4
        other.stop()


async def test_damaged_snapshot_files_are_noticed(worker: Worker) -> None:
    sequence = await worker.open()
    await worker.append(sequence, list(range(30)))
    data = encode(await worker.snapshot(sequence))
    for damaged in (b"", b"nonsense", data[: len(data) // 2], data[:-1], data[:-3] + b"\x01" + data[-2:]):
        with pytest.raises(SnapshotMismatch):
            decode(damaged)


async def test_a_caller_who_left_while_opening_leaves_no_slab_behind(worker: Worker) -> None:
    for _ in range(20):
        task = asyncio.create_task(worker.open())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    sequence = await worker.open()  # commands are taken in order, so all of the above have ended
    assert worker.num_free_slabs == 3
    await worker.close(sequence)


async def test_stopping_leaves_nobody_waiting() -> None:
    worker = Worker(WatchedEngine())
    worker.stop()  # never started: nothing to do
    worker.start()
    sequence = await worker.open()
    await worker.append(sequence, [1])
    task = asyncio.create_task(generate(worker, sequence, 1_000_000))
    while not worker.info(sequence).is_busy:
        await asyncio.sleep(0)
    await asyncio.to_thread(worker.stop)
    with pytest.raises(Draining):
        await task
    with pytest.raises(Draining):
        await worker.open()
    with pytest.raises(Draining):
        await generate(worker, sequence)


async def test_an_engine_that_fails_a_command_fails_only_its_caller(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = await worker.open()
    await worker.append(sequence, [1, 2])

    def broken(*arguments: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(worker.engine, "copy_slab", broken)
    with pytest.raises(SessionFailed, match="no room on the device"):
        await worker.fork(sequence)
    assert worker.num_free_slabs == 3
    monkeypatch.undo()
    assert len(await generate(worker, await worker.fork(sequence), 3)) == 3


@pytest.mark.parametrize("where", ["forward", "copy_slab"])
async def test_a_lost_device_ends_the_worker_and_leaves_nobody_waiting(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    sequence, neighbour = await worker.open(), await worker.open()
    for each in (sequence, neighbour):
        await worker.append(each, [1, 2])

    def lost(*arguments: object) -> None:
        raise OSError("the device fell off the bus")

    monkeypatch.setattr(worker.engine, where, lost)
    monkeypatch.setattr(worker.engine, "is_fatal", lambda error: isinstance(error, OSError))
    if where == "forward":
        with pytest.raises(Draining):
            await generate(worker, neighbour)
    else:
        with pytest.raises(SessionFailed, match="fell off the bus"):
            await worker.fork(sequence)
    with pytest.raises(Draining):
        await worker.open()
    await asyncio.to_thread(worker.stop)  # the thread must have ended before its excepthook is restored
    assert isinstance(worker.failure, OSError)


async def test_a_generation_on_a_stopped_worker_fails_at_once_also_when_left(worker: Worker) -> None:
    sequence = await worker.open()
    await asyncio.to_thread(worker.stop)
    stream = worker.generate(sequence, greedy(), [1])
    with pytest.raises(Draining):
        await stream.__aenter__()
    await stream.__aexit__(None, None, None)


async def test_the_worker_dying_of_a_bug_leaves_nobody_waiting(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    sequence = await worker.open()
    await worker.append(sequence, [1])

    def plan(scheduler: Scheduler) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Scheduler, "plan", plan)
    with pytest.raises(Draining):
        await generate(worker, sequence)
    with pytest.raises(Draining):
        await worker.open()
    await asyncio.to_thread(worker.stop)  # the thread must have ended before its excepthook is restored
    assert isinstance(worker.failure, ZeroDivisionError)


@pytest.mark.parametrize("most_unread", [4, 1 << 40])  # waiting for its reader, or computing when the loop is closed
def test_a_loop_that_closed_cancels_its_runs(monkeypatch: pytest.MonkeyPatch, most_unread: int) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNREAD", most_unread)
    worker = Worker(WatchedEngine())
    worker.start()

    async def abandon() -> int:
        sequence = await worker.open()
        await worker.append(sequence, [1])
        stream = worker.generate(sequence, greedy(1_000_000))
        await stream.__aenter__()
        while worker.info(sequence).history_length < min(1 + most_unread, 100):
            await asyncio.sleep(0.001)
        return sequence

    sequence = asyncio.run(abandon())

    async def resume() -> list[int]:
        await worker.open()
        while worker.info(sequence).is_busy:
            await asyncio.sleep(0.001)
        return await generate(worker, sequence, 3)

    assert len(asyncio.run(resume())) == 3
    worker.stop()
