"""What outlives a slab and a process: parked sessions, restarts, and a journal that cannot be written."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.testing.fake_upstream import Fault, flat_rows
from tests.serving import SHAPE, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, open_session, said
from tests.test_relay import chatting

KEY = {"idempotency-key": "k"}


async def _tokens(call: Any) -> list[int]:
    return [event.token.token_id async for event in call if event.HasField("token")]


async def _history(server: Any, session: str) -> list[tuple[int, list[int], list[float]]]:
    chunks = server.stub.GetHistory(pb.GetHistoryRequest(session_id=session))
    return [(chunk.kind, list(chunk.token_ids), list(chunk.logprobs)) async for chunk in chunks]


async def test_idle_sessions_are_parked_for_others_and_wake_as_if_nothing_had_happened() -> None:
    async with serving(SlowEngine(num_slabs=2), max_parked=100) as server:
        stub = server.stub
        sessions = [
            (await stub.CreateSession(pb.CreateSessionRequest(token_ids=[n, 1, 2]))).session_id for n in range(8)
        ]
        for seed in range(3):
            for session in sessions:
                options = pb.SamplingOptions(seed=seed)
                turn = pb.TurnRequest(session_id=session, token_ids=[5, 6], max_tokens=9, sampling=options)
                await _tokens(stub.Turn(turn))
        states = [(await stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=s))).state for s in sessions]
        assert states.count(pb.SESSION_STATE_PARKED) == 6
        parked = [await _history(server, session) for session in sessions]
    async with serving(SlowEngine(num_slabs=8)) as server:
        stub = server.stub
        for n, expected in enumerate(parked):
            session = (await stub.CreateSession(pb.CreateSessionRequest(token_ids=[n, 1, 2]))).session_id
            for seed in range(3):
                options = pb.SamplingOptions(seed=seed)
                turn = pb.TurnRequest(session_id=session, token_ids=[5, 6], max_tokens=9, sampling=options)
                await _tokens(stub.Turn(turn))
            assert await _history(server, session) == expected


async def test_a_parked_session_without_a_snapshot_is_computed_again_and_says_so() -> None:
    options = {"max_parked": 9, "snapshot_memory_mb": 0}
    async with serving(wordy_engine(num_slabs=1), default_chat(), **options) as server, client_of(server) as client:
        one, other = await open_session(client), await open_session(client)
        first = (await client.post(chat_path(one), json=said("a"))).json()
        await client.post(chat_path(other), json=said("b"))
        assert (await client.get(f"/sessions/{one}")).json()["state"] == "parked"
        reply = first["choices"][0]["message"]["content"]
        again = await client.post(chat_path(one), json=said("a", reply, "c"))
        assert again.status_code == 200
        info = (await client.get(f"/sessions/{one}")).json()
        assert info["recomputed_tokens"] == first["usage"]["total_tokens"]
        assert 'session_woken_total{how="recomputed"} 1.0' in (await client.get("/metrics")).text


async def test_a_stateless_request_parks_and_never_evicts() -> None:
    async with serving(wordy_engine(num_slabs=1), default_chat(), max_parked=1) as server, client_of(server) as client:
        session = await open_session(client)
        assert (await client.post("/v1/chat/completions", json=said("a"))).status_code == 200
        assert (await client.post(chat_path(session), json=said("a"))).status_code == 200


async def test_beyond_max_parked_the_longest_idle_session_goes() -> None:
    async with serving(SlowEngine(num_slabs=1), max_parked=2) as server:
        stub = server.stub
        sessions = [(await stub.CreateSession(pb.CreateSessionRequest(token_ids=[n]))).session_id for n in range(4)]
        listed = await stub.ListSessions(pb.ListSessionsRequest())
        assert [info.session_id for info in listed.sessions] == sessions[1:]


async def test_routed_experts_are_kept_once_and_come_back_with_samples_and_replays(tmp_path: Path) -> None:
    keeping = {"data_dir": str(tmp_path), "max_parked": 100, "routing_replay": "full"}

    async def samples(relay: Any) -> bytes:
        answer = await relay.http.post(f"/sessions/{session}/samples", json={"format": "json"})
        assert answer.status_code == 200, answer.text
        content: bytes = answer.content
        return content

    async with chatting(routed_experts=flat_rows, **keeping) as (relay, _):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi", max_tokens=4), headers=KEY)
        num_rows = first.json()["usage"]["total_tokens"] - 1
        before = await samples(relay)
    with sqlite3.connect(tmp_path / "journal.db") as database:
        [(turn_bytes,)] = database.execute("SELECT length(facts) + length(reply) + length(messages) FROM turns")
        [(response_bytes,)] = database.execute("SELECT max(length) FROM bodies")
    database.close()
    assert turn_bytes < len(flat_rows(num_rows)) < response_bytes
    async with chatting(routed_experts=flat_rows, **keeping) as (relay, _):
        many = await asyncio.gather(*(samples(relay) for _ in range(40)))  # more than there are threads
        assert set(many) == {before}
        again = await relay.http.post(chat_path(session), json=said("Hi", max_tokens=4), headers=KEY)
        assert again.headers["idempotent-replayed"] == "true"
        assert again.content == first.content
        path, form = f"/sessions/{session}/samples", {"format": "json"}
        [sample] = (await relay.http.post(path, json=form)).json()["samples"]
        [shaped] = (await relay.http.post(path, json=form | {"num_layers": 3})).json()["samples"]
        refused = await relay.http.post(path, json=form | {"num_layers": 4})
    rows = sample["rollout_routed_experts"]
    assert rows["shape"] == [num_rows, 6]
    assert shaped["rollout_routed_experts"] == rows | {"shape": [num_rows, 3, 2]}
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "samples_unusable")


async def test_chats_come_back_after_a_restart_with_all_they_had(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path), "max_parked": 100}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        session = await open_session(client, group="g", label="l", metadata={"a": "b"})
        reply = (await client.post(chat_path(session), json=said("a"))).json()["choices"][0]["message"]["content"]
        await client.post(chat_path(session), json=said("a", reply, "b"))
        last = await client.post(chat_path(session), json=said("a", reply, "c"), headers=KEY)
        await client.post(f"/sessions/{session}/reward", json={"reward": 2.5})
        fork = (await client.post(f"/sessions/{session}/fork")).json()["session_id"]
        before = (await client.get(f"/sessions/{session}?branches=all")).json()
        samples = (await client.post(f"/sessions/{session}/samples", json={"branch": "all"})).content
        closed = await open_session(client)
        await client.delete(f"/sessions/{closed}")
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        after = (await client.get(f"/sessions/{session}?branches=all")).json()
        assert after["state"] == "parked"
        for field in before.keys() - {"state", "idle_seconds", "last_used_at", "kv_live_bytes", "kv_reserved_bytes"}:
            assert after[field] == before[field], field
        assert (await client.post(f"/sessions/{session}/samples", json={"branch": "all"})).content == samples
        again = await client.post(chat_path(session), json=said("a", reply, "c"), headers=KEY)
        assert again.content == last.content
        assert again.headers["idempotent-replayed"] == "true"
        told = last.json()["choices"][0]["message"]["content"]
        more = await client.post(chat_path(session), json=said("a", reply, "c", told, "d"))
        assert more.status_code == 200
        assert more.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert 'session_woken_total{how="snapshot"} 1.0' in (await client.get("/metrics")).text
        assert (await client.post(chat_path(fork), json=said("a", reply, "c", told, "e"))).status_code == 200
        assert (await client.get(f"/sessions/{closed}")).status_code == 404


@pytest.mark.parametrize("keeps_snapshots", [True, False])
async def test_sessions_of_tokens_go_on_after_a_restart_with_the_tokens_of_an_undisturbed_one(
    tmp_path: Path, keeps_snapshots: bool
) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path), "max_parked": 100}
    if not keeps_snapshots:
        options |= {"snapshot_memory_mb": 0, "snapshot_disk_mb": 0}

    def turn(session: str, seed: int) -> pb.TurnRequest:
        sampling = pb.SamplingOptions(seed=seed, temperature=0.8)
        return pb.TurnRequest(session_id=session, token_ids=[seed, 2, 3], max_tokens=12, sampling=sampling)

    async with serving(SlowEngine()) as server:
        calm = (await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[7]))).session_id
        for seed in range(4):
            await _tokens(server.stub.Turn(turn(calm, seed)))
        expected = await _history(server, calm)
    async with serving(SlowEngine(), **options) as server:
        session = (await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[7]))).session_id
        await _tokens(server.stub.Turn(turn(session, 0)))
        await _tokens(server.stub.Turn(turn(session, 9)))
        length = len([t for _, tokens, _ in await _history(server, session) for t in tokens]) - 15
        await server.stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=length))
        await _tokens(server.stub.Turn(turn(session, 1)))
    for seed in (2, 3):
        async with serving(SlowEngine(), **options) as server:
            await _tokens(server.stub.Turn(turn(session, seed)))
            history = await _history(server, session)
    assert history == expected
    assert SHAPE.recent < sum(len(tokens) for _, tokens, _ in history)


async def test_a_journal_that_cannot_be_written_refuses_the_turn_and_recovers(tmp_path: Path) -> None:
    async with serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server, client_of(server) as client:
        session = await open_session(client)
        reply = (await client.post(chat_path(session), json=said("a"))).json()["choices"][0]["message"]["content"]
        length = (await client.get(f"/sessions/{session}")).json()["history_length"]
        database = tmp_path / "journal.db"
        connection = _locked(database)
        try:
            refused = await client.post(chat_path(session), json=said("a", reply, "b"))
            assert (refused.status_code, error_of(refused)["code"]) == (503, "journal_failed")
            assert (await client.get("/readyz")).status_code == 503
            info = (await client.get(f"/sessions/{session}")).json()
            assert (info["history_length"], info["turns"]) == (length, 1)
        finally:
            connection.close()
        assert (await client.post(chat_path(session), json=said("a", reply, "b"))).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


def _locked(database: Path) -> Any:
    import sqlite3

    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


async def test_upstream_sessions_come_back_too(tmp_path: Path) -> None:
    async with chatting(data_dir=str(tmp_path)) as (relay, _):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi"))
        before = (await relay.http.get(f"/sessions/{session}")).json()
    async with chatting(data_dir=str(tmp_path)) as (relay, upstream):
        after = (await relay.http.get(f"/sessions/{session}")).json()
        assert after["records"] == before["records"]
        upstream.faults.append(Fault(body=b"{}"))
        reply = first.json()["choices"][0]["message"]["content"]
        assert (await relay.http.post(chat_path(session), json=said("Hi", reply, "More"))).status_code == 502
        assert (await relay.http.post(chat_path(session), json=said("Hi", reply, "More"))).status_code == 200
