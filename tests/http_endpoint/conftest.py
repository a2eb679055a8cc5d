"""A server that the tests of a file share, and a client of it."""

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio

from tests.serving import Server, default_chat, serving, wordy_engine
from tests.talking import client_of


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that all share; what it opened is closed behind it."""
    async with client_of(server) as client:
        yield client
        for view in (await client.get("/sessions")).json()["data"]:
            await client.delete(f"/sessions/{view['session_id']}")
        assert server.worker.num_free_slabs == 4
