"""What one owner may take from others: replies without end, quotas, turns in the queue, streams that nobody reads."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.chats import retry
from holdfast.config import ServeConfig
from holdfast.engine import stream as engine_stream
from holdfast.serving import lifecycle
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.sessions.journal import rows
from tests.serving import Server, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, eventually, open_session, refusal_of, said, until
from tests.test_grpc import create, events_of, generate, info, refused
from tests.test_http_load import CHAT, FOR_EVER, queued, streaming, value
from tests.test_relay import chats_of, chatting

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
WITHOUT_END = 2_147_483_647
STALL_S = 0.3


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("ann:secret-a\nbob:secret-b\n")
    return str(path)


# Replies without end


async def test_a_reply_ends_at_the_servers_limit_whatever_max_tokens_says_at_both_doors() -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), max_reply_tokens=5) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        for path in (CHAT, chat_path(session), "/v1/completions"):
            body = {"prompt": "hi", "max_tokens": WITHOUT_END} if path == "/v1/completions" else said("hi")
            reply = (await client.post(path, json=body | {"max_tokens": WITHOUT_END})).json()
            assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 5), path
        tokens = await create(server, [1])
        events = await events_of(generate(server, tokens, max_tokens=WITHOUT_END))
        assert (len(events), events[-1].done.stop_reason) == (6, pb.STOP_REASON_MAX_TOKENS)


def test_the_embedded_engine_has_a_limit_by_default_and_an_upstream_its_own() -> None:
    assert ServeConfig().reply_limit == 32_768
    assert ServeConfig(backend="sglang").reply_limit == 0
    assert ServeConfig(backend="sglang", max_reply_tokens=7).reply_limit == 7


async def test_an_upstream_is_asked_for_no_more_tokens_than_a_reply_may_have() -> None:
    async with chatting(max_reply_tokens=5) as (relay, upstream):
        session = await open_session(relay.http)
        for asked, got in (({"max_tokens": WITHOUT_END}, 5), ({"max_tokens": 3}, 3), ({}, 5)):
            body = {"messages": said("hi")["messages"]} | asked
            reply = await relay.http.post(chat_path(session), json=body)
            assert reply.status_code == 200, reply.text
            assert chats_of(upstream)[-1]["max_tokens"] == got
        body = {"messages": said("hi")["messages"], "max_completion_tokens": 9}
        await relay.http.post(chat_path(session), json=body)
        assert chats_of(upstream)[-1]["max_completion_tokens"] == 5
        assert "max_tokens" not in chats_of(upstream)[-1]


# Quotas


async def test_an_owner_has_as_many_sessions_as_its_quota_at_both_doors_together(keys_file: str) -> None:
    async with (
        serving(wordy_engine(), default_chat(), keys_file=keys_file, owner_max_sessions=2, max_parked=9) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        metadata = [("authorization", "Bearer secret-a")]
        made = await asyncio.gather(*(ann.post("/sessions", json={}) for _ in range(6)))  # at once: none slips through
        assert sorted(response.status_code for response in made) == [200, 200, 429, 429, 429, 429]
        first = next(response.json()["session_id"] for response in made if response.status_code == 200)
        error = error_of(next(response for response in made if response.status_code == 429))
        assert (error["code"], error["setting"], error["limit"]) == ("quota_exceeded", "--owner-max-sessions", "2")
        assert "--owner-max-sessions" in error["message"]
        async with refused(EXHAUSTED, "quota_exceeded", setting="--owner-max-sessions"):
            await server.stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)
        assert refusal_of(await ann.post(f"/sessions/{first}/fork", json={})) == (429, "quota_exceeded")
        exported = (await ann.get(f"/sessions/{first}/export")).content
        assert refusal_of(await ann.post("/sessions/import", content=exported)) == (429, "quota_exceeded")
        assert (await ann.post(CHAT, json=said("hi", n=2))).status_code == 200  # sessions for one reply do not count
        await open_session(bob)
        assert (await ann.delete(f"/sessions/{first}")).status_code == 204
        await open_session(ann)


async def test_sessions_of_the_last_process_count_and_a_full_owner_loses_none(tmp_path: Path) -> None:
    for limit, status in ((2, 200), (1, 429)):
        async with (
            serving(wordy_engine(), default_chat(), data_dir=str(tmp_path), owner_max_sessions=limit) as server,
            client_of(server) as client,
        ):
            made = await client.post("/sessions", json={})
            assert made.status_code == status
            assert len((await client.get("/sessions")).json()["data"]) == 1


async def test_an_owner_runs_no_more_than_its_quota_at_both_doors_and_others_pass(keys_file: str) -> None:
    async with (
        serving(wordy_engine(), default_chat(), keys_file=keys_file, owner_max_running=1) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        metadata = [("authorization", "Bearer secret-a")]
        session = (
            await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[1]), metadata=metadata)
        ).session_id
        async with streaming(ann, CHAT, max_tokens=FOR_EVER):
            waiting = asyncio.create_task(ann.post(CHAT, json=said("hi")))
            await queued(server, 1)
            request = pb.GenerateRequest(session_id=session, max_tokens=2)
            over_grpc = asyncio.create_task(events_of(server.stub.Generate(request, metadata=metadata)))
            await queued(server, 2)
            assert (await bob.post(CHAT, json=said("hi"))).status_code == 200
            assert not waiting.done()
            assert not over_grpc.done()
            too_wide = await bob.post(CHAT, json=said("hi", n=2))
            assert refusal_of(too_wide) == (400, "invalid_argument")
            assert "--owner-max-running" in error_of(too_wide)["message"]
        assert (await waiting).status_code == 200
        assert len(await over_grpc) == 3


async def test_where_nobody_waits_the_quota_is_named() -> None:
    async with (
        serving(wordy_engine(), default_chat(), owner_max_running=1, admission="reject") as server,
        client_of(server) as client,
        streaming(client, CHAT, max_tokens=FOR_EVER),
    ):
        error = error_of(await client.post(CHAT, json=said("hi")))
        assert (error["code"], error["setting"]) == ("quota_exceeded", "--owner-max-running")


async def test_an_owner_has_no_more_places_in_the_queue_than_its_quota(keys_file: str) -> None:
    async with (
        serving(wordy_engine(), default_chat(), keys_file=keys_file, max_concurrent=1, owner_max_queued=1) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        async with streaming(ann, CHAT, max_tokens=FOR_EVER):
            waiting = asyncio.create_task(ann.post(CHAT, json=said("hi")))
            await queued(server, 1)
            refusal = await ann.post(CHAT, json=said("hi"))
            assert refusal_of(refusal) == (429, "quota_exceeded")
            assert error_of(refusal)["setting"] == "--owner-max-queued"
            other = asyncio.create_task(bob.post(CHAT, json=said("hi")))
            await queued(server, 2)
        assert [(await task).status_code for task in (waiting, other)] == [200, 200]


def unread_field(num_bytes: int) -> dict[str, Any]:
    """A field that is recorded and not read."""
    return {"response_format": {"type": "text", "json_schema": {"description": "x" * num_bytes}}}


async def test_an_owner_that_has_too_much_on_record_adds_nothing_until_it_is_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_COUNT_S", 60.0)  # however busy the machine is
    options: dict[str, Any] = {"data_dir": str(tmp_path), "owner_max_mb": 1, "retain_days": 0}
    large = said("a " * 150, **unread_field(1_200_000))
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), **options) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        tokens = await create(server, [1])
        answer = await client.post(chat_path(session), json=large)
        assert answer.status_code == 200, answer.text  # what is under way ends
        before = (await client.get(f"/sessions/{session}")).json()["history_length"]
        refusal = await client.post(chat_path(session), json=said("b"))
        assert refusal_of(refusal) == (429, "quota_exceeded")
        assert error_of(refusal)["setting"] == "--owner-max-mb"
        assert (await client.get(f"/sessions/{session}")).json()["history_length"] == before
        for call in (generate(server, tokens).read(), create(server), _append(server, tokens)):
            async with refused(EXHAUSTED, "quota_exceeded", setting="--owner-max-mb"):
                await call
        assert (await client.post(CHAT, json=said("hi"))).status_code == 200  # which is not recorded
        assert (await client.get(f"/sessions/{session}/export")).status_code == 200
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), **options) as server,
        client_of(server) as client,
    ):
        assert refusal_of(await client.post("/sessions", json={})) == (429, "quota_exceeded")
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert refusal_of(await client.post("/sessions", json={})) == (429, "quota_exceeded")  # still on record
        purged = await client.post("/sessions/purge", json={"session_ids": [session]})
        assert purged.json()["purged"] == 1
        await open_session(client)
        await _append(server, tokens)


@pytest.mark.parametrize("place", ["data_dir", "journal"])
async def test_a_start_does_not_wait_long_until_everything_on_record_is_counted(
    tmp_path: Path, postgres: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count is held up in the database, as by many rows. Closing the journal ends it."""
    options: dict[str, Any] = {place: postgres if place == "journal" else str(tmp_path), "owner_max_mb": 1}
    endless = {
        "data_dir": "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r",
        "journal": "SELECT pg_sleep(600)",
    }
    monkeypatch.setattr(lifecycle, "_COUNT_S", 0.05)
    monkeypatch.setattr(rows, "num_bytes_by_owner", lambda db: db.select(endless[place]))
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), **options) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        answer = await client.post(chat_path(session), json=said("a", **unread_field(1_200_000)))
        assert answer.status_code == 200, answer.text
        assert refusal_of(await client.post(chat_path(session), json=said("b"))) == (429, "quota_exceeded")


