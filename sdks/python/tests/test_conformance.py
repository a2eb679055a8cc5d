"""The conformance scenarios against a real server with the real default model, named by the environment."""

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from both import settled
from holdfast_sdk import AsyncClient, Client
from scenarios import NAMES, load, run_scenario

SERVER = "HOLDFAST_CONFORMANCE_SERVER"
REQUIRE = "HOLDFAST_REQUIRE_CONFORMANCE"


@pytest.fixture(params=[Client, AsyncClient])
async def real_client(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    address = os.environ.get(SERVER)
    if not address:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {SERVER} names no server: start one and set {SERVER}=127.0.0.1:PORT")
        pytest.skip(f"{SERVER} names no server")
    client = request.param(address)
    yield client
    await settled(client.close())


@pytest.mark.parametrize("name", NAMES)
async def test_the_real_server_passes(name: str, real_client: Any) -> None:
    await run_scenario(real_client, load(name))
