"""Servers that share a journal: a request reaches the member that owns its session, whoever gets it, whoever dies."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from holdfast.config import ServeConfig
from holdfast.errors import Fenced, NotServing
from holdfast.serving.cluster.membership import Cluster
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.http.app import _SESSION
from holdfast.serving.http.openapi import build
from tests.postgres import execute, fresh_database
from tests.serving import Server, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, events_of, eventually, open_session, refusal_of, said, until
from tests.test_events import listening
from tests.test_grpc import create, generate, refused, self_signed

LEASE_S = 2.0  # of tests in which a member dies
VARYING = re.compile(
    rb'"?(session_id|id|request_id|item_id|created|created_at|completed_at|idle_seconds|last_used_at|[a-z_]*timestamp|[a-z_]+_s|[a-z_]*duration[a-z_]*|[a-z_]*turn_id)"?'
    rb': ?"?[^",}]*"?'
)

PIECE_OF_TEXT = re.compile(rb'("(?:content|text|delta)":")((?:[^"\\]|\\.)+)(?=")')

OWN_HEADERS = ("date", "x-request-id", "request-id", "content-length", "content-disposition", "holdfast-turn")


@contextlib.asynccontextmanager
async def member(name: str, url: str, **options: Any) -> AsyncIterator[Server]:
    engine = options.pop("engine", None) or wordy_engine(forward_s=0)
    async with serving(engine, default_chat(), journal=url, member=name, **options) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[tuple[Server, Server]]:
    with fresh_database() as url:
        engines = [wordy_engine(num_slabs=32, forward_s=0) for _ in range(2)]
        async with member("a", url, engine=engines[0]) as first, member("b", url, engine=engines[1]) as second:
            yield first, second


pytestmark = pytest.mark.asyncio(loop_scope="module")


def forwards(server: Server, door: str, outcome: str = "answered") -> float:
    return server.metrics.cluster_forwards.labels(door, outcome)._value.get()


# The same bytes

CHAT = said("hi", temperature=0)
MESSAGE = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
RESPONSE = {"input": "hello", "max_output_tokens": 4, "temperature": 0}
# Requests on one session, in this order; `{response}` is the id of the latest response of the Responses API.
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    ("POST", "/v1/chat/completions", {"messages": "none"}),
    ("POST", "/v1/messages", MESSAGE),
    ("POST", "/v1/messages", MESSAGE | {"stream": True}),
    ("POST", "/v1/messages", {"messages": 7}),
    ("POST", "/v1/messages/count_tokens", MESSAGE),
    ("POST", "/v1/responses", RESPONSE | {"stream": True}),
    ("POST", "/v1/responses", RESPONSE),
    ("GET", "/v1/responses/{response}", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("POST", "/v1/conversations", {}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/test", None),
    ("POST", "/reward", {"reward": 1.5}),
    ("POST", "/samples", {}),
    ("GET", "/search?query=hi&in_view=true", None),
    ("GET", "/tokens?turn=1&limit=9", None),
    ("HEAD", "/events", None),
    ("GET", "/export?snapshot=false", None),
    ("POST", "/fork", {"label": "fork"}),
    ("GET", "?branches=all", None),
    ("DELETE", "", None),
    ("GET", "", None),
]


async def answers(client: httpx.AsyncClient, session: str) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of every request, without ids and times."""
    found, response_id = [], ""
    for method, path, body in REQUESTS:
        url = f"/sessions/{session}{path.replace('{response}', response_id)}"
        response = await client.request(method, url, json=body)
        content = response.content
        if path == "/v1/responses" and response.headers["content-type"] == "application/json":
            response_id = response.json()["id"]
        for name in {session, response_id} - {""}:
            content = content.replace(name.encode(), b"ID")
        assert int(response.headers.get("content-length", len(response.content))) == len(response.content)
        headers = {k: v for k, v in response.headers.items() if k not in OWN_HEADERS}
        if path.startswith(("/export", "/samples")):  # their checksums are over ids and times
            content = b""
        if headers.get("content-type", "").startswith("text/event-stream"):
            content = with_joined_text(content)
        found.append((response.status_code, headers, VARYING.sub(b"", content)))
    return found


