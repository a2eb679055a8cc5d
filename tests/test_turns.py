"""Turns under stress: retries that we know, pauses, and random interleavings of chats, deletes and failures."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from holdfast.chats.retry import Broadcast
from holdfast.testing.fake_upstream import Fault, flat_rows
from tests.effort import examples
from tests.relaying import Relay
from tests.serving import SlowEngine, default_chat, held, serving, wordy_engine
from tests.talking import as_events_text, chat_path, client_of, error_of, eventually, open_session, said, until
from tests.test_relay import chatting

KEY = {"idempotency-key": "k1"}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("headers", [KEY, RETRY])
async def test_a_retry_of_the_last_turn_gets_its_bytes_and_is_not_sampled_again(headers: dict[str, str]) -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY if headers is KEY else {})
        again = await relay.http.post(chat_path(session), json=said("Hi"), headers=headers)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert len(upstream.requests) == 1
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 1


@pytest.fixture
def listened(monkeypatch: pytest.MonkeyPatch) -> list[Broadcast[Any]]:
    """The turn of every request that began or joined one, in the order in which they did."""
    turns: list[Broadcast[Any]] = []
    listen = Broadcast.listen

    def listen_and_tell(turn: Broadcast[Any]) -> AsyncGenerator[Any, None]:
        turns.append(turn)
        return listen(turn)

    monkeypatch.setattr(Broadcast, "listen", listen_and_tell)
    return turns


async def test_a_retry_joins_the_turn_in_flight_and_keeps_it_alive(listened: list[Broadcast[Any]]) -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        async with httpx.AsyncClient(base_url=relay.http.base_url) as leaving:
            first = asyncio.ensure_future(leaving.post(chat_path(session), json=said("Hi"), headers=KEY))
            await until(lambda: bool(upstream.requests))
            joined = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi"), headers=KEY))
            third = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi"), headers=KEY))
            await until(lambda: len(listened) == 3)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
        await until(lambda: _count(relay, "http_requests_total", route="session_chat", status="499") == 1)
        upstream.may_answer.set()
        one, other = await joined, await third
        assert listened == [listened[0]] * 3
        assert one.status_code == other.status_code == 200
        assert one.content == other.content
        assert len(upstream.requests) == 1
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 1


async def test_two_identical_requests_with_one_key_at_the_same_moment_join() -> None:
    async with chatting() as (relay, upstream):
        for _ in range(10):
            session = await open_session(relay.http)
            before = len(upstream.requests)
            posts = [relay.http.post(chat_path(session), json=said("Hi"), headers=KEY) for _ in range(2)]
            one, other = await asyncio.gather(*posts)
            assert (one.status_code, other.status_code) == (200, 200)
            assert one.content == other.content
            assert len(upstream.requests) == before + 1


async def test_a_key_on_another_body_is_refused() -> None:
    async with chatting() as (relay, _):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY)
        refused = await relay.http.post(chat_path(session), json=said("Hello"), headers=KEY)
        assert (refused.status_code, error_of(refused)["code"]) == (422, "idempotency_mismatch")


async def test_without_a_key_the_same_request_is_a_new_branch() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi"))
        again = await relay.http.post(chat_path(session), json=said("Hi"))
        assert again.headers["holdfast-branched"] == "0"
        assert len(upstream.requests) == 2


async def test_errors_are_never_replayed() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(body=b"{}"))
        assert (await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY)).status_code == 502
        assert (await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY)).status_code == 200


async def _joined(
    client: httpx.AsyncClient, engine: SlowEngine, session: str, body: dict[str, Any], listened: list[Broadcast[Any]]
) -> list[httpx.Response]:
    """The responses to the same request made twice, the second one while the engine computes the first."""
    num_forwards, num_listened = engine.num_forwards, len(listened)
    with held(engine):
        first = asyncio.ensure_future(client.post(chat_path(session), json=body, headers=KEY))
        await until(lambda: engine.num_forwards > num_forwards)
        second = asyncio.ensure_future(client.post(chat_path(session), json=body, headers=KEY))
        await until(lambda: len(listened) == num_listened + 2)
    assert listened[-2] is listened[-1]
    return [await first, await second]


async def test_our_own_turns_are_joined_and_replayed_too_streams_included(listened: list[Broadcast[Any]]) -> None:
    engine = wordy_engine()
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session = await open_session(client)
        body = said("Hi", max_tokens=12)
        first, joined = await _joined(client, engine, session, body, listened)
        assert joined.content == first.content
        replayed = await client.post(chat_path(session), json=body, headers=KEY)
        assert replayed.content == joined.content
        other = await open_session(client)
        streamed = said("Hi", max_tokens=8, stream=True)
        one, two = await _joined(client, engine, other, streamed, listened)
        assert one.text == two.text
        again = as_events_text((await client.post(chat_path(other), json=streamed, headers=KEY)).text)
        assert again[-1] == "[DONE]"
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in as_events_text(one.text)[:-1]]
        assert again[0]["choices"][0]["delta"]["content"] == "".join(pieces)


async def test_paused_turns_wait_and_go_on_when_resumed() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        assert (await relay.http.post("/control/pause")).json() == {"status": "paused", "running": 0}
        turn = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi")))
        await eventually(lambda: relay.http.get(f"/sessions/{session}"), lambda shown: shown.json()["is_busy"])
        await relay.http.get(f"/sessions/{session}/v1/models")  # goes past the turn
        await relay.http.post("/control/resume")
        assert (await turn).status_code == 200
        assert [seen.path for seen in upstream.requests] == ["/v1/models", "/v1/chat/completions"]


async def test_a_pause_that_lasts_too_long_is_a_503() -> None:
    async with chatting(pause_max_wait_s=0.05) as (relay, _):
        session = await open_session(relay.http)
        await relay.http.post("/control/pause")
        refused = await relay.http.post(chat_path(session), json=said("Hi"))
        assert (refused.status_code, error_of(refused)["code"]) == (503, "paused")
        assert refused.headers["retry-after"]


async def test_a_pause_may_end_what_runs() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        turn = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi")))
        await until(lambda: bool(upstream.requests))
        assert (await relay.http.post("/control/pause?mode=abort")).json()["running"] == 1
        refused = await turn
        assert (refused.status_code, error_of(refused)["code"]) == (503, "paused")
        await until(lambda: upstream.num_running == 0)
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 0
        assert error_of(await relay.http.post("/control/pause?mode=odd"))["param"] == "mode"


async def test_a_turn_that_waits_in_the_queue_does_not_begin_while_paused() -> None:
    async with chatting(max_concurrent=1) as (relay, upstream):
        one, two = await open_session(relay.http), await open_session(relay.http)
        upstream.may_answer.clear()
        first = asyncio.ensure_future(relay.http.post(chat_path(one), json=said("Hi", max_tokens=1)))
        await until(lambda: len(upstream.requests) == 1)
        second = asyncio.ensure_future(relay.http.post(chat_path(two), json=said("Hi", max_tokens=1)))
        await until(lambda: _count(relay, "queue_depth") == 1)
        await relay.http.post("/control/pause")
        upstream.may_answer.set()
        assert (await first).status_code == 200
        await until(lambda: _count(relay, "queue_depth") == 0)  # it left the queue, and waits for the end of the pause
        await relay.http.get(f"/sessions/{two}/v1/models")  # goes past the turn
        await relay.http.post("/control/resume")
        assert (await second).status_code == 200
        chat = "/v1/chat/completions"
        assert [seen.path for seen in upstream.requests] == [chat, "/v1/models", chat]


def _count(relay: Relay, name: str, **labels: str) -> float:
    return relay.metrics.registry.get_sample_value(f"holdfast_{name}", labels) or 0.0


async def test_a_turn_that_ends_in_time_is_recorded_while_draining(tmp_path: Any) -> None:
    keeping = {"data_dir": str(tmp_path), "drain_s": 60.0}
    async with contextlib.AsyncExitStack() as stack:
        relay, upstream = await stack.enter_async_context(chatting(**keeping))
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        async with httpx.AsyncClient(base_url=relay.http.base_url, timeout=20) as client:
            turn = asyncio.ensure_future(client.post(chat_path(session), json=said("Hi", max_tokens=2)))
            await until(lambda: bool(upstream.requests))
            leaving = asyncio.ensure_future(stack.aclose())
            ready = await eventually(lambda: client.get("/readyz"), lambda answer: answer.status_code != 200)
            assert ready.json() == {"status": "draining"}
            upstream.may_answer.set()
            await leaving
            assert (await turn).status_code == 200
    async with chatting(**keeping) as (relay, _):
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 1


async def test_a_replay_is_what_the_client_got_not_what_was_kept() -> None:
    async with chatting(routed_experts=flat_rows, routing_replay="full") as (relay, _):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY)
        assert b"AAAA" not in first.content
        again = await relay.http.post(chat_path(session), json=said("Hi"), headers=KEY)
        assert again.content == first.content
        (record,) = (await relay.http.get(f"/sessions/{session}")).json()["records"]
        usage = first.json()["usage"]
        sent = record["response"]["choices"][0]["meta_info"]["routed_experts"]
        assert sent == flat_rows(usage["total_tokens"] - 1)


async def test_each_turn_knows_the_weights_it_was_sampled_with() -> None:
    async with serving(wordy_engine(), default_chat(), weight_version="1") as server, client_of(server) as client:
        session = await open_session(client)
        await client.post(chat_path(session), json=said("Hi"))
        assert (await client.put("/control/weight_version", json={"weight_version": "2"})).status_code == 200
        await client.post(chat_path(session), json=said("Hello"))
        records = (await client.get(f"/sessions/{session}?branches=all")).json()["records"]
        assert [record["weight_versions"] for record in records] == [["1", "1"], ["2", "2"]]


async def test_only_an_admin_pauses(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:a\nadmin:b\n")
    async with serving(wordy_engine(), default_chat(), keys_file=str(keys)) as server:
        async with client_of(server, "a") as ann:
            refused = await ann.post("/control/pause")
            assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
        async with client_of(server, "b") as admin:
            assert (await admin.post("/control/pause")).status_code == 200


async def test_rewards_are_kept_for_turns_and_for_the_whole() -> None:
    async with chatting() as (relay, _):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi"))
        path = f"/sessions/{session}/reward"
        assert (await relay.http.post(path, json={"reward": 1.5})).status_code == 200
        assert (await relay.http.post(path, json={"reward": -1, "turn": 1})).status_code == 200
        info = (await relay.http.get(f"/sessions/{session}")).json()
        assert (info["reward"], info["records"][0]["reward"]) == (1.5, -1.0)
        assert error_of(await relay.http.post(path, json={"reward": 1, "turn": 2}))["param"] == "turn"
        nan = await relay.http.post(path, content=b'{"reward": NaN}')
        assert (nan.status_code, error_of(nan)["param"]) == (400, "reward")


async def _agent(relay: Relay, upstream: Any, source: random.Random, num_steps: int) -> None:
    """One agent that does what agents do, and checks after every step that its session is whole."""
    session = await open_session(relay.http)
    texts: list[str] = []
    for step in range(num_steps):
        action = source.choice(["chat", "chat", "retry", "fail", "leave", "twice", "delete"])
        asking = [*texts, f"q{step}"] if action != "retry" or not texts else [*texts[:-2], f"r{step}"]
        body = said(*asking, max_tokens=2)
        if action == "delete" and step:
            turn = asyncio.ensure_future(relay.http.post(chat_path(session), json=body))
            await asyncio.sleep(source.random() * 0.02)
            assert (await relay.http.delete(f"/sessions/{session}")).status_code == 204
            assert (await turn).status_code in (200, 404, 502, 503)
            assert (await relay.http.get(f"/sessions/{session}")).status_code == 404
            session, texts = await open_session(relay.http), []
            continue
        if action == "fail":
            upstream.faults.append(Fault(body=b"{}"))  # whoever comes next gets it: any agent
        if action == "leave":
            async with httpx.AsyncClient(base_url=relay.http.base_url) as leaving:
                with contextlib.suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(source.random() * 0.03):
                        await leaving.post(chat_path(session), json=body)
            texts = await _settled(relay, session)
            continue
        replies = [relay.http.post(chat_path(session), json=body) for _ in range(2 if action == "twice" else 1)]
        for reply in await asyncio.gather(*replies):
            assert reply.status_code in (200, 409, 502), reply.text
        texts = await _settled(relay, session)


async def _settled(relay: Relay, session: str) -> list[str]:
    """What was said so far, once nothing runs: records, tree and history tell the same story."""

    async def shown() -> dict[str, Any]:
        info: dict[str, Any] = (await relay.http.get(f"/sessions/{session}")).json()
        return info

    def is_settled(info: dict[str, Any]) -> bool:
        return not info["is_busy"] and info["history_length"] == len(info["metadata"]["accumulated_token_ids"])

    info = await eventually(shown, is_settled)
    current = [node for node in info["metadata"]["tree"] if node["is_current"]]
    assert info["history_length"] == sum(node["given_tokens"] + node["sampled_tokens"] for node in current)
    assert len(info["records"]) == len(current) == info["turns"]
    for record in info["records"]:
        sampled = [entry[1] for entry in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
        ids = record["request"]["input_ids"] + sampled
        assert info["metadata"]["accumulated_token_ids"][: len(ids)] == ids
    return [message["content"] for message in info["messages"]]


@pytest.mark.parametrize("seed", range(examples(2)))
async def test_any_interleaving_leaves_every_session_whole(seed: int) -> None:
    async with chatting(delay_s=0.005) as (relay, upstream):
        source = random.Random(seed)
        await asyncio.gather(*(_agent(relay, upstream, random.Random(source.random()), num_steps=12) for _ in range(8)))
        upstream.faults.clear()
        await until(lambda: upstream.num_running == 0)
        session = await open_session(relay.http)
        assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 200
