"""What is sent again by itself, and what never is."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from both import every, settled
from conftest import Connect
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import errors
from holdfast_sdk.gen import runtime_pb2 as pb

LOST = Fault()  # UNAVAILABLE, before anything was done
LOST_ANSWER = Fault(after=True)
DRAINING = Fault(code="draining")
BUSY = Fault(status=grpc.StatusCode.ABORTED, code="session_busy")


def count(server: FakeServer, rpc: str) -> int:
    return Counter(server.faults.calls)[rpc]


@pytest.mark.parametrize("fault", [LOST, DRAINING])
async def test_reading_is_repeated(fault: Fault, client: Any, session: Any, server: FakeServer) -> None:
    for rpc in ("GetModelInfo", "GetSessionInfo", "ListSessions"):
        server.faults.plan(rpc, fault, fault, fault)
    await settled(client.model_info())
    await settled(session.info())
    await every(client.list_sessions())
    assert [count(server, rpc) for rpc in ("GetModelInfo", "GetSessionInfo", "ListSessions")] == [4, 4, 4]


async def test_repeating_ends(connect: Connect, server: FakeServer) -> None:
    server.faults.plan("GetModelInfo", *[LOST] * 9)
    with pytest.raises(errors.ConnectionFailed):
        await settled(connect(retries=2).model_info())
    assert count(server, "GetModelInfo") == 3


@pytest.mark.parametrize("code", ["journal_failed", "storage_unavailable", "upstream_unreachable", "upstream_aborted"])
async def test_other_unavailable_codes_are_told_at_once(code: str, client: Any, server: FakeServer) -> None:
    server.faults.plan("GetModelInfo", Fault(code=code))
    with pytest.raises(errors.HoldfastError) as caught:
        await settled(client.model_info())
    assert caught.value.code == code
    assert count(server, "GetModelInfo") == 1


@pytest.mark.parametrize("fault", [LOST, DRAINING])
async def test_an_append_that_did_not_arrive_is_repeated(fault: Fault, session: Any, server: FakeServer) -> None:
    server.faults.plan("AppendTokens", fault)
    appended = await settled(session.append([5, 6]))
    assert (appended.history_length, appended.prefilled_tokens) == (5, 2)
    appends = [request for request in server.faults.requests if isinstance(request, pb.AppendTokensRequest)]
    assert [request.expected_history_length for request in appends] == [3, 3]


async def test_an_append_whose_answer_was_lost_is_not_added_twice(session: Any, server: FakeServer) -> None:
    server.faults.plan("AppendTokens", LOST_ANSWER)
    appended = await settled(session.append([5, 6]))
    assert (appended.history_length, appended.prefilled_tokens) == (5, None)
    assert session.history_length == 5
    assert server.runtime.sessions[session.id].tokens == [1, 9690, 198, 5, 6]
    assert (await settled(session.append([7]))).history_length == 6


async def test_a_lost_append_that_still_runs_is_waited_for(session: Any, server: FakeServer) -> None:
    server.faults.plan("AppendTokens", LOST_ANSWER, BUSY)
    assert (await settled(session.append([5, 6]))).history_length == 5
    assert count(server, "AppendTokens") == 3


async def test_a_conflict_at_the_first_attempt_is_told(session: Any, server: FakeServer) -> None:
    with pytest.raises(errors.HistoryConflict) as caught:
        await settled(session.append([5], expected_history_length=2))  # 2 + 1 is the real length, by chance
    assert caught.value.history_length == 3
    assert count(server, "AppendTokens") == 1


async def test_a_conflict_with_another_length_after_a_lost_attempt_is_told(
    client: Any, session: Any, server: FakeServer
) -> None:
    await settled(client.session(session.id).append([8, 9]))  # somebody else was here
    server.faults.plan("AppendTokens", LOST)
    with pytest.raises(errors.HistoryConflict):
        await settled(session.append([5]))
    assert server.runtime.sessions[session.id].tokens == [1, 9690, 198, 8, 9]


async def test_after_a_conflict_the_session_refuses_until_it_has_looked(client: Any, session: Any) -> None:
    await settled(client.session(session.id).append([8, 9]))
    for _ in range(2):
        with pytest.raises(errors.HistoryConflict):
            await settled(session.append([5]))
    await settled(session.info())
    assert session.history_length == 5
    assert (await settled(session.append([5]))).history_length == 6


async def test_a_busy_session_is_told_at_once(session: Any, server: FakeServer) -> None:
    server.faults.plan("AppendTokens", BUSY)
    with pytest.raises(errors.SessionBusy):
        await settled(session.append([5]))
    assert count(server, "AppendTokens") == 1


async def test_what_is_not_safe_is_sent_once(client: Any, session: Any, server: FakeServer) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "CreateSession": client.create_session,
        "ForkSession": session.fork,
        "RewindSession": partial(session.rewind, 1),
        "CloseSession": session.close,
    }
    for rpc, call in calls.items():
        before = count(server, rpc)
        server.faults.plan(rpc, LOST)
        with pytest.raises(errors.ConnectionFailed):
            await settled(call())
        assert count(server, rpc) == before + 1
    for rpc in ("Generate", "Turn"):
        server.faults.plan(rpc, LOST)
        ids = [[5]] if rpc == "Turn" else []
        with pytest.raises(errors.ConnectionFailed):
            await every(await settled(getattr(session, rpc.lower())(*ids, max_tokens=2)))
        assert count(server, rpc) == 1


async def test_a_handle_asks_for_the_length_once(client: Any, session: Any, server: FakeServer) -> None:
    handle = client.session(session.id)
    assert handle.history_length is None
    assert count(server, "GetSessionInfo") == 0
    await settled(handle.append([5]))
    await settled(handle.append([6]))
    assert count(server, "GetSessionInfo") == 1
    assert handle.history_length == 5


async def test_all_attempts_share_one_deadline(connect: Connect, server: FakeServer) -> None:
    server.faults.plan("GetModelInfo", LOST, Fault(stalls=True))
    with pytest.raises(errors.DeadlineExceeded):
        await settled(connect(timeout_s=0.3).model_info())
