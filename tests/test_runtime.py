"""The runtime on a real worker: callers who leave at any moment, and what they leave behind."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.chat.reply import ReplyEnd, TokenUsage
from holdfast.chats.events import TurnEvent, TurnResponse
from holdfast.engine.worker import Worker
from holdfast.errors import CapacityExhausted, Draining, InvalidArgument, RecomputeTooLong, SessionBusy, SessionNotFound
from holdfast.generation import Sampled, SamplingParams
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.service import RuntimeService
from holdfast.serving.http.dialects.chat import ChatReplies
from holdfast.serving.http.render import ChatWriter
from holdfast.serving.http.response import TurnResponder
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions.runtime import Runtime
from tests.serving import SlowEngine, default_chat, held, model_of
from tests.talking import until

T = TypeVar("T")
OWNER = "ann"
GREEDY = SamplingParams(seed=0, max_tokens=5, temperature=0)


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine(forward_s=0.001)


@pytest.fixture
async def runtime(engine: SlowEngine) -> AsyncIterator[Runtime]:
    worker = Worker(engine, max_recompute_tokens=400)
    backend = EmbeddedBackend(worker, model_of(worker.engine))
    backend.start()
    yield Runtime(backend)
    backend.stop()


async def _sampled(runtime: Runtime, session: str, params: SamplingParams = GREEDY, **options: object) -> list[int]:
    batches = runtime.generate(session, OWNER, params, **options)  # type: ignore[arg-type]
    async with contextlib.aclosing(batches):
        return [event.token async for batch in batches for event in batch if isinstance(event, Sampled)]


def _tokens(runtime: Runtime, session: str) -> list[int]:
    return [token for piece in runtime.history(session, OWNER) for token in piece.tokens]


async def _listed(runtime: Runtime) -> list[str]:
    return [view.session_id for view in (await runtime.list_sessions(OWNER)).views]


def _is_there(runtime: Runtime, session: str) -> bool:
    with contextlib.suppress(SessionNotFound):
        return bool(runtime.info(session, OWNER))
    return False


@contextlib.asynccontextmanager
async def _computing(engine: SlowEngine, work: Coroutine[Any, Any, T]) -> "AsyncIterator[asyncio.Task[T]]":
    """`work` as a task for which the engine is in the middle of a forward, where it stays while the context lasts."""
    before = engine.num_forwards
    with held(engine):
        task = asyncio.ensure_future(work)
        await until(lambda: engine.num_forwards > before)
        yield task


async def _idle(runtime: Runtime, session: str) -> None:
    await until(lambda: not runtime.info(session, OWNER).is_busy)


async def _cancel_while_computing(
    runtime: Runtime, engine: SlowEngine, session: str, work: Coroutine[Any, Any, object]
) -> None:
    async with _computing(engine, work) as task:
        assert runtime.info(session, OWNER).is_busy
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _idle(runtime, session)


async def test_an_append_whose_caller_left_keeps_its_tokens(runtime: Runtime, engine: SlowEngine) -> None:
    session = (await runtime.create(OWNER)).session_id
    prompt = [token % 7 for token in range(2000)]
    await _cancel_while_computing(runtime, engine, session, runtime.append(session, OWNER, prompt))
    assert _tokens(runtime, session) == prompt
    assert len(await _sampled(runtime, session)) == 5
    assert runtime.info(session, OWNER).inv1_violations == 0


async def test_a_turn_whose_caller_left_while_prefilling_keeps_what_it_gave(
    runtime: Runtime, engine: SlowEngine
) -> None:
    session = (await runtime.create(OWNER, tokens=[1])).session_id
    prompt = [token % 7 for token in range(2000)]
    await _cancel_while_computing(runtime, engine, session, _sampled(runtime, session, tokens=prompt))
    assert _tokens(runtime, session) == [1, *prompt]
    assert (await runtime.append(session, OWNER, [3])).history_length == 2002


async def test_a_recompute_whose_caller_left_is_finished_later(runtime: Runtime, engine: SlowEngine) -> None:
    session = (await runtime.create(OWNER, tokens=[token % 7 for token in range(600)])).session_id
    await _cancel_while_computing(runtime, engine, session, runtime.rewind(session, OWNER, 350))
    view = runtime.info(session, OWNER)
    assert (view.history_length, view.rewind_count) == (350, 1)
    assert len(await _sampled(runtime, session)) == 5


async def test_a_rewind_that_would_recompute_too_much_changes_nothing(runtime: Runtime) -> None:
    session = (await runtime.create(OWNER, tokens=[1] * 600)).session_id
    with pytest.raises(RecomputeTooLong) as caught:
        await runtime.rewind(session, OWNER, 500)
    assert int(caught.value.details["lowest_free_position"]) > 500
    with pytest.raises(RecomputeTooLong):
        await runtime.fork(session, OWNER, at_position=500)
    assert await _listed(runtime) == [session]
    assert runtime.info(session, OWNER).history_length == 600


async def test_a_caller_who_leaves_twice_still_frees_the_session(runtime: Runtime) -> None:
    session = (await runtime.create(OWNER, tokens=[1])).session_id
    task = asyncio.create_task(_sampled(runtime, session, SamplingParams(seed=0, max_tokens=10**6, temperature=0)))
    await until(lambda: runtime.info(session, OWNER).is_busy and len(_tokens(runtime, session)) >= 3)
    task.cancel()
    await asyncio.sleep(0)  # it has heard that, and is about to leave
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _idle(runtime, session)
    assert len(await _sampled(runtime, session)) == 5
    assert runtime.info(session, OWNER).inv1_violations == 0


async def test_a_creation_whose_tokens_are_wrong_leaves_nothing(runtime: Runtime) -> None:
    with pytest.raises(InvalidArgument, match="not a token id"):
        await runtime.create(OWNER, tokens=[1, 9999])
    assert await _listed(runtime) == []


async def test_draining_admits_nothing_and_waits_for_what_runs(runtime: Runtime, engine: SlowEngine) -> None:
    session = (await runtime.create(OWNER, tokens=[1])).session_id
    work = _sampled(runtime, session, SamplingParams(seed=0, max_tokens=50, temperature=0))
    async with _computing(engine, work) as task:
        assert not await runtime.drain(0.001)
        for attempt in (runtime.create(OWNER), runtime.append(session, OWNER, [1])):
            with pytest.raises(Draining):
                await attempt
    assert await runtime.drain(60)
    assert len(await task) == 50
    assert await runtime.close(session, OWNER) == 51


async def test_random_interleavings_never_lose_a_place_or_a_token(runtime: Runtime) -> None:
    """Many clients, few places: append, generate, fork, rewind, close, and leaving at any moment."""
    source = random.Random(4)
    refusals = (SessionBusy, SessionNotFound)

    async def client(number: int) -> None:
        session = (await runtime.create(OWNER, tokens=[number])).session_id
        for _ in range(12):
            operation = source.choice(["append", "generate", "leave", "rewind", "fork", "close"])
            try:
                if operation == "append":
                    await runtime.append(session, OWNER, [1, 2, 3])
                elif operation == "generate":
                    await _sampled(runtime, session)
                elif operation == "leave":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(source.random() / 50):
                            await _sampled(runtime, session, SamplingParams(seed=1, max_tokens=500))
                elif operation == "rewind":
                    await runtime.rewind(session, OWNER, 1)
                elif operation == "fork":
                    with contextlib.suppress(CapacityExhausted):  # two forks beside three busy sessions
                        await runtime.close((await runtime.fork(session, OWNER))[0].session_id, OWNER)
                else:
                    await runtime.close(session, OWNER)
                    session = (await runtime.create(OWNER, tokens=[number])).session_id
            except refusals:
                session = (await runtime.create(OWNER, tokens=[number])).session_id

    await asyncio.gather(*(client(number) for number in range(3)))
    for view in (await runtime.list_sessions(OWNER)).views:
        assert (view.inv1_violations, view.inv2_violations, view.is_busy) == (0, 0, False)
        await runtime.close(view.session_id, OWNER)
    assert [(await runtime.create(OWNER)).session_id for _ in range(4)]


async def test_a_rewind_cancelled_before_the_engine_got_to_it_leaves_both_sides_agreeing(
    runtime: Runtime, engine: SlowEngine
) -> None:
    neighbour = (await runtime.create(OWNER)).session_id
    session = (await runtime.create(OWNER, tokens=list(range(20)))).session_id
    for _ in range(10):
        async with _computing(engine, runtime.append(neighbour, OWNER, [1] * 100)) as busy:
            task = asyncio.create_task(runtime.rewind(session, OWNER, 10))
            await until(lambda: runtime.info(session, OWNER).is_busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await _idle(runtime, session)
        length = runtime.info(session, OWNER).history_length
        done = await runtime.append(session, OWNER, [1] * (20 - length) or [2])
        assert done.history_length == max(20, length + 1)
        await runtime.rewind(session, OWNER, 20)
        await busy


async def test_an_operation_overtaken_by_close_is_told_so(runtime: Runtime, engine: SlowEngine) -> None:
    session = (await runtime.create(OWNER, tokens=[1])).session_id
    async with _computing(engine, runtime.append(session, OWNER, [1] * 3000)) as task:
        closing = asyncio.ensure_future(runtime.close(session, OWNER))
        await until(lambda: not _is_there(runtime, session))
    await closing
    with pytest.raises(SessionNotFound) as caught:
        await task
    assert caught.value.detail == "closed"


async def test_a_refused_empty_append_leaves_no_trace(runtime: Runtime) -> None:
    session = (await runtime.create(OWNER, tokens=[1, 2])).session_id
    await _sampled(runtime, session)
    before = runtime.info(session, OWNER)
    with pytest.raises(InvalidArgument):
        await runtime.append(session, OWNER, [])
    assert runtime.info(session, OWNER).given == before.given


async def test_the_reaper_looks_again_before_every_removal() -> None:
    now = 0.0
    engine = SlowEngine(forward_s=0.001)
    backend = EmbeddedBackend(Worker(engine), model_of(engine))
    backend.start()
    runtime = Runtime(backend, idle_ttl_s=0.01, clock=lambda: now)
    ids = [(await runtime.create(OWNER, tokens=[1])).session_id for _ in range(4)]
    real_close, closing, may_close = backend.close, asyncio.Event(), asyncio.Event()

    async def slow_close(handle: int) -> int:
        length = await real_close(handle)
        if not closing.is_set():
            closing.set()
            await may_close.wait()
        return length

    backend.close = slow_close  # type: ignore[method-assign]
    now = 1.0
    reaper = asyncio.create_task(runtime.reap())
    await until(closing.is_set)  # the first one is being removed, the others wait for that
    assert [_is_there(runtime, session) for session in ids] == [False, True, True, True]
    await runtime.close(ids[2], OWNER)
    work = _sampled(runtime, ids[1], SamplingParams(seed=0, max_tokens=60, temperature=0))
    async with _computing(engine, work) as task:
        may_close.set()
        await until(lambda: not _is_there(runtime, ids[3]))  # the reaper went past the other two
        assert _is_there(runtime, ids[1])
    assert len(await task) == 60
    assert not reaper.done()
    reaper.cancel()
    backend.stop()


async def test_who_has_heard_that_a_generation_is_done_may_go_on_at_once(runtime: Runtime) -> None:
    session = (await runtime.create(LOCAL_OWNER)).session_id
    for _ in range(3):
        asked = pb.TurnRequest(session_id=session, token_ids=[1, 2], max_tokens=5)
        events = RuntimeService(runtime).Turn(asked, None)
        kinds = []
        async for event in events:
            kinds.append(event.WhichOneof("event"))
            assert runtime.info(session, LOCAL_OWNER).is_busy is (kinds[-1] != "done")
        assert kinds.count("token") == 5
        assert kinds[-1] == "done"


async def test_a_turns_ending_is_told_once_its_session_is_free() -> None:
    is_free = False

    async def events() -> AsyncGenerator[TurnEvent, None]:
        nonlocal is_free
        usage = TokenUsage(prompt_tokens=1, completion_tokens=1, prefilled_tokens=1)
        yield ReplyEnd(message={"role": "assistant", "content": "a"}, finish_reason="stop", tokens=(), usage=usage)
        yield TurnResponse(body=b"{}", number=7)
        is_free = True

    writer = ChatWriter(model="m", tokenizer=default_chat().model.tokenizer)
    turn = TurnResponder(events(), reply=ChatReplies(), writer=writer, confirm=lambda number: None)
    told = [(chunk, is_free) async for chunk in turn.chunks()]
    assert [free for _, free in told] == [True, True]
    assert b'"finish_reason":"stop"' in told[0][0]
    assert turn.response is not None
    assert turn.response.number == 7


async def test_a_session_that_is_made_while_another_one_closes_gets_its_slab(runtime: Runtime) -> None:
    others = [(await runtime.create(OWNER)).session_id for _ in range(4)]
    for _ in range(20):
        closing = asyncio.ensure_future(runtime.close(others.pop(0), OWNER))
        made = asyncio.ensure_future(runtime.create(OWNER))
        await asyncio.gather(closing, made)
        others.append(made.result().session_id)
    for session in others:  # nobody had to make room
        assert runtime.info(session, OWNER).state == "live"
