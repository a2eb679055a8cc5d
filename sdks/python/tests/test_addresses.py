"""Several addresses of one cluster: one is used until it is gone, then the next, and nothing is done twice."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from both import every, settled
from conftest import Connect
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import AsyncClient, Client, Member, address, errors
from holdfast_sdk.gen import runtime_pb2 as pb

DEAD = "127.0.0.1:1"
LOST = Fault()
TURNED_AWAY = Fault(code="draining", details={"accepted": "false"})
ELSEWHERE = Fault(code="session_elsewhere")
READS = ["GetModelInfo", "GetSessionInfo", "ListSessions", "GetHistory"]
GONE = [LOST, TURNED_AWAY, ELSEWHERE, Fault(code="draining"), Fault(code="fenced")]


@pytest.fixture
def other(server: FakeServer) -> Iterator[FakeServer]:
    """Another member of the cluster that `server` belongs to."""
    other = FakeServer(runtime=server.runtime).start()
    yield other
    other.stop()


async def every_call(client: Any) -> None:
    """Each call once; fails where one of them fails."""
    session = await settled(client.create_session(token_ids=[1, 9690, 198]))
    await settled(session.append([5]))
    assert len(await every(await settled(session.turn([6], max_tokens=2)))) == 2
    assert len(await every(await settled(session.generate(max_tokens=2)))) == 2
    await settled(session.rewind(5))
    await settled(session.info())
    assert [token for chunk in await every(session.history()) for token in chunk.token_ids] == [1, 9690, 198, 5, 6]
    fork = await settled(session.fork())
    imported = await settled(client.import_session(await every(session.export())))
    for each in (session, fork, imported):
        await settled(each.close())
    await settled(client.model_info())
    await every(client.list_sessions())


async def test_a_dead_address_is_passed_over_by_every_call(connect: Connect, server: FakeServer) -> None:
    started = time.monotonic()
    await every_call(connect([DEAD, server.address], retries=0))
    for call in ("create_session", "model_info"):
        await settled(getattr(connect([DEAD, "127.0.0.1:2", server.address], retries=0), call)())
    assert time.monotonic() - started < 5


async def test_an_address_that_accepts_and_says_nothing_costs_one_short_timeout(
    connect: Connect, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "CONNECT_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        client = connect([f"127.0.0.1:{silent.getsockname()[1]}", server.address], retries=0)
        await every_call(client)
        assert 0.15 < time.monotonic() - started < 5


async def test_a_member_that_goes_away_between_calls_is_passed_over(
    connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    client = connect([server.address, other.address], retries=0)
    session = await settled(client.create_session(token_ids=[1]))
    server.stop()
    await settled(session.append([5]))
    assert [token.id for token in await every(await settled(session.turn([6], max_tokens=1)))]
    assert server.runtime.sessions[session.id].tokens[:3] == [1, 5, 6]
    await every_call(client)
    assert other.faults.calls[:2] == ["AppendTokens", "Turn"]


@pytest.mark.parametrize("fault", GONE)
async def test_the_next_address_stays_in_use(
    fault: Fault, connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    client = connect([server.address, other.address], retries=0)
    session = await settled(client.create_session(token_ids=[1]))
    for rpc in READS:
        server.faults.plan(rpc, fault)
    await settled(client.model_info())
    await settled(session.info())
    await every(client.list_sessions())
    await every(session.history())
    assert (server.faults.calls, other.faults.calls) == (["CreateSession", "GetModelInfo"], READS)
    other.faults.plan("GetModelInfo", fault)
    await settled(client.model_info())  # round and round
    assert server.faults.calls[-1] == "GetModelInfo"


@pytest.mark.parametrize("fault", [TURNED_AWAY, ELSEWHERE])
async def test_what_nobody_has_begun_is_sent_to_the_next_address(
    fault: Fault, connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    for rpc in ("CreateSession", "Turn", "Generate", "RewindSession", "ForkSession", "ExportSession", "CloseSession"):
        server.faults.plan(rpc, fault)
        other.faults.plan(rpc, fault, fault)
    await every_call(connect([server.address, other.address], retries=2))


@pytest.mark.parametrize("fault", [LOST, Fault(code="draining"), Fault(code="fenced")])
async def test_what_may_have_arrived_is_not_sent_to_the_next_address(
    fault: Fault, connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    client = connect([server.address, other.address])
    session = await settled(client.create_session(token_ids=[1]))
    server.faults.plan("Turn", fault)
    with pytest.raises(errors.HoldfastError) as caught:
        await every(await settled(session.turn([5], max_tokens=1)))
    assert not caught.value.is_untouched
    assert "Turn" not in other.faults.calls
    await every(await settled(session.turn([6], max_tokens=1)))  # the caller decides; the next address is in use
    assert server.runtime.sessions[session.id].tokens[:2] == [1, 6]
    assert "Turn" in other.faults.calls


async def test_a_stream_that_has_begun_is_not_begun_again(
    connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    client = connect([server.address, other.address])
    session = await settled(client.create_session(token_ids=[1, 2, 3]))
    server.faults.plan("Generate", Fault(code="session_elsewhere", num_events=1))
    with pytest.raises(errors.SessionElsewhere):
        await every(await settled(session.generate(max_tokens=3)))
    assert "Generate" not in other.faults.calls


async def test_an_append_whose_answer_was_lost_is_not_added_twice_elsewhere(
    connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    client = connect([server.address, other.address], retries=0)
    session = await settled(client.create_session(token_ids=[1]))
    server.faults.plan("AppendTokens", Fault(after=True))
    appended = await settled(session.append([5, 6]))
    assert (appended.history_length, appended.prefilled_tokens) == (3, None)
    assert server.runtime.sessions[session.id].tokens == [1, 5, 6]


async def test_a_conflict_after_attempts_that_never_arrived_is_told(connect: Connect, server: FakeServer) -> None:
    session = await settled(connect().create_session(token_ids=[1, 2]))
    handle = connect([DEAD, server.address]).session(session.id)
    with pytest.raises(errors.HistoryConflict):
        await settled(handle.append([5], expected_history_length=1))  # 1 + 1 is the real length, by chance


async def test_all_addresses_are_tried_in_every_round(connect: Connect, server: FakeServer, other: FakeServer) -> None:
    for each in (server, other):
        each.faults.plan("GetModelInfo", *[LOST] * 9)
    with pytest.raises(errors.ConnectionFailed):
        await settled(connect([server.address, other.address], retries=2).model_info())
    assert (len(server.faults.calls), len(other.faults.calls)) == (3, 3)


async def test_where_nobody_answers_the_error_says_that_nothing_was_sent(connect: Connect) -> None:
    with pytest.raises(errors.ConnectionFailed) as caught:
        await settled(connect([DEAD, "nobody.invalid:1"], retries=0).create_session())
    assert caught.value.is_untouched
    assert caught.value.grpc_status is grpc.StatusCode.UNAVAILABLE


async def test_an_address_that_does_not_answer_in_time_is_left(
    connect: Connect, server: FakeServer, other: FakeServer
) -> None:
    server.faults.plan("GetModelInfo", Fault(stalls=True))
    client = connect([server.address, other.address], timeout_s=0.3)
    with pytest.raises(errors.DeadlineExceeded):
        await settled(client.model_info())
    await settled(client.model_info())
    assert other.faults.calls == ["GetModelInfo"]


async def test_the_members_of_a_cluster_are_told(connect: Connect, server: FakeServer) -> None:
    cluster = await settled(connect([DEAD, server.address], retries=0).cluster())
    assert (cluster.this_member, cluster.is_cluster, len(cluster.members)) == ("a", True, 2)
    facts = {"state": "serving", "epoch": 2, "sessions": 0, "room": 3, "version": "1", "http": "h:1", "grpc": "g:1"}
    assert cluster.members[0] == Member(name="a", lease_left_s=7.5, **facts)  # type: ignore[arg-type]
    assert cluster.members[1].lease_left_s is None


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_list_of_addresses_is_checked_whole(kind: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        kind([])
    with pytest.raises(ValueError, match="host:port"):
        kind(["127.0.0.1:1", "http://127.0.0.1:2"])
    with pytest.raises(ValueError, match=r"plain text to 10\.0\.0\.1:1"):
        kind(["127.0.0.1:1", "10.0.0.1:1"], api_key="k")


def test_closing_closes_every_connection(server: FakeServer, other: FakeServer) -> None:
    client = Client([server.address, other.address])
    client.model_info()
    server.faults.plan("GetModelInfo", LOST)
    client.model_info()
    client.close()
    for stub in client._wire._stubs:
        with pytest.raises(ValueError, match="closed"):
            stub.GetModelInfo(pb.GetModelInfoRequest())
