"""Every way of leaving a generation tells the server to stop."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from both import each, every, settled
from conftest import Connect
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import AsyncClient, AsyncGeneration, Client, errors

ENDLESS = 10**6


@pytest.fixture
def sync_session(server: FakeServer) -> Iterator[Any]:
    with Client(server.address) as client:
        yield client.create_session(token_ids=[1, 2, 3])


def wait_until_left(server: FakeServer) -> None:
    assert server.runtime.left.acquire(timeout=30), "the server was not told"


def test_leaving_the_loop_cancels(sync_session: Any, server: FakeServer) -> None:
    generation = sync_session.generate(max_tokens=ENDLESS)
    for token in generation:
        assert token
        break
    wait_until_left(server)
    assert not generation.is_done
    assert len(generation.tokens) == 1
    with pytest.raises(errors.Cancelled):
        list(generation)


def test_an_error_in_the_loop_cancels(sync_session: Any, server: FakeServer) -> None:
    generation = sync_session.generate(max_tokens=ENDLESS)

    def stumble() -> None:
        for token in generation:
            raise LookupError(token)

    with pytest.raises(LookupError):
        stumble()
    wait_until_left(server)


def test_leaving_the_block_cancels(sync_session: Any, server: FakeServer) -> None:
    with sync_session.generate(max_tokens=ENDLESS) as generation:
        tokens = iter(generation)
        next(tokens)
    wait_until_left(server)


def test_dropping_it_cancels(sync_session: Any, server: FakeServer) -> None:
    generation = sync_session.generate(max_tokens=ENDLESS)
    tokens = iter(generation)
    next(tokens)
    del generation, tokens
    wait_until_left(server)


def test_cancelling_from_another_thread_ends_the_loop(sync_session: Any, server: FakeServer) -> None:
    generation = sync_session.generate(max_tokens=ENDLESS)
    caught: list[type] = []
    begun = threading.Event()

    def read() -> None:
        try:
            for _ in generation:
                begun.set()
        except errors.Cancelled as error:
            caught.append(type(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(timeout=30)
    generation.cancel()
    reader.join(timeout=30)
    assert caught == [errors.Cancelled]
    wait_until_left(server)


@pytest.fixture
async def async_session(server: FakeServer) -> Any:
    async with AsyncClient(server.address) as client:
        yield await client.create_session(token_ids=[1, 2, 3])


async def left(server: FakeServer) -> None:
    await asyncio.to_thread(wait_until_left, server)


async def test_leaving_the_async_loop_cancels(async_session: Any, server: FakeServer) -> None:
    generation = await async_session.generate(max_tokens=ENDLESS)
    async for token in generation:
        assert token
        break
    await left(server)
    with pytest.raises(errors.Cancelled):
        await every(generation)


async def test_leaving_the_async_block_cancels(async_session: Any, server: FakeServer) -> None:
    async with await async_session.generate(max_tokens=ENDLESS) as generation:
        tokens = aiter(generation)
        await anext(tokens)
    await left(server)


async def test_dropping_an_async_one_cancels(async_session: Any, server: FakeServer) -> None:
    generation = await async_session.generate(max_tokens=ENDLESS)
    tokens = aiter(generation)
    await anext(tokens)
    del generation, tokens
    await left(server)


async def test_cancelling_the_task_cancels_the_call_and_the_task(async_session: Any, server: FakeServer) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in await async_session.generate(max_tokens=ENDLESS):
            begun.set()

    reader = asyncio.create_task(read())
    await begun.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await left(server)


async def test_cancelling_from_another_task_ends_the_loop_not_the_task(async_session: Any, server: FakeServer) -> None:
    generation = await async_session.generate(max_tokens=ENDLESS)
    begun = asyncio.Event()

    async def read() -> str:
        try:
            async for _ in generation:
                begun.set()
        except errors.Cancelled:
            return "cancelled"
        return "ended"

    reader = asyncio.create_task(read())
    await begun.wait()
    generation.cancel()
    assert await reader == "cancelled"
    await left(server)


async def test_a_timeout_around_the_loop_works(async_session: Any, server: FakeServer) -> None:
    server.faults.plan("Generate", Fault(stalls=True, num_events=1))
    generation = await async_session.generate(max_tokens=9)

    async def read() -> None:
        async with asyncio.timeout(0.1):
            async for _ in generation:
                pass

    with pytest.raises(TimeoutError) as kept:  # with all its frames, so that nothing is dropped
        await read()
    await left(server)
    server.runtime.sessions[async_session.id].lingering = 3  # the next call has to wait, and knows it
    assert (await async_session.append([5])).history_length == 5
    assert kept


def test_one_that_outlives_its_event_loop_can_be_dropped(server: FakeServer) -> None:
    kept: list[AsyncGeneration] = []

    async def begin() -> None:
        session = await AsyncClient(server.address).create_session(token_ids=[1])
        kept.append(await session.generate(max_tokens=ENDLESS))
        await anext(aiter(kept[0]))

    asyncio.run(begin())
    kept.clear()
    gc.collect()
    wait_until_left(server)


async def test_closing_the_client_ends_the_loop(connect: Connect, server: FakeServer) -> None:
    client = connect()
    generation = await settled((await settled(client.create_session(token_ids=[1]))).generate(max_tokens=ENDLESS))

    async def read() -> None:
        async for _ in each(generation):
            await settled(client.close())

    with pytest.raises(errors.Cancelled):
        await read()