async def test_without_a_data_directory_what_is_closed_counts_no_more() -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), owner_max_mb=1) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        assert (await client.post(chat_path(session), json=said("a", **unread_field(1_200_000)))).status_code == 200
        assert refusal_of(await client.post(chat_path(session), json=said("b"))) == (429, "quota_exceeded")
        await client.delete(f"/sessions/{session}")
        await open_session(client)


async def _append(server: Server, session: str) -> None:
    await server.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[2]))


# Turns in the queue


async def test_a_pause_holds_generations_and_appends_over_grpc_too() -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), pause_max_wait_s=0.1) as server,
        client_of(server) as client,
    ):
        session = await create(server, [1])
        await client.post("/control/pause")
        for call in (generate(server, session).read(), _append(server, session)):
            async with refused(grpc.StatusCode.UNAVAILABLE, "paused"):
                await call
        await client.post("/control/resume")
        await _append(server, session)
        assert len(await events_of(generate(server, session))) == 6


async def test_an_owner_with_many_queued_requests_delays_another_by_one_place(keys_file: str) -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), keys_file=keys_file, max_concurrent=1) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        session = await open_session(bob)
        done: list[str] = []

        async def ask(client: httpx.AsyncClient, name: str, path: str = CHAT) -> None:
            response = await client.post(path, json=said("hi", max_tokens=2))
            assert response.status_code == 200, response.text
            done.append(name)

        async with asyncio.TaskGroup() as group, streaming(ann, CHAT, max_tokens=FOR_EVER):
            for number in range(12):
                group.create_task(ask(ann, "ann"))
                await queued(server, number + 1)
            group.create_task(ask(bob, "bob"))
            await queued(server, 13)
            group.create_task(ask(bob, "bob", chat_path(session)))
            await queued(server, 14)
        assert done[:4] == ["ann", "bob", "ann", "bob"]


