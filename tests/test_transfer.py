"""Sessions that leave a server and go on elsewhere: exactly as they were, or not at all."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.chat.template import ChatTemplate
from holdfast.engine.slab import SlabShape
from holdfast.engine.worker import Worker
from holdfast.errors import SessionFileRefused
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.sessions import session_file as file
from holdfast.sessions import transfers
from holdfast.sessions.journal.recorder import Recorder
from holdfast.sessions.record import to_stored
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.session_file import decode, encode
from holdfast.testing.fake_engine import FakeEngine
from tests import serving as servers
from tests.effort import examples
from tests.serving import SHAPE, Server, SlowEngine, default_chat, held, model_of, serving, serving_aside, wordy_engine
from tests.talking import chat_path, client_of, error_of, eventually, open_session, refusal_of, said, until
from tests.test_grpc import create, info, refused
from tests.test_relay import chatting
from tests.transferring import downloaded, exported, history_of, imported, length_of, told, turn, uploaded

INVALID = grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument"


async def talked(server: Server, tokens: list[int], seeds: range) -> str:
    session = await create(server, tokens, client_label="mine", metadata={"a": "b"}, pin_tokens=3)
    for seed in seeds:
        await told(server.stub.Turn(turn(session, seed)))
    return session


@pytest.mark.parametrize("with_snapshot", [True, False])
async def test_tokens_go_on_elsewhere_as_if_they_had_never_left(with_snapshot: bool) -> None:
    async with serving(SlowEngine()) as here, serving(SlowEngine()) as there:
        session = await talked(here, [7, 8, 9], range(3))
        await here.stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=28))
        data = await exported(here, session, without_snapshot=not with_snapshot)
        answer = await imported(there, data)
        assert answer.session_id != session
        counts = (answer.reused_tokens, answer.recomputed_tokens, answer.history_length)
        assert counts == ((28, 0, 28) if with_snapshot else (0, 28, 28))
        assert await history_of(there, answer.session_id) == await history_of(here, session)
        info = await there.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=answer.session_id))
        assert (info.client_label, dict(info.metadata), info.sink) == ("mine", {"a": "b"}, 3)
        assert info.history_length > info.sink + SHAPE.recent
        for seed in (0, 5):  # greedy and drawn
            went_on = await told(there.stub.Turn(turn(answer.session_id, seed)))
            assert went_on == await told(here.stub.Turn(turn(session, seed)))
        assert await length_of(there, answer.session_id) == 28 + 2 * 11


async def test_an_empty_session_travels_too_and_each_import_is_a_new_one() -> None:
    async with serving(SlowEngine(), max_parked=9) as server:
        data = await exported(server, await create(server, []))
        answers = [await imported(server, data) for _ in range(3)]
        assert len({answer.session_id for answer in answers}) == 3
        assert {(answer.reused_tokens, answer.recomputed_tokens, answer.history_length) for answer in answers} == {
            (0, 0, 0)
        }
        long = await exported(server, await create(server, [1, 2, 3]))
        one, other = [(await imported(server, long, size)).session_id for size in (1, 1 << 20)]
        await told(server.stub.Turn(turn(one, 1)))
        assert await length_of(server, other) == 3


async def test_chats_travel_with_tree_records_and_rewards(tmp_path: Path) -> None:
    async with (
        serving(wordy_engine(), default_chat()) as here,
        client_of(here) as at_home,
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as there,
        client_of(there) as abroad,
    ):
        session = await open_session(at_home, group="g", label="l", metadata={"a": "b"})
        first = await at_home.post(chat_path(session), json=said("a"))
        reply = first.json()["choices"][0]["message"]["content"]
        await at_home.post(chat_path(session), json=said("a", reply, "b"))
        last = await at_home.post(chat_path(session), json=said("a", reply, "c <|im_end|>"))
        await at_home.post(f"/sessions/{session}/reward", json={"reward": 2.5})
        await at_home.post(f"/sessions/{session}/reward", json={"reward": -1, "turn": 2})
        await eventually(
            lambda: at_home.get(f"/sessions/{session}"),
            lambda shown: all(turn["delivered"] for turn in shown.json()["metadata"]["tree"]),
        )
        data = await downloaded(at_home, session)
        answer = await uploaded(abroad, data)
        length = (await at_home.get(f"/sessions/{session}")).json()["history_length"]
        assert answer == {
            "session_id": answer["session_id"],
            "history_length": length,
            "reused_tokens": length,
            "recomputed_tokens": 0,
        }
        new = answer["session_id"]
        before, after = [
            (await client.get(f"/sessions/{name}?branches=all")).json()
            for client, name in ((at_home, session), (abroad, new))
        ]
        for field in before.keys() - {"session_id", "idle_seconds", "last_used_at", "is_busy"}:
            assert after[field] == before[field], field
        samples = [await _samples(client, name) for client, name in ((at_home, session), (abroad, new))]
        assert samples[0] == samples[1]
        told_last = last.json()["choices"][0]["message"]["content"]
        next_turn = said("a", reply, "c <|im_end|>", told_last, "d", temperature=0.9, seed=3)
        one, other = [
            (await client.post(chat_path(name), json=next_turn)).json()
            for client, name in ((at_home, session), (abroad, new))
        ]
        assert one["choices"] == other["choices"]
        assert one["usage"] == other["usage"]
        again = await imported(there, await exported(there, new))  # over the other door, the chat is the same
        assert (await abroad.get(f"/sessions/{again.session_id}")).json()["turns"] == after["turns"] + 1


async def _samples(client: Any, session: str) -> Any:
    body = {"branch": "all", "format": "json"}
    text = (await client.post(f"/sessions/{session}/samples", json=body)).text.replace(session, "ID")
    found = json.loads(text)
    for sample in found["samples"]:
        sample.pop("certificate", None)
    return found


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_imported_session_is_kept_like_any_other(tmp_path: Path, keeps: bool) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path), "max_parked": 9}
    if not keeps:
        options |= {"snapshot_memory_mb": 0, "snapshot_disk_mb": 0}
    async with serving(wordy_engine(), default_chat()) as here, client_of(here) as client:
        tokens = await talked(here, [7, 8], range(2))
        token_file = await exported(here, tokens)
        chat = await open_session(client)
        reply = (await client.post(chat_path(chat), json=said("a"))).json()["choices"][0]["message"]["content"]
        chat_file = await downloaded(client, chat)
        expected = await told(here.stub.Turn(turn(tokens, 5)))
        expected_reply = (await client.post(chat_path(chat), json=said("a", reply, "b"))).json()["choices"]
    async with serving(wordy_engine(), default_chat(), **options) as there:
        ids = [(await imported(there, data)).session_id for data in (token_file, chat_file)]
        histories = [await history_of(there, session) for session in ids]
    async with serving(wordy_engine(), default_chat(), **options) as there, client_of(there) as client:
        assert [await history_of(there, session) for session in ids] == histories
        assert await told(there.stub.Turn(turn(ids[0], 5))) == expected
        answer = await client.post(chat_path(ids[1]), json=said("a", reply, "b"))
        assert answer.json()["choices"] == expected_reply
        assert (await client.get(f"/sessions/{ids[1]}")).json()["records"][0]["turn"] == 1


async def test_a_parked_session_is_exported_without_waking_it() -> None:
    async with serving(SlowEngine(num_slabs=1), max_parked=9) as server:
        session = await talked(server, [7], range(2))
        await create(server, [1])
        data = await exported(server, session)
        info = await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
        assert info.state == pb.SESSION_STATE_PARKED
        assert decode(data).snapshot is not None
        assert (await imported(server, data)).recomputed_tokens == 0


async def test_closed_sessions_can_be_exported_as_long_as_they_are_on_record(tmp_path: Path) -> None:
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        await client.post(chat_path(session), json=said("a"))
        data = decode(await downloaded(client, session, snapshot="false"))
        tokens = await talked(server, [7], range(2))
        spans = await history_of(server, tokens)
        for name in (session, tokens):
            await client.delete(f"/sessions/{name}")
        closed = decode(await downloaded(client, session))
        assert closed == dataclasses.replace(data, opened=closed.opened)
        back = await imported(server, await exported(server, tokens))
        assert (back.reused_tokens, back.recomputed_tokens) == (0, back.history_length)
        assert await history_of(server, back.session_id) == spans
        never = await client.get("/sessions/nobody/export")
        assert (refusal_of(never), error_of(never)["detail"]) == ((404, "session_not_found"), "unknown")
    async with serving(SlowEngine()) as server:
        session = await create(server, [1])
        await server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found", detail="closed"):
            await exported(server, session)


async def test_what_the_journal_has_is_exported_where_nobody_chats_and_damage_is_told(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path)}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        session = await open_session(client)
        await client.post(chat_path(session), json=said("a"))
        await client.post(f"/sessions/{session}/reward", json={"reward": 1})
        whole = decode(await downloaded(client, session, snapshot="false"))
        closed = await talked(server, [1], range(1))
        await client.delete(f"/sessions/{closed}")
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        connection.execute("UPDATE spans SET tokens = zeroblob(8) WHERE session = ?", (closed,))
        connection.commit()
    async with serving(wordy_engine(), **options) as server:
        found = decode(await exported(server, session))
        assert (found.opened, found.turns, found.reward) == (whole.opened, whole.turns, 1)
        async with refused(grpc.StatusCode.UNAVAILABLE, "storage_unavailable"):
            await exported(server, closed)


async def test_sessions_belong_to_whoever_imports_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:a\nbob:b\nadmin:c\n")
    options = {"keys_file": str(keys), "data_dir": str(tmp_path / "data")}
    async with (
        serving(wordy_engine(), default_chat(), **options) as server,
        client_of(server, "a") as ann,
        client_of(server, "b") as bob,
        client_of(server, "c") as admin,
    ):
        session = await open_session(ann)
        for other in (bob, admin):
            assert refusal_of(await other.get(f"/sessions/{session}/export")) == (404, "session_not_found")
        data = await downloaded(ann, session)
        assert b"ann" not in data
        new = (await uploaded(bob, data))["session_id"]
        assert (await bob.get(f"/sessions/{new}")).status_code == 200
        assert (await ann.get(f"/sessions/{new}")).status_code == 404
        await bob.delete(f"/sessions/{new}")
        assert [(await client.get(f"/sessions/{new}/export")).status_code for client in (ann, bob, admin)] == [
            404,
            200,
            200,
        ]
        async with client_of(server) as nobody:
            assert (await nobody.post("/sessions/import", content=data)).status_code == 401


async def test_a_busy_session_is_not_exported() -> None:
    engine = wordy_engine()
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session, tokens = await open_session(client), await create(server, [1])
        with held(engine):
            chat = asyncio.ensure_future(client.post(chat_path(session), json=said("a", max_tokens=50)))
            stream = server.stub.Turn(turn(tokens, 1, max_tokens=50))
            for name in (session, tokens):
                await eventually(partial(info, server, name), lambda view: view.busy)
            assert refusal_of(await client.get(f"/sessions/{session}/export")) == (409, "session_busy")
            async with refused(grpc.StatusCode.ABORTED, "session_busy"):
                await exported(server, tokens)
            stream.cancel()
        assert (await chat).status_code == 200
        assert len(await downloaded(client, session)) > 100


async def test_what_does_not_belong_here_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    other = FakeEngine(num_slabs=4, shape=SHAPE, fingerprint="other")
    smaller = FakeEngine(num_slabs=4, shape=dataclasses.replace(SHAPE, max_pin=2))
    async with serving(SlowEngine()) as here:
        session = await talked(here, [7], range(2))
        data = await exported(here, session)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    newer = bytearray(data)
    newer[8] = 9
    here_too = SlowEngine()
    for engine, sent, reason in (
        (other, data, "other_model"),
        (smaller, data, "too_many_pins"),
        (FakeEngine(num_slabs=4, shape=SHAPE, vocab_size=3), data, "out_of_vocabulary"),
        (here_too, bytes(flipped), "damaged"),
        (here_too, data[:-40], "truncated"),
        (here_too, b"", "truncated"),
        (here_too, b"a session, honestly", "not_a_file"),
        (here_too, bytes(newer), "other_version"),
    ):
        async with serving(engine, data_dir=str(tmp_path / str(id(engine)))) as there:
            async with refused(*INVALID, reason=reason):
                await imported(there, sent)
            assert not (await there.stub.ListSessions(pb.ListSessionsRequest())).sessions
            assert there.worker.num_free_slabs == there.worker.engine.num_slabs


async def test_other_weights_or_windows_keep_the_tokens_and_compute_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "model_of", lambda engine: dataclasses.replace(model_of(engine), tokenizer_hash="t"))
    async with serving(SlowEngine()) as here:
        session = await talked(here, [7], range(2))
        data, history = await exported(here, session), await history_of(here, session)
    wider = SlabShape(recent=32, max_pin=4, prefill_chunk=8, rewind_tokens=8)
    for engine in (FakeEngine(num_slabs=4, shape=SHAPE, fingerprint="other"), FakeEngine(num_slabs=4, shape=wider)):
        async with serving(engine) as there:
            answer = await imported(there, data)
            assert (answer.reused_tokens, answer.recomputed_tokens) == (0, answer.history_length)
            assert await history_of(there, answer.session_id) == history
            await told(there.stub.Turn(turn(answer.session_id, 1)))


async def test_a_snapshot_that_a_stranger_made_up_never_reaches_a_slab() -> None:
    from safetensors.numpy import load, save

    async with serving(SlowEngine()) as server:
        session = await talked(server, [7], range(2))
        whole = decode(await exported(server, session))
        assert whole.snapshot is not None
        tensors = load(whole.snapshot)
        size = int.from_bytes(whole.snapshot[:8], "little")
        meta = json.loads(whole.snapshot[8 : 8 + size])["__metadata__"]
        for change in ({"length": 9999}, {"lowest": -1}, {"sink": "x"}, {"sink": 1}, {"length": 3, "lowest": 3}, {}):
            header = json.dumps(json.loads(meta["holdfast.snapshot"]) | change)
            kept = tensors if change else {name: part[:, :, :-1].copy() for name, part in tensors.items()}
            digest = hashlib.blake2b(header.encode(), digest_size=16)
            for name in ("keys", "values"):
                digest.update(kept[name].tobytes())
            made_up = save(kept, {"holdfast.snapshot": header, "holdfast.digest": digest.hexdigest()})
            data = b"".join(encode(dataclasses.replace(whole, snapshot=made_up)))
            answer = await imported(server, data)
            assert (answer.reused_tokens, answer.recomputed_tokens) == (0, whole.history_length), change
            await server.stub.CloseSession(pb.CloseSessionRequest(session_id=answer.session_id))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", "x" * 1001),
        ("group", "x" * 1001),
        ("metadata", {str(number): "" for number in range(65)}),
        ("eos_token_ids", (1,) * 4097),
    ],
)
async def test_a_file_with_lists_and_labels_without_measure_is_refused_by_name(field: str, value: Any) -> None:
    async with serving(SlowEngine()) as server:
        whole = decode(await exported(server, await create(server, [1, 2])))
        opened = dataclasses.replace(whole.opened, **{field: value})
        data = b"".join(encode(dataclasses.replace(whole, opened=opened)))
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", reason="beyond_limits"):
            await imported(server, data)
        with pytest.raises(grpc.aio.AioRpcError, match=f"cannot be imported: {field} may have at most"):
            await imported(server, data)


async def test_files_beyond_the_limit_are_refused_at_both_doors() -> None:
    limits = {"max_session_mb": 1, "max_body_mb": 1}
    async with serving(wordy_engine(), default_chat(), **limits) as server, client_of(server) as client:
        data = bytes(2 << 20)
        answer = await client.post("/sessions/import", content=data)
        assert refusal_of(answer) == (413, "payload_too_large")
        assert "--max-session-mb" in error_of(answer)["message"]

        async def chunks() -> Any:
            yield data

        assert (await client.post("/sessions/import", content=chunks())).status_code == 413
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "payload_too_large"):
            await imported(server, data, 1 << 20)
        bad = await client.get("/sessions/x/export?snapshot=perhaps")
        assert (bad.status_code, error_of(bad)["param"]) == (400, "snapshot")
        document = (await client.get("/openapi.json")).json()["paths"]
        assert {"/sessions/import", "/sessions/purge", "/sessions/{session_id}/export"} <= set(document)


async def test_few_files_come_in_at_once_and_those_that_stall_give_up_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(SlowEngine())
    incoming = transfers.Transfers(Runtime(EmbeddedBackend(worker, model_of(worker.engine))))
    begun: list[int] = []
    num_ended, ended_before = 0, list[int]()
    may_end = asyncio.Event()

    async def chunks(number: int) -> AsyncIterator[bytes]:
        nonlocal num_ended
        yield bytes(transfers._SMALL + 1)
        begun.append(number)
        ended_before.append(num_ended)
        yield b"no session file"
        await may_end.wait()
        num_ended += 1

    waiting = [asyncio.ensure_future(incoming.import_file("me", chunks(number))) for number in range(3)]
    await until(lambda: len(begun) >= 2)
    may_end.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert begun == [0, 1, 2]
    assert ended_before[:2] == [0, 0]
    assert ended_before[2] > 0
    assert [end.reason for end in ends if isinstance(end, SessionFileRefused)] == ["not_a_file"] * 3
    may_end.clear()
    monkeypatch.setattr(transfers, "_STALL_S", 0.01)
    for number in range(3, 6):
        with pytest.raises(SessionFileRefused, match="send it again"):
            await incoming.import_file("me", chunks(number))


async def test_uploads_that_hardly_send_and_another_owners_uploads_keep_nobody_waiting() -> None:
    worker = Worker(SlowEngine())
    incoming = transfers.Transfers(Runtime(EmbeddedBackend(worker, model_of(worker.engine))))
    num_waiting = 0

    async def chunks(first: bytes) -> AsyncIterator[bytes]:
        nonlocal num_waiting
        yield first
        num_waiting += 1
        await asyncio.Event().wait()

    async def whole() -> AsyncIterator[bytes]:
        yield bytes(transfers._SMALL + 1)

    slow = [asyncio.ensure_future(incoming.import_file("me", chunks(b"H"))) for _ in range(9)]
    slow += [asyncio.ensure_future(incoming.import_file("you", chunks(bytes(1 << 20)))) for _ in range(9)]
    await until(lambda: num_waiting == 11)
    for _ in range(2):
        with pytest.raises(SessionFileRefused, match="not a session file"):
            await asyncio.wait_for(incoming.import_file("me", whole()), 20)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_an_upload_that_trickles_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(SlowEngine())
    incoming = transfers.Transfers(Runtime(EmbeddedBackend(worker, model_of(worker.engine))))
    monkeypatch.setattr(transfers, "_STALL_S", 0.05)

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"H"
            await asyncio.sleep(0.005)

    with pytest.raises(SessionFileRefused, match="too slow"):
        await asyncio.wait_for(incoming.import_file("me", chunks()), 20)


async def test_an_import_whose_journal_fails_leaves_nothing(tmp_path: Path) -> None:
    async with serving(wordy_engine(), default_chat()) as here, client_of(here) as client:
        session = await open_session(client)
        await client.post(chat_path(session), json=said("a"))
        data = await downloaded(client, session)
    async with (
        serving(wordy_engine(), default_chat(), data_dir=str(tmp_path)) as there,
        client_of(there) as client,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "_turn", _full)
            refused_import = await client.post("/sessions/import", content=data)
        assert refusal_of(refused_import) == (503, "journal_failed")
        assert (await client.get("/sessions")).json()["data"] == []
        assert (await uploaded(client, data))["recomputed_tokens"] == 0
        assert len((await client.get("/sessions")).json()["data"]) == 1


def _full(*values: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


async def test_who_leaves_before_an_import_is_done_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(SlowEngine()) as here:
        data = await exported(here, await create(here, [1, 2] * 60), without_snapshot=True)
    engine = SlowEngine(forward_s=0.05)
    async with serving(engine, data_dir=str(tmp_path)) as there:
        with held(engine):
            call = there.stub.ImportSession(iter([pb.SessionChunk(data=data)]))
            running = asyncio.ensure_future(call.wait_for_connection())
            await until(lambda: engine.num_forwards > 0)
            call.cancel()
        await until(lambda: there.worker.num_free_slabs == 4)
        running.cancel()
        assert not (await there.stub.ListSessions(pb.ListSessionsRequest())).sessions
        assert (await imported(there, data)).recomputed_tokens == 120


async def test_a_chat_needs_a_server_that_chats_as_it_did() -> None:
    async with serving(wordy_engine(), default_chat()) as here, client_of(here) as client:
        data = await downloaded(client, await open_session(client))
    async with serving(wordy_engine()) as there, refused(*INVALID, reason="no_chat"):
        await imported(there, data)
    chat = default_chat()
    template = ChatTemplate(chat.model.template.source + " ")
    other = dataclasses.replace(chat, model=dataclasses.replace(chat.model, template=template))
    async with serving(wordy_engine(), other) as there, refused(*INVALID, reason="other_template"):
        await imported(there, data)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": b"[1]"},
        {"messages": b"no json"},
        {"reply": b'{"role": "parrot"}'},
        {"root": b"[]"},
        {"root": b'{"tools": "x", "variables": "{}"}'},
        {"root": b'{"tools": "{}", "variables": "{}"}'},
        {"root": b'{"tools": "[]", "variables": "[1]"}'},
        {"root": b'{"tools": "[]", "variables": "{\\"self\\": 1}"}'},
        {"messages": b'[{"role": "user", "content": null}]'},
        {"reply": b'{"role": "user", "content": "x"}'},
        {"request": b'{"messages": 5}'},
        {"request": b'{"x": ' + b"[" * 300 + b"]" * 300 + b"}"},
        {"response": b'{"routed_experts": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}"},
        {"num_control": 2**64 - 1},
        {"facts": b"1"},
        {"facts": b'{"routed_experts": [0, 1000000]}'},
        {"facts": b'{"indexer_topk": [5, 5]}'},
        {"facts": b'{"cut": [[9, 12], [2, 4]]}'},
        {"facts": b'{"view": {"pinned": 0, "start": 1000000}}'},
        {"facts": b'{"view": {"pinned": 2, "start": 1}}'},
        {"facts": b'{"view": {"pinned": -1, "start": 1}}'},
        {"facts": b'{"recalled": {"start": 0, "length": 1000000}}'},
        {"request": b"[]"},
        {"response": b"\xff"},
        {"response": b"[]"},
    ],
)
async def test_a_chat_that_no_server_wrote_is_refused(change: dict[str, Any], chat_file: bytes, abroad: Any) -> None:
    whole = decode(chat_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "to_stored", lambda turn: to_stored(turn) | change)
        changed = b"".join(encode(dataclasses.replace(whole, turns=whole.turns[:1])))
    answer = await abroad.post("/sessions/import", content=changed)
    assert (refusal_of(answer), error_of(answer)["reason"]) == ((400, "invalid_argument"), "damaged")
    assert (await abroad.get("/sessions")).json()["data"] == []


def _sections(data: bytes) -> list[tuple[bytes, Any]]:
    """The sections of a session file, decoded, but for the last one."""
    found: list[tuple[bytes, Any]] = []
    at = 12
    while data[at : at + 4] != b"END!":
        size = int.from_bytes(data[at + 4 : at + 12], "little")
        content = data[at + 12 : at + 12 + size]
        found.append((data[at : at + 4], content if data[at : at + 4] == b"SNAP" else msgspec.msgpack.decode(content)))
        at += 12 + size
    return found


def _sealed(sections: list[tuple[bytes, Any]]) -> bytes:
    """A session file with a digest that fits: what a stranger could send."""
    data = b"HOLDFAST" + (1).to_bytes(4, "little")
    for tag, record in [*sections, (b"END!", bytes(32))]:
        content = record if isinstance(record, bytes) else msgspec.msgpack.encode(record)
        data += tag + len(content).to_bytes(8, "little") + content
    return data[:-32] + hashlib.blake2b(data[:-32], digest_size=32).digest()


_NUMBERS = [-1, 0, 1, 2, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -1e300, 1e300, float("nan"), float("inf"), -0.0]
_TEXTS = ["", "\0", "x", "9" * 5000, "[1]", "7", "null", '{"self": 1}', "<|im_end|>", "y" * 70_000, "../x"]
_plain = [None, True, *_NUMBERS, *_TEXTS, [], {}, [1], ["x"], [[0, 5]], {"a": 1}]
_deep = [b"[" * depth + b"]" * depth for depth in (100, 300, 900, 5000)]
_binary = [b"", b"\0" * 4, b"\xff" * 8, b"1e999", b"9" * 5000, *_deep]
_binary += [b'{"routed_experts": 1, "x": ' + deep + b"}" for deep in _deep]


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Everywhere that something stands in a record: also in the JSON that is in it."""
    yield at
    inner = _json_in(value)
    if inner is not None:
        yield from list(_places(inner, (*at, _json_in)))[1:]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*at, index))


