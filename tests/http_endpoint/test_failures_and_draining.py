"""Generations that fail, before and in mid-stream, and a server that is going away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.engine.interface import Row
from tests.http_endpoint.shared import CHAT
from tests.serving import SlowEngine, default_chat, held, serving, wordy_engine
from tests.talking import chat_path, client_of, events_of, eventually, open_session, refusal_of, said, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


class FailingEngine(SlowEngine):
    """Computes NaN from the `fails_at`-th forward on."""

    fails_at = 8

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        logits = super().forward(rows)
        return logits * np.nan if self.num_forwards >= self.fails_at else logits


@contextlib.asynccontextmanager
async def failing(fails_at: int) -> AsyncIterator[httpx.AsyncClient]:
    shaped = wordy_engine()
    engine = FailingEngine(shape=shaped.shape, vocab_size=shaped.info.vocab_size, forward_s=0)
    engine.fails_at = fails_at
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        yield client


async def test_an_error_in_mid_stream_is_an_event_and_then_the_stream_ends() -> None:
    async with failing(5) as client:
        session = await open_session(client)
        for path in (chat_path(session), CHAT):
            async with client.stream("POST", path, json=said("hi", stream=True, max_tokens=50)) as response:
                if path == CHAT:  # fails from the first token on: there is a status for it
                    await response.aread()
                    assert refusal_of(response) == (500, "session_failed")
                    break
                assert response.status_code == 200
                events = [event async for event in events_of(response)]
            assert events[-1]["error"]["code"] == "session_failed"
            assert events[-1]["error"]["type"] == "api_error"
            assert text_of(events)
        assert (await client.get(f"/sessions/{session}")).json()["state"] == "failed"


async def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    async with failing(1) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json=said("hi", stream=stream))
            assert refusal_of(response) == (500, "session_failed")


async def test_readiness_ends_with_draining_while_what_runs_may_end() -> None:
    leaving, engine = contextlib.AsyncExitStack(), wordy_engine()
    server = await leaving.enter_async_context(serving(engine, default_chat(), drain_s=60))
    async with client_of(server) as client:
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        session = await open_session(client)
        async with client.stream("POST", CHAT, json=said("hi", stream=True, max_tokens=150)) as response:
            events = events_of(response)
            await anext(events)
            with held(engine):
                closing = asyncio.create_task(leaving.aclose())
                ready = await eventually(lambda: client.get("/readyz"), lambda answer: answer.status_code != 200)
                assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
                assert (await client.get("/health")).status_code == 200
                for path in (CHAT, chat_path(session)):
                    refused = await client.post(path, json=said("hi"))
                    assert refusal_of(refused) == (503, "draining")
                    assert int(refused.headers["retry-after"]) > 0
            rest = [event async for event in events]
            assert rest[-1] == "[DONE]"
            assert rest[-2]["choices"][0]["finish_reason"] == "length"
        await closing