def with_joined_text(stream: bytes) -> bytes:
    """A stream in which events that differ by nothing but their piece of text are one: how many tokens an event takes
    depends on the time between them."""
    assert stream.endswith(b"\n\n") or not stream
    lines: list[bytes] = []
    pieces: list[bytes] = []
    for event in stream.split(b"\n\n"):
        numbered = re.sub(rb'"sequence_number":\d+,?', b"", event)
        shape = PIECE_OF_TEXT.sub(rb"\1", VARYING.sub(b"", numbered))
        if not lines or shape != lines[-1] or not PIECE_OF_TEXT.search(event):
            lines.append(shape)
            pieces.append(b"")
        pieces[-1] += b"".join(piece for _, piece in PIECE_OF_TEXT.findall(event))
    return b"\n\n".join(line + b" " + piece for line, piece in zip(lines, pieces, strict=True))


async def test_every_route_of_a_session_answers_the_same_through_another_member(pair: tuple[Server, Server]) -> None:
    first, second = pair
    async with client_of(first) as direct, client_of(second) as through:
        before = forwards(second, "http")
        one, other = await open_session(direct, history="forest"), await open_session(direct, history="forest")
        expected, found = await answers(direct, one), await answers(through, other)
    for request, plain, forwarded in zip(REQUESTS, expected, found, strict=True):
        assert forwarded == plain, request
    assert {headers["holdfast-member"] for _, headers, _ in found} == {"a"}
    assert forwards(second, "http") == before + len(REQUESTS)


async def test_files_of_a_session_are_the_same_bytes_through_another_member(pair: tuple[Server, Server]) -> None:
    first, second = pair
    async with client_of(first) as direct, client_of(second) as through:
        session = await open_session(direct)
        await through.post(chat_path(session), json=CHAT)
        one, other = [(await client.post(f"/sessions/{session}/samples")).content for client in (direct, through)]
        assert one == other
        exported = [(await client.get(f"/sessions/{session}/export")).content for client in (direct, through)]
        assert len(exported[0]) == len(exported[1])  # the time is in them
        for content in exported:
            imported = await through.post("/sessions/import", content=content)
            assert imported.json()["recomputed_tokens"] == 0, imported.text


async def test_the_requests_above_cover_every_route_of_a_session() -> None:
    paths = {path for path in build()["paths"] if path.startswith(_SESSION)}
    asked = {
        f"{_SESSION}{path.partition('?')[0]}".replace("{response}", "{response_id}").replace(
            "models/test", "models/{model}"
        )
        for _, path, _ in REQUESTS
    }
    assert asked == paths


async def test_a_named_session_is_one_on_all_members(pair: tuple[Server, Server]) -> None:
    first, second = pair
    headers = {"holdfast-session": "one of a kind"}
    async with client_of(first) as direct, client_of(second) as through:
        one = await direct.post("/v1/chat/completions", json=CHAT, headers=headers)
        other = await through.post("/v1/chat/completions", json=CHAT | {"seed": 2}, headers=headers)
        assert one.headers["holdfast-session"] == other.headers["holdfast-session"]
        assert (other.headers["holdfast-member"], other.headers.get("deprecation")) == ("a", None)
        shown = await through.get(f"/sessions/{one.headers['holdfast-session']}?branches=all")
        assert len(shown.json()["records"]) == 2


async def test_a_request_is_forwarded_once_at_most(pair: tuple[Server, Server]) -> None:
    first, second = pair
    async with client_of(first) as direct, client_of(second) as through:
        session = await open_session(direct)
        again = {"holdfast-forwarded": "c"}
        response = await through.post(chat_path(session), json=CHAT, headers=again)
        assert (refusal_of(response), response.headers["holdfast-refused"]) == (
            (421, "session_elsewhere"),
            "session_elsewhere",
        )
        assert (await direct.post(chat_path(session), json=CHAT, headers=again)).status_code == 200
        tokens = await create(first, [1, 2, 3])
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await second.stub.GetSessionInfo(
                pb.GetSessionInfoRequest(session_id=tokens), metadata=(("holdfast-forwarded", "c"),)
            )
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_passes_as_it_comes_and_a_client_that_leaves_cancels_the_turn_at_the_owner() -> None:
    engine = wordy_engine(forward_s=0.01)
    with fresh_database() as url:
        async with (
            member("a", url, engine=engine) as first,
            member("b", url) as second,
            client_of(first) as direct,
            client_of(second) as through,
        ):
            session = await open_session(direct)
            body = said("hi", max_tokens=200, stream=True)
            async with through.stream("POST", chat_path(session), json=body) as response:
                events = events_of(response)
                for _ in range(5):
                    await anext(events)
                assert (await direct.get(f"/sessions/{session}")).json()["is_busy"]
            shown = await eventually(lambda: direct.get(f"/sessions/{session}"), lambda r: not r.json()["is_busy"], 5)
            assert (shown.json()["turns"], shown.json()["history_length"]) == (0, 0)
            tokens = await create(first, [1, 2, 3])
            call = generate(second, tokens, max_tokens=200)
            await call.read()
            call.cancel()

            async def info() -> pb.SessionInfo:
                return await first.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=tokens))

            assert (await eventually(info, lambda told: not told.busy, 5)).history_length < 150


