"""What a session knows, and waits for, after a generation ended in one way or another."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from both import every, settled
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import errors

ENDLESS = 10**6
LOST = Fault()
REFUSED = Fault(status=grpc.StatusCode.RESOURCE_EXHAUSTED, code="capacity_exhausted")


async def leave(session: Any) -> None:
    generation = await settled(session.generate(max_tokens=ENDLESS))
    generation.cancel()


async def test_the_next_call_waits_until_the_server_has_let_go(session: Any, server: FakeServer) -> None:
    server.runtime.sessions[session.id].lingering = 3  # says busy three times
    session._flows.leave_stream()
    await settled(session.append([5]))
    assert Counter(server.faults.calls)["GetSessionInfo"] == 4


async def test_every_operation_can_follow_a_stream_that_was_left(session: Any) -> None:
    await leave(session)
    assert (await settled(session.append([5]))).history_length >= 4
    await leave(session)
    assert (await settled(session.rewind(2))).history_length == 2
    await leave(session)
    assert (await settled(session.fork(2))).history_length == 2
    await leave(session)
    assert await every(session.history(0, 2))
    await leave(session)
    assert len(await every(session.export())) >= 2
    await leave(session)
    assert len(await every(await settled(session.generate(max_tokens=1)))) == 1
    await leave(session)
    assert len(await every(await settled(session.turn([7], max_tokens=1)))) == 1
    await leave(session)
    await settled(session.close())


async def test_waiting_for_the_server_ends(session: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_sdk.session_flows.SETTLE_S", 0.01)
    server.runtime.sessions[session.id].lingering = 10**6
    session._flows.leave_stream()
    with pytest.raises(errors.SessionBusy):
        await settled(session.append([5]))


async def test_a_finished_generation_needs_no_question(session: Any, server: FakeServer) -> None:
    await every(await settled(session.generate(max_tokens=2, logit_bias={2: -100})))
    assert (await settled(session.append([5]))).history_length == 6
    assert Counter(server.faults.calls)["GetSessionInfo"] == 0


async def test_a_refused_generation_changes_nothing(session: Any, server: FakeServer) -> None:
    server.faults.plan("Generate", REFUSED)
    with pytest.raises(errors.CapacityExhausted):
        await every(await settled(session.generate(max_tokens=2)))
    assert session.history_length == 3
    await settled(session.append([5]))
    assert Counter(server.faults.calls)["GetSessionInfo"] == 0


async def test_a_turn_lost_before_its_first_event_cannot_be_added_twice(session: Any, server: FakeServer) -> None:
    server.faults.plan("Turn", LOST)
    server.runtime.sessions[session.id].give([5, 6])  # it had arrived
    with pytest.raises(errors.ConnectionFailed):
        await every(await settled(session.turn([5, 6], max_tokens=2)))
    with pytest.raises(errors.HistoryConflict):
        await settled(session.append([5, 6]))


async def test_a_lost_generation_makes_the_length_unknown(session: Any, server: FakeServer) -> None:
    server.faults.plan("Generate", LOST)
    server.runtime.sessions[session.id].give([7])  # a token that was sampled and never seen
    with pytest.raises(errors.ConnectionFailed):
        await every(await settled(session.generate(max_tokens=2)))
    assert session.history_length is None
    assert (await settled(session.append([5]))).history_length == 5


async def test_an_unread_generation_does_not_spoil_the_length(session: Any, server: FakeServer) -> None:
    generation = await settled(session.generate(max_tokens=2, logit_bias={2: -100}))
    assert await asyncio.to_thread(server.runtime.finished.acquire, timeout=30)
    assert (await settled(session.append([5]))).history_length == 6
    await every(generation)
    assert session.history_length == 6


async def test_a_dropped_generation_was_left(session: Any, server: FakeServer) -> None:
    generation = await settled(session.generate(max_tokens=ENDLESS))
    del generation
    server.runtime.sessions[session.id].lingering = 3
    await settled(session.append([5]))
    assert Counter(server.faults.calls)["GetSessionInfo"] >= 4