async def test_a_full_queue_has_room_for_the_owner_who_has_nobody_in_it(keys_file: str) -> None:
    async with (
        serving(wordy_engine(), default_chat(), keys_file=keys_file, max_concurrent=1, queue_max=3) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        async with streaming(ann, CHAT, max_tokens=FOR_EVER):
            waiting = []
            for number in range(3):
                waiting.append(asyncio.create_task(ann.post(CHAT, json=said("hi"))))
                await queued(server, number + 1)
            other = asyncio.create_task(bob.post(CHAT, json=said("hi")))
            assert refusal_of(await waiting.pop()) == (429, "capacity_exhausted")  # the one that came last
            assert refusal_of(await ann.post(CHAT, json=said("hi"))) == (429, "capacity_exhausted")
        assert [(await task).status_code for task in (*waiting, other)] == [200, 200, 200]


async def test_a_parked_session_goes_for_a_new_one_of_the_owner_who_has_most(keys_file: str) -> None:
    async with (
        serving(wordy_engine(num_slabs=1), default_chat(), keys_file=keys_file, max_parked=3) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        precious = await open_session(bob)  # the one that was used least recently of all
        for _ in range(8):
            await open_session(ann)
        assert (await bob.get(f"/sessions/{precious}")).status_code == 200


# Streams that nobody reads


@contextlib.asynccontextmanager
async def unread(server: Server, path: str, body: dict[str, Any], *, key: str = "") -> AsyncIterator[socket.socket]:
    """A request whose response is not read, on a connection that takes in little."""
    content = json.dumps(body).encode()
    host, _, port = server.http.rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        headers = f"host: localhost\r\ncontent-length: {len(content)}\r\nidempotency-key: {key}"
        head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
        await loop.sock_sendall(connection, head.encode() + content)
        yield connection


async def rest_of(connection: socket.socket) -> bytes:
    """All that still comes, until the response or the connection ends."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    data, loop = b"", asyncio.get_running_loop()
    with contextlib.suppress(ConnectionResetError):
        while not data.endswith(b"\r\n0\r\n\r\n") and (piece := await loop.sock_recv(connection, 1 << 16)):
            data += piece
    return data


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little may be unread, here and in the kernel, so that tests need not generate much."""
    monkeypatch.setattr(engine_stream, "MAX_UNREAD", 16)
    monkeypatch.setattr(retry, "MAX_UNREAD", 16)
    create_server = socket.create_server

    def with_small_buffers(*args: Any, **options: Any) -> socket.socket:
        listening = create_server(*args, **options)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(socket, "create_server", with_small_buffers)


WIDE = {"stream": True, "max_tokens": FOR_EVER, "logprobs": True, "top_logprobs": 20}


async def still(engine: SlowEngine) -> int:
    """How many forwards there were when the engine had come to rest."""
    before = -1
    while before != engine.num_forwards:
        before = engine.num_forwards
        await asyncio.sleep(0.1)
    return before


@pytest.mark.usefixtures("impatient")
async def test_the_engine_waits_for_a_stream_that_is_not_read_and_goes_on_when_it_is() -> None:
    engine = wordy_engine(forward_s=0)
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        whole = (await client.post(CHAT, json=said("hi", max_tokens=120))).json()["choices"][0]["message"]["content"]
        for path in (CHAT, chat_path(session)):
            begun = engine.num_forwards
            async with unread(server, path, said("hi", **WIDE | {"max_tokens": 120})) as connection:
                assert 0 < await still(engine) - begun < 110
                text = (await rest_of(connection)).decode()
            pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith('data: {"')]
            said_so_far = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
            assert said_so_far == whole


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_is_never_read_is_cancelled_and_frees_everything() -> None:
    engine = wordy_engine(forward_s=0)
    async with (
        serving(engine, default_chat(), stream_stall_s=STALL_S, max_concurrent=1) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        for path in (CHAT, chat_path(session)):
            begun = engine.num_forwards
            async with unread(server, path, said("hi", **WIDE)) as connection:
                await until(lambda begun=begun: engine.num_forwards > begun)
                answer = await eventually(  # the only place is free again
                    lambda: client.post(CHAT, json=said("hi")), lambda response: response.status_code == 200
                )
                assert answer.status_code == 200
                assert engine.num_forwards - begun < 300
                await until(lambda: server.worker.num_free_slabs == 3)
                assert b"[DONE]" not in await rest_of(connection)  # and the connection is closed
        shown = await eventually(lambda: client.get(f"/sessions/{session}"), lambda r: not r.json()["is_busy"])
        assert (shown.json()["turns"], shown.json()["history_length"]) == (0, 0)


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_reads_a_little_now_and_then_is_cancelled_too() -> None:
    engine = wordy_engine(forward_s=0)
    async with (
        serving(engine, default_chat(), stream_stall_s=STALL_S) as server,
        unread(server, CHAT, said("hi", **WIDE)) as connection,
    ):
        deadline = time.monotonic() + 30
        while server.worker.num_free_slabs < 4 or not engine.num_forwards:
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(connection, 64)
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("impatient")
async def test_a_joined_reader_that_stalls_does_not_hold_up_the_others() -> None:
    engine = wordy_engine(forward_s=0)
    async with serving(engine, default_chat(), stream_stall_s=30) as server, client_of(server) as client:
        session = await open_session(client)
        body = said("hi", **WIDE | {"max_tokens": 120})
        async with unread(server, chat_path(session), body, key="k"):
            await still(engine)
            content = json.dumps(body).encode()
            joined = await client.post(chat_path(session), content=content, headers={"idempotency-key": "k"})
            assert joined.status_code == 200
            assert joined.text.endswith("data: [DONE]\n\n")
            assert (await client.get(f"/sessions/{session}")).json()["turns"] == 1


async def test_a_large_response_that_is_not_read_is_dropped_and_a_slow_reader_gets_all_of_it() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat(), stream_stall_s=STALL_S) as server:
        async with client_of(server) as client:
            session = await open_session(client)
            body = said("hi", **unread_field(8_000_000))
            assert (await client.post(chat_path(session), json=body)).status_code == 200
            length = len((await client.get(f"/sessions/{session}/export")).content)
        request = f"GET /sessions/{session}/export HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        host, _, port = server.http.rpartition(":")
        received = []
        for pause_s in (5 * STALL_S, 0.0):
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 12)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200" in head.splitlines()[0]
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(pause_s)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := await reader.read(1 << 16):
                    data += piece
            received.append(len(data))
            writer.close()
        assert received[0] < length
        assert received[1] == length


@pytest.mark.usefixtures("impatient")
async def test_a_grpc_stream_that_is_never_read_is_cancelled_and_keeps_what_was_sampled() -> None:
    engine = SlowEngine(forward_s=0)
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    async with (
        serving(engine, stream_stall_s=STALL_S) as server,
        grpc.aio.insecure_channel(server.address, options=small) as channel,
    ):
        session = await create(server, [1])
        reader = dataclasses.replace(server, stub=rpc.RuntimeServiceStub(channel))  # type: ignore[no-untyped-call]
        call = generate(reader, session, max_tokens=FOR_EVER, top_logprobs=20)
        await call.read()
        view = await eventually(lambda: info(server, session), lambda view: not view.busy)
        assert 1 < view.history_length == engine.num_forwards + 1 < 5000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events_of(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert len(await events_of(generate(server, session))) > 5
        assert value(server, "grpc_requests_total", method="Generate", code="CANCELLED") == 1