async def test_grpc_calls_answer_the_same_through_another_member(pair: tuple[Server, Server]) -> None:
    first, second = pair
    one, other = await create(first, [5, 6, 7]), await create(first, [5, 6, 7])

    async def calls(server: Server, session: str) -> list[Any]:
        answered: list[Any] = [[event.WhichOneof("event") for event in await read(generate(server, session, seed=3))]]
        stub = server.stub
        answered.append(
            await stub.AppendTokens(
                pb.AppendTokensRequest(session_id=session, token_ids=[9], expected_history_length=8)
            )
        )
        answered[-1].ClearField("prefill_duration_seconds")
        answered += await read(stub.GetHistory(pb.GetHistoryRequest(session_id=session)))
        search = pb.SearchHistoryRequest(session_id=session, query="hi", include_in_view=True)
        answered.append(await stub.SearchHistory(search))
        answered.append(await stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=4)))
        fork = await stub.ForkSession(pb.ForkSessionRequest(session_id=session))
        answered.append(fork.history_length)
        async with refused(grpc.StatusCode.ABORTED, "history_conflict", history_length="4"):
            await stub.AppendTokens(
                pb.AppendTokensRequest(session_id=session, token_ids=[9], expected_history_length=99)
            )
        answered.append(len(await read(stub.ExportSession(pb.ExportSessionRequest(session_id=session)))) > 0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await read(stub.Generate(pb.GenerateRequest(session_id=session, max_tokens=100_000), timeout=0.05))
        answered.append(late.value.code())
        await stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="closed"):
            await stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
        return answered

    before = forwards(second, "grpc")
    assert await calls(second, other) == await calls(first, one)
    assert forwards(second, "grpc") >= before + 8


async def read(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_owners_stay_apart_across_members(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-a\nbob:secret-b\n")
    with fresh_database() as url:
        async with (
            member("a", url, keys_file=str(keys)) as first,
            member("b", url, keys_file=str(keys)) as second,
            client_of(first, "secret-a") as ann,
            client_of(second, "secret-a") as ann_there,
            client_of(second, "secret-b") as bob_there,
        ):
            session = await open_session(ann)
            assert (await ann_there.get(f"/sessions/{session}")).headers["holdfast-member"] == "a"
            foreign, unknown = [await bob_there.get(f"/sessions/{name}") for name in (session, "f" * len(session))]
            assert refusal_of(foreign) == refusal_of(unknown) == (404, "session_not_found")
            assert foreign.headers["holdfast-member"] == unknown.headers["holdfast-member"] == "b"
            assert foreign.text.replace(session, "") == unknown.text.replace("f" * len(session), "")
            assert (
                refusal_of(await ann_there.get(f"/sessions/{session}", headers={"authorization": "Bearer x"}))[0] == 401
            )


# Where sessions are, and who is there


async def test_a_new_session_goes_where_there_is_room() -> None:
    with fresh_database() as url:
        async with (
            member("a", url, engine=wordy_engine(num_slabs=1, forward_s=0), max_parked=9) as first,
            member("b", url, engine=wordy_engine(num_slabs=2, forward_s=0), max_parked=9) as second,
            client_of(first) as client,
        ):
            await asyncio.sleep(0.3)  # what a saw of others when it joined is too old by then
            where = [(await client.post("/sessions")).headers["holdfast-member"] for _ in range(2)]
            assert where == ["a", "b"]
            session = await create(first, [1, 2])
            assert (await second.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))).history_length == 2
            assert second.worker.num_free_slabs == 0
            assert (await client.post("/sessions")).headers["holdfast-member"] == "a"  # nobody has room