def _json_in(value: Any) -> Any:
    """The object or list that a text spells, or None."""
    with contextlib.suppress(ValueError):
        if isinstance(value, bytes | str) and value[:1] in (b"{", b"[", "{", "["):
            return json.loads(value)
    return None


def _put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at that place, or without what was there where `new` is `_put`."""
    if not place:
        return new
    key, *rest = place
    if key is _json_in:
        text = json.dumps(_put(_json_in(value), tuple(rest), new))
        return text.encode() if isinstance(value, bytes) else text
    changed = value.copy()
    if new is _put and not rest:
        del changed[key]
    else:
        changed[key] = _put(value[key], tuple(rest), new)
    return changed


def _answered(client: httpx.Client, session: str, kind: str, texts: list[str]) -> bytes:
    """The session as a file, after everything that can be asked of it was answered, if only with a refusal."""
    path = f"/sessions/{session}"
    body = {"branch": "all", "format": "json", "min_weight_version": 1}
    answers = [
        client.get(f"{path}?branches=all"),
        client.get(f"{path}?payloads=false"),
        client.get("/sessions"),
        client.post(f"{path}/samples"),
        client.post(f"{path}/samples", json=body),
        client.post(f"{path}/fork", json={}),
        client.post(chat_path(session), json=said("another beginning", max_tokens=1)),
        client.post(chat_path(session), json=said("a", texts[0], "b", texts[1], "c", max_tokens=1)),
    ]
    assert {(one.status_code, one.text[:200]) for one in answers if one.status_code >= 500} == set()
    assert answers[0].status_code == (200 if kind == "chat" else 400)
    exported = client.get(f"{path}/export")
    assert exported.status_code == 200, exported.text
    client.delete(f"/sessions/{answers[5].json().get('session_id', '')}")
    return exported.content


def _client_at(server: Server) -> httpx.Client:
    return httpx.Client(base_url=f"http://{server.http}", timeout=60, verify=False)


@pytest.mark.parametrize("kind", ["chat", "tokens"])
def test_a_crafted_file_is_refused_or_makes_a_session_with_which_everything_works(tmp_path: Path, kind: str) -> None:
    accepted: list[str] = []
    options = {"data_dir": str(tmp_path), "max_parked": 10_000, "snapshot_memory_mb": 0, "snapshot_disk_mb": 0}

    with serving_aside(wordy_engine(forward_s=0), default_chat(), **options) as server, _client_at(server) as client:
        session = str(client.post("/sessions", json={"metadata": {"a": "b"}, "group": "g"}).json()["session_id"])
        texts: list[str] = []
        for text in ("a", "b"):
            said_now = said(*[one for pair in zip(("a", "b"), texts, strict=False) for one in pair], text)
            answer = client.post(chat_path(session), json=said_now)
            texts.append(answer.json()["choices"][0]["message"]["content"])
        whole = client.get(f"/sessions/{session}/export?snapshot=false").content
        if kind == "tokens":
            whole = _as_tokens(whole)
        sections = _sections(whole)
        assert client.post("/sessions/import", content=_sealed(sections)).status_code == 200

        places = [(index, place) for index, (_, record) in enumerate(sections) for place in _places(record) if place]

        @settings(max_examples=examples(40), deadline=None, database=None)
        @given(
            st.lists(
                st.tuples(st.sampled_from(places), st.sampled_from([_put, *_plain, *_binary])), min_size=1, max_size=2
            )
        )
        def try_one(changes: Any) -> None:
            changed = sections.copy()
            for (index, place), new in changes:
                tag, record = changed[index]
                with contextlib.suppress(TypeError, LookupError, AttributeError):  # no place for bytes, or gone
                    changed[index] = tag, _put(record, place, new)
            answer = client.post("/sessions/import", content=_sealed(changed))
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 200:
                exported = _answered(client, answer.json()["session_id"], kind, texts)
                again = client.post("/sessions/import", content=exported)
                assert again.status_code == 200, again.text
                client.delete(f"/sessions/{again.json()['session_id']}")
                accepted.append(answer.json()["session_id"])

        try_one()
    with serving_aside(wordy_engine(forward_s=0), default_chat(), **options) as server, _client_at(server) as client:
        for session in accepted:
            _answered(client, session, kind, texts)


def _as_tokens(data: bytes) -> bytes:
    """A file of a token session with the same history."""
    (_, head), *turns = _sections(data)
    spans: list[tuple[bytes, Any]] = []
    for _, one in turns:
        logprobs = {name: one[name] for name in ("logprobs", "sampling_logprobs")}
        spans.append((b"SPAN", {"kind": "given", "tokens": one["given"]}))
        spans.append((b"SPAN", {"kind": "sampled", "tokens": one["sampled"], "stop_reason": "eos"} | logprobs))
    return _sealed([(b"HEAD", head | {"kind": "tokens"}), *spans])


@pytest.fixture
async def abroad() -> Any:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as client:
        yield client


@pytest.fixture
async def chat_file() -> bytes:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        await client.post(chat_path(session), json=said("a"))
        return await downloaded(client, session)


async def test_chats_behind_an_upstream_travel_too() -> None:
    async with chatting() as (here, _), chatting() as (there, _):
        session = await open_session(here.http)
        reply = (await here.http.post(chat_path(session), json=said("Hi"))).json()["choices"][0]["message"]["content"]
        data = await downloaded(here.http, session)
        answer = await uploaded(there.http, data)
        assert decode(data).snapshot is None
        records = [
            (await relay.http.get(f"/sessions/{name}")).json()["records"]
            for relay, name in ((here, session), (there, answer["session_id"]))
        ]
        assert records[0] == records[1]
        more = await there.http.post(chat_path(answer["session_id"]), json=said("Hi", reply, "More"))
        assert more.status_code == 200


async def test_closed_sessions_are_purged_by_whom_they_belong_to(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:a\nbob:b\nadmin:c\n")
    options = {"keys_file": str(keys), "data_dir": str(tmp_path / "data")}
    async with (
        serving(wordy_engine(), default_chat(), **options) as server,
        client_of(server, "a") as ann,
        client_of(server, "b") as bob,
        client_of(server, "c") as admin,
    ):
        one, two, still_open = [await open_session(ann) for _ in range(3)]
        theirs = await open_session(bob)
        for client, session in ((ann, one), (ann, two), (bob, theirs)):
            await client.delete(f"/sessions/{session}")
        assert (await ann.post("/sessions/purge")).json() == {"purged": 0, "sessions": []}
        listed = (await ann.post("/sessions/purge", json={"older_than_s": 0, "dry_run": True})).json()
        assert (listed["purged"], [entry["session_id"] for entry in listed["sessions"]]) == (0, [one, two])
        not_closed = await ann.post("/sessions/purge", json={"session_ids": [still_open]})
        assert refusal_of(not_closed) == (400, "invalid_argument")
        assert refusal_of(await ann.post("/sessions/purge", json={"session_ids": [theirs]})) == (
            404,
            "session_not_found",
        )
        assert (await ann.post("/sessions/purge", json={"session_ids": [one]})).json()["purged"] == 1
        assert (await ann.get(f"/sessions/{one}/export")).status_code == 404
        assert (await ann.get(f"/sessions/{two}/export")).status_code == 200
        assert (await admin.post("/sessions/purge", json={"older_than_s": 0})).json()["purged"] == 2
        assert (await bob.get(f"/sessions/{theirs}/export")).status_code == 404
        assert (await ann.get(f"/sessions/{still_open}")).status_code == 200
