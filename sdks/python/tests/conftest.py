"""A real server on a free port for every test, and both clients to talk to it."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from both import settled
from fake_server import FakeServer
from holdfast_sdk import AsyncClient, Client, flow

Connect = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer().start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait here; how long they would is tested in test_flow.py."""
    monkeypatch.setattr(flow, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=[Client, AsyncClient])
async def connect(request: pytest.FixtureRequest, server: FakeServer) -> AsyncIterator[Connect]:
    """Makes clients of one kind, by default to the server; they are closed at the end."""
    made: list[Any] = []

    def make(address: str | list[str] | None = None, **options: Any) -> Any:
        made.append(request.param(address or server.address, **options))
        return made[-1]

    yield make
    for client in made:
        await settled(client.close())


@pytest.fixture
async def client(connect: Connect) -> Any:
    return connect()


@pytest.fixture
async def session(client: Any) -> Any:
    return await settled(client.create_session(token_ids=[1, 9690, 198]))