async def test_the_cluster_is_told_at_both_doors(pair: tuple[Server, Server]) -> None:
    first, second = pair
    async with client_of(second) as client:
        told = (await client.get("/cluster")).json()
    assert (told["this"], told["is_cluster"]) == ("b", True)
    assert [(m["name"], m["state"], m["http"], m["grpc"]) for m in told["members"]] == [
        ("a", "serving", first.http, first.address),
        ("b", "serving", second.http, second.address),
    ]
    assert all(0 < m["lease_left_s"] <= 10 and m["epoch"] > 0 for m in told["members"])
    answer = await first.stub.GetCluster(pb.GetClusterRequest())
    assert (answer.this_member, [m.name for m in answer.members]) == ("a", ["a", "b"])


async def test_a_server_without_a_cluster_is_its_only_member() -> None:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as client:
        told = (await client.get("/cluster")).json()
        assert (told["is_cluster"], [m["name"] for m in told["members"]]) == (False, [told["this"]])
        assert (told["members"][0]["lease_left_s"], told["members"][0]["room"]) == (None, 4)
        answer = await server.stub.GetCluster(pb.GetClusterRequest())
        assert (answer.is_cluster, answer.members[0].HasField("lease_left_seconds")) == (False, False)


async def test_other_members_use_the_peer_addresses() -> None:
    with fresh_database() as url:
        async with (
            member("a", url, peer_http="127.0.0.1:0", peer_grpc="127.0.0.1:0") as first,
            member("b", url) as second,
            client_of(first) as direct,
            client_of(second) as through,
        ):
            [there, _] = (await through.get("/cluster")).json()["members"]
            assert there["http"] != first.http
            assert there["grpc"] != first.address
            session, tokens = await open_session(direct), await create(first, [1])
            assert (await through.post(chat_path(session), json=CHAT)).headers["holdfast-member"] == "a"
            told = await second.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=tokens))
            assert told.history_length == 1


# Who goes, and who dies


async def test_a_member_that_stops_hands_its_sessions_over_at_once() -> None:
    with fresh_database() as url:
        async with member("b", url) as second, client_of(second) as through:
            async with member("a", url) as first, client_of(first) as direct:
                session, tokens = await open_session(direct), await create(first, [1, 2, 3])
                before = (await through.post(chat_path(session), json=CHAT)).json()
            started = time.monotonic()
            shown = (await through.get(f"/sessions/{session}")).json()
            told = await second.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=tokens))
            assert time.monotonic() - started < 5  # the lease is 10 s
            assert shown["messages"][-1]["content"] == before["choices"][0]["message"]["content"]
            assert told.history_length == 3
            told = await eventually(lambda: through.get("/cluster"), lambda r: len(r.json()["members"]) == 1, 5)
            assert told.json()["members"][0]["name"] == "b"


async def test_a_session_of_a_dead_member_is_answered_when_its_lease_has_ended() -> None:
    with fresh_database() as url:
        async with member("b", url, lease_s=LEASE_S) as second, client_of(second) as through:
            async with member("a", url) as first, client_of(first) as direct:
                session, tokens = await open_session(direct), await create(first, [1, 2, 3])
            await asyncio.sleep(LEASE_S - 0.5)  # b may not call others dead before
            # As if "a" had been killed: its row stays, and nobody listens at its addresses.
            execute(url, "UPDATE members SET state = 'serving' WHERE name = 'a'")
            execute(url, "UPDATE leases SET until = clock_timestamp() + interval '1 s' WHERE name = 'a'")
            execute(url, "UPDATE sessions SET member = 'a'")
            started = time.monotonic()
            answer, told = await asyncio.gather(
                through.post(chat_path(session), json=CHAT),
                second.stub.AppendTokens(pb.AppendTokensRequest(session_id=tokens, token_ids=[4])),
            )
            assert (answer.status_code, answer.headers["holdfast-member"]) == (200, "b")
            assert told.history_length == 4
            assert 0.5 < time.monotonic() - started < 1 + 2
            assert forwards(second, "http", "unreached") > 0
            assert forwards(second, "grpc", "unreached") > 0
            assert second.metrics.cluster_takeovers._value.get() == 2


async def test_a_member_that_hangs_is_not_waited_for_beyond_its_lease() -> None:
    with fresh_database() as url, socket.create_server(("127.0.0.1", 0)) as deaf:  # it accepts, and never answers
        async with member("b", url, lease_s=LEASE_S) as second, client_of(second) as through:
            async with member("a", url) as first, client_of(first) as direct:
                session, other = await open_session(direct), await open_session(direct)
            await asyncio.sleep(LEASE_S - 0.5)  # b may not call others dead before
            address = f"127.0.0.1:{deaf.getsockname()[1]}"
            execute(url, f"UPDATE members SET state = 'serving', http = '{address}' WHERE name = 'a'")
            execute(url, "UPDATE leases SET until = clock_timestamp() + interval '1 s' WHERE name = 'a'")
            execute(url, "UPDATE sessions SET member = 'a'")
            started = time.monotonic()
            shown, turn = await asyncio.gather(
                through.get(f"/sessions/{session}"), through.post(chat_path(other), json=CHAT)
            )
            assert time.monotonic() - started < 1 + 2
            assert (shown.status_code, shown.headers["holdfast-member"]) == (200, "b")
            assert (refusal_of(turn), turn.headers["retry-after"]) == ((503, "journal_failed"), "1")
            assert "may be on record" in turn.text
            assert (await through.post(chat_path(other), json=CHAT)).status_code == 200


async def test_events_of_a_session_come_through_another_member_until_it_moves() -> None:
    with fresh_database() as url:
        async with member("b", url) as second, client_of(second) as through:
            async with contextlib.AsyncExitStack() as stack:
                first = await stack.enter_async_context(member("a", url))
                async with client_of(first) as direct:
                    session = await open_session(direct)
                    async with listening(through, f"/sessions/{session}/events") as stream:
                        assert stream.response.headers["holdfast-member"] == "a"
                        await direct.post(chat_path(session), json=CHAT)
                        events = await stream.until("turn")
                        stopping = asyncio.ensure_future(stack.aclose())
                        assert (await stream.rest())[-1] == ("closed", {"why": "moved"})
                        await stopping
            async with listening(through, f"/sessions/{session}/events") as stream:
                assert stream.response.headers["holdfast-member"] == "b"
                assert (await stream.next())[1]["turn"] == events[-1][1]["turn"] == 1


async def test_members_trust_each_other_by_their_certificates(tmp_path: Path) -> None:
    chain, key = self_signed(tmp_path)
    trusted = grpc.ssl_channel_credentials(chain.read_bytes())
    options = {"tls_cert": str(chain), "tls_key": str(key), "peer_ca": str(chain), "advertise": "localhost"}
    with fresh_database() as url:
        async with (
            member("a", url, **options) as first,
            member("b", url, **options) as second,
            httpx.AsyncClient(base_url=f"https://{first.http}", verify=False) as direct,
            httpx.AsyncClient(base_url=f"https://{second.http}", verify=False) as through,
            grpc.aio.secure_channel(second.address.replace("127.0.0.1", "localhost"), trusted) as channel,
        ):
            session = await open_session(direct)
            assert (await through.post(chat_path(session), json=CHAT)).headers["holdfast-member"] == "a"
            stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
            assert (await stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))).history_length > 0
            assert forwards(second, "grpc") == 1


async def test_a_fenced_server_ends_at_once_and_says_why() -> None:
    with fresh_database() as url:

        async def fence() -> None:
            async with member("a", url, drain_s=60) as first, client_of(first) as client:
                session = await open_session(client)
                execute(url, "UPDATE members SET state = 'dead' WHERE name = 'a'")
                execute(url, "UPDATE sessions SET member = NULL")
                response = await client.post(chat_path(session), json=CHAT)
                assert refusal_of(response) == (503, "fenced")
                await asyncio.sleep(10)

        started = time.monotonic()
        with pytest.raises(ExceptionGroup) as ended:
            await fence()
        assert ended.group_contains(Fenced, match="must stop")
        assert time.monotonic() - started < 10


async def test_a_member_without_a_lease_refuses_requests_of_sessions() -> None:
    class Lost:
        name, lease_ends_at = "a", 0.0

    class Idle:
        metrics, num_free_slabs = None, 1

    cluster = Cluster(Lost(), Idle(), ServeConfig(journal="postgresql://nowhere"))  # type: ignore[arg-type]
    with pytest.raises(NotServing, match="lease of member a has expired") as refusal:
        async with cluster.using("s", "me"):
            pass
    assert refusal.value.details == {"accepted": "false"}
    with pytest.raises(NotServing):
        await cluster.check_room()


@pytest.mark.slow
async def test_a_rolling_restart_under_load_loses_no_turn_and_fails_nothing_that_is_retried_once() -> None:
    names = "abc"
    servers: dict[str, Server] = {}
    num_turns = dict.fromkeys(range(6), 0)
    is_over = False
    with fresh_database() as url:

        async def talk(agent: int) -> None:
            turn = itertools.cycle(names)
            session = ""
            history: list[dict[str, Any]] = []
            while not is_over:
                history = [*history, {"role": "user", "content": f"turn {num_turns[agent]}"}]
                body = CHAT | {"messages": history}
                headers = {"idempotency-key": f"{agent} {num_turns[agent]}"}
                for attempt in range(2):
                    server = servers[next(name for name in turn if name in servers)]
                    try:
                        async with client_of(server) as client:
                            session = session or await open_session(client)
                            response = await client.post(chat_path(session), json=body, headers=headers)
                        if response.status_code == 200:
                            break
                        assert attempt == 0, response.text
                        assert response.status_code == 503, response.text
                    except httpx.TransportError:
                        assert attempt == 0
                history.append(response.json()["choices"][0]["message"])
                num_turns[agent] += 1
            async with client_of(servers["a"]) as client:
                shown = (await client.get(f"/sessions/{session}")).json()
            assert shown["turns"] == num_turns[agent]
            assert [m["content"] for m in shown["messages"]] == [m["content"] for m in history]

        def large(name: str) -> contextlib.AbstractAsyncContextManager[Server]:
            return member(name, url, engine=wordy_engine(num_slabs=8, forward_s=0), max_parked=16)

        async def a_turn_each() -> None:
            before = dict(num_turns)
            is_done = lambda: all(num_turns[agent] > num for agent, num in before.items())  # noqa: E731
            await until(lambda: is_done() or any(agent.done() for agent in agents))
            for agent in agents:
                assert not agent.done() or agent.result()

        async with contextlib.AsyncExitStack() as rest:
            stacks = {name: await rest.enter_async_context(contextlib.AsyncExitStack()) for name in names}
            for name, stack in stacks.items():
                servers[name] = await stack.enter_async_context(in_a_task(large(name)))
            agents = [asyncio.ensure_future(talk(agent)) for agent in num_turns]
            rest.callback(lambda: [agent.cancel() for agent in agents])
            for name, stack in stacks.items():
                await a_turn_each()
                del servers[name]
                await stack.aclose()
                servers[name] = await stack.enter_async_context(in_a_task(large(name)))
            await a_turn_each()
            is_over = True
            await asyncio.gather(*agents)


@contextlib.asynccontextmanager
async def in_a_task(context: contextlib.AbstractAsyncContextManager[Server]) -> AsyncIterator[Server]:
    """So that servers may stop in another order than they have started."""
    started: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()

    async def hold() -> None:
        async with context as server:
            started.set_result(server)
            await stopping.wait()

    task = asyncio.ensure_future(hold())
    try:
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        yield started.result()
    finally:
        stopping.set()
        await task


@pytest.mark.slow
async def test_the_sessions_of_a_killed_process_are_answered_by_others_in_time(tmp_path: Path) -> None:
    with fresh_database() as url, contextlib.ExitStack() as stack:
        started = [start(name, url, tmp_path, stack) for name in "ab"]
        (dying, first), (_, second) = [await ready(*one) for one in started]
        async with httpx.AsyncClient(timeout=30) as client:
            session = (await client.post(f"{first}/sessions")).json()["session_id"]
            await asyncio.sleep(3)
            dying.send_signal(signal.SIGKILL)
            await asyncio.to_thread(dying.wait)  # what is sent to it before may be lost
            killed = time.monotonic()
            response = await client.post(f"{second}/sessions/{session}/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.headers["holdfast-member"]) == (200, "b"), response.text
            assert time.monotonic() - killed < 3 + 2


def start(name: str, url: str, folder: Path, stack: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder / name
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command += ["--journal", url, "--member", name, "--lease-s", "3", "--sessions", "4"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(os.environ, NO_COLOR="1"))
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, log


async def ready(process: subprocess.Popen[bytes], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    async def text() -> str:
        shown = await asyncio.to_thread(log.read_text)
        assert process.poll() is None, shown
        return shown

    banner = await eventually(text, lambda shown: "/sessions" in shown)
    found = re.search(r"http://[0-9.:]+(?=/sessions)", banner)
    assert found, banner
    return process, found.group()
