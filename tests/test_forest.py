"""Forests: sessions of many conversations, which begin, branch and run side by side."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.engine.slab import SlabShape
from tests.effort import examples
from tests.serving import Server, default_chat, held, serving, wordy_engine
from tests.talking import chat_path, client_of, eventually, open_session, refusal_of, said, until
from tests.test_relay import chats_of, chatting

SYSTEM = {"role": "system", "content": "Be brief."}


@contextlib.asynccontextmanager
async def forest(num_slabs: int = 4, **options: Any) -> AsyncIterator[tuple[Server, httpx.AsyncClient, str]]:
    """A server with the default model's text and a fast fake engine, a client, and a forest."""
    engine = wordy_engine(forward_s=0.0, num_slabs=num_slabs)
    async with serving(engine, default_chat(), **{"max_parked": 100} | options) as server, client_of(server) as client:
        yield server, client, await open_session(client, history="forest")


async def take_turn(client: httpx.AsyncClient, session: str, body: dict[str, Any], **headers: str) -> str:
    """The reply to a request that must succeed."""
    response = await client.post(chat_path(session), json=body, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def shown(client: httpx.AsyncClient, session: str) -> dict[str, Any]:
    response = await client.get(f"/sessions/{session}", params={"branches": "all"})
    assert response.status_code == 200, response.text
    info: dict[str, Any] = response.json()
    return info


async def test_conversations_take_turns_in_one_session_and_each_keeps_its_cache() -> None:
    """The tokens of each are those of a session of its own, and a turn computes only what is new."""
    async with forest() as (_, client, session):
        talks: dict[str, list[str]] = {"red": [], "green": [], "blue": []}
        prefilled = {}
        for step in range(4):
            for name, texts in talks.items():
                texts.append(f"{name} {step}")
                response = await client.post(chat_path(session), json=said(*texts))
                reply = response.json()
                texts.append(reply["choices"][0]["message"]["content"])
                prefilled[name, step] = reply["usage"]["holdfast"]["prefilled_tokens"]
                assert "holdfast-branched" not in response.headers
        alone = await open_session(client)
        texts = []
        for step in range(4):
            texts.append(f"green {step}")
            texts.append(await take_turn(client, alone, said(*texts)))
        assert texts == talks["green"]
        info = await shown(client, session)
        first = (await shown(client, alone))["metadata"]["accumulated_token_ids"]
        greens = [record for record in info["records"] if record["turn"] % 3 == 2]
        assert greens[-1]["request"]["input_ids"] == first[: len(greens[-1]["request"]["input_ids"])]
        assert [one["root"] for one in info["conversations"]] == [1, 2, 3]
        assert [one["turns"] for one in info["conversations"]] == [4, 4, 4]
        assert max(prefilled[name, step] for name in talks for step in (1, 2, 3)) < prefilled["red", 0]


async def test_the_header_counts_the_dropped_tokens_of_its_own_conversation() -> None:
    async with forest() as (_, client, session):
        long = await client.post(chat_path(session), json=said("word " * 500, truncation="auto"))
        short = await client.post(chat_path(session), json=said("Hi"))
        dropped = [int(response.headers["holdfast-dropped-tokens"]) for response in (long, short)]
        assert dropped[0] == long.json()["usage"]["holdfast"]["dropped_tokens"] > 0
        assert dropped[1] == 0


async def test_another_system_prompt_other_tools_and_a_summary_begin_conversations() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with forest() as (_, client, session):
        first = await take_turn(client, session, said("Hi"))
        await take_turn(client, session, said("Hi", first, "More"))
        await take_turn(client, session, {"messages": [SYSTEM, *said("Hi")["messages"]], "max_tokens": 4})
        await take_turn(client, session, said("Hi", tools=[tool]))
        await take_turn(client, session, said("They said hi. Go on."))
        info = await shown(client, session)
        assert [node["parent"] for node in info["metadata"]["tree"]] == [0, 1, 0, 0, 0]
        assert (info["history"], info["branches"]) == ("forest", 0)


async def test_an_edited_reply_is_a_branch_that_is_marked_in_the_tree_and_in_samples() -> None:
    async with forest() as (_, client, session):
        first = await take_turn(client, session, said("Hi"))
        await take_turn(client, session, said("Hi", first, "More"), **{"x-session-id": "main"})
        edited = await client.post(chat_path(session), json=said("Hi", first + " Calling tools.", "More"))
        assert edited.status_code == 200
        retried = await client.post(chat_path(session), json=said("Hi", first, "Other"))
        assert retried.headers["holdfast-branched"] == "1"
        info = await shown(client, session)
        assert [(node["parent"], node["edited"]) for node in info["metadata"]["tree"]] == [
            (0, False),
            (1, False),
            (0, True),
            (1, False),
        ]
        samples = await client.post(f"/sessions/{session}/samples", json={"branch": "all", "format": "json"})
        places = {sample["branch"]: sample["metadata"]["holdfast"] for sample in samples.json()["samples"]}
        assert [places[number]["edited_turns"] for number in (2, 3, 4)] == [[], [3], []]
        assert [places[number]["parents"] for number in (2, 3, 4)] == [[0, 1], [0], [0, 1]]


async def test_conversations_run_side_by_side_and_a_second_request_at_a_tip_waits_for_its_turn() -> None:
    engine = wordy_engine(forward_s=0.0)
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        session = await open_session(client, history="forest")
        with held(engine):
            turns = [asyncio.ensure_future(take_turn(client, session, said(text))) for text in ("Hi", "Title", "Hi")]
            started = server.metrics.admission.labels("admitted")
            await until(lambda: started._value.get() == 2)
            assert (await client.get(f"/sessions/{session}")).json()["is_busy"]
        replies = await asyncio.gather(*turns)
        assert replies[0] == replies[2]
        info = await shown(client, session)
        assert sorted(node["parent"] for node in info["metadata"]["tree"]) == [0, 0, 0]
        assert not info["is_busy"]


async def test_a_strict_session_still_refuses_what_does_not_continue_it() -> None:
    async with forest() as (_, client, _forest):
        strict = await open_session(client, history="strict")
        first = await take_turn(client, strict, said("Hi"))
        second = await take_turn(client, strict, said("Hi", first, "More"))
        await take_turn(client, strict, said("Hi", first, "More", second, "More"))
        assert refusal_of(await client.post(chat_path(strict), json=said("Other"))) == (400, "message_mismatch")


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_a_client_that_leaves_while_the_session_is_rewound_for_it_leaves_no_trace(history: str) -> None:
    engine = wordy_engine(forward_s=0.0, num_slabs=2)
    async with serving(engine, default_chat(), max_parked=9) as server, client_of(server) as client:
        session = await open_session(client, history=history)
        first = await take_turn(client, session, said("Hi"))
        forwards = engine.num_forwards
        with held(engine):
            busy = asyncio.ensure_future(client.post("/v1/chat/completions", json=said("Wait")))
            await until(lambda: engine.num_forwards > forwards)
            admitted = server.metrics.admission.labels("admitted")
            retry = asyncio.ensure_future(client.post(chat_path(session), json=said("Hello")))
            await until(lambda: admitted._value.get() == 3)
            retry.cancel()
            left = server.metrics.http_requests.labels("session_chat", "499")
            await until(retry.done)
        assert (await busy).status_code == 200
        await until(lambda: left._value.get() == 1)
        assert (await client.post(chat_path(session), json=said("Hi", first, "More"))).status_code == 200
        assert (await client.post(chat_path(session), json=said("Hi", first, "Other"))).status_code == 200


async def test_a_client_that_leaves_while_a_cache_is_opened_for_it_leaves_it_to_others() -> None:
    engine = wordy_engine(forward_s=0.0, num_slabs=4)
    async with serving(engine, default_chat(), max_parked=9) as server, client_of(server) as client:
        session = await open_session(client, history="forest")
        first = await take_turn(client, session, said("Hi"))
        second = await take_turn(client, session, said("Hi", first, "More"))
        forwards = engine.num_forwards
        with held(engine):
            busy = asyncio.ensure_future(client.post("/v1/chat/completions", json=said("Wait")))
            await until(lambda: engine.num_forwards > forwards)
            admitted = server.metrics.admission.labels("admitted")
            branch = asyncio.ensure_future(client.post(chat_path(session), json=said("Hi", first, "Other")))
            await until(lambda: admitted._value.get() == 4)
            branch.cancel()
            await until(branch.done)
        assert (await busy).status_code == 200
        left = server.metrics.http_requests.labels("session_chat", "499")
        await until(lambda: left._value.get() == 1)
        await take_turn(client, session, said("Hi", first, "Other"))
        onward = (await client.post(chat_path(session), json=said("Hi", first, "More", second, "On"))).json()
        assert onward["usage"]["holdfast"]["prefilled_tokens"] < 20  # the cache that was to be copied is free again
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        await until(lambda: server.worker.num_free_slabs == 4)


async def test_the_servers_setting_decides_what_a_new_session_is() -> None:
    async with serving(wordy_engine(), default_chat(history="forest")) as server, client_of(server) as client:
        session = await open_session(client)
        assert (await shown(client, session))["history"] == "forest"
        assert "history" not in await shown(client, await open_session(client, history="strict"))
        refused = await client.post("/sessions", json={"history": "circular"})
        assert refusal_of(refused) == (400, "invalid_argument")


@pytest.mark.parametrize("num_slabs", [1, 2])
async def test_few_slabs_cost_time_and_nothing_else(num_slabs: int) -> None:
    async with forest(num_slabs=num_slabs) as (server, client, session):
        others = [await open_session(client, history="forest") for _ in range(3)]
        for each in (session, *others):
            talks: list[list[str]] = [[], [], []]
            for step in range(3):
                for number, texts in enumerate(talks):
                    texts.append(f"{number} {step}")
                    texts.append(await take_turn(client, each, said(*texts)))
        for each in (session, *others):
            await client.delete(f"/sessions/{each}")
        await until(lambda: server.worker.num_free_slabs == num_slabs)


async def test_forests_do_not_evict_one_another_where_nothing_may_be_parked() -> None:
    async with forest(num_slabs=2, max_parked=0) as (_, client, session):
        other = await open_session(client, history="forest")
        for each in (session, other, session):
            await take_turn(client, each, said("Hi"))
        assert [len((await shown(client, each))["records"]) for each in (session, other)] == [2, 1]


async def test_a_conversation_leaves_one_snapshot_however_often_it_is_parked(tmp_path: Any) -> None:
    async with forest(num_slabs=1, data_dir=str(tmp_path)) as (_, client, session):
        other, talks = await open_session(client, history="forest"), ([], [])
        for step in range(3):
            for each, texts in zip((session, other), talks, strict=True):
                texts.append(f"{step}")
                texts.append(await take_turn(client, each, said(*texts)))
    kept = sorted(path.stem.partition("t")[0] for path in (tmp_path / "snapshots").iterdir())
    assert kept == sorted((session, other))


async def test_a_forest_comes_back_after_a_restart_and_every_conversation_goes_on(tmp_path: Any) -> None:
    options = {"data_dir": str(tmp_path), "max_parked": 100}
    async with forest(**options) as (_, client, session):
        red, blue = ["red"], ["blue"]
        for texts in (red, blue):
            texts.append(await take_turn(client, session, said(*texts)))
        red_next = await take_turn(client, session, said(*red, "More"))
        before = await shown(client, session)
    async with forest(**options) as (_, client, _):
        after = await shown(client, session)
        assert after["metadata"] == before["metadata"]
        assert after["records"] == before["records"]
        again = await client.post(chat_path(session), json=said(*red, "More"))
        assert again.json()["choices"][0]["message"]["content"] == red_next
        assert again.headers["holdfast-branched"] == "1"
        reply = (await client.post(chat_path(session), json=said(*blue, "More"))).json()
        assert reply["usage"]["holdfast"]["prefilled_tokens"] < 20  # its cache was saved at the shutdown
        blue_next = reply["choices"][0]["message"]["content"]
        assert [node["parent"] for node in (await shown(client, session))["metadata"]["tree"]] == [0, 0, 1, 1, 2]
        fork = (await client.post(f"/sessions/{session}/fork")).json()["session_id"]
        assert (await shown(client, fork))["history"] == "forest"
        assert await take_turn(client, fork, said(*blue, "More", blue_next, "On")) == await take_turn(
            client, session, said(*blue, "More", blue_next, "On")
        )
        file = (await client.get(f"/sessions/{session}/export")).content
        imported = (await client.post("/sessions/import", content=file)).json()["session_id"]
        there, here = await shown(client, imported), await shown(client, session)
        assert there["metadata"]["tree"] == here["metadata"]["tree"]
        assert there["history"] == "forest"


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_a_fork_from_any_turn_has_its_path_and_goes_on_as_the_session_did(tmp_path: Path, history: str) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path / "data"), "num_slabs": 2}
    forks = []
    async with forest(**options) as (_, client, _):
        session = await open_session(client, history=history, label="l")
        texts = ["a"]
        for text in ("b", "c", "d"):
            texts += [await take_turn(client, session, said(*texts)), text]
        retried = await take_turn(client, session, said(*texts[:5], seed=2))  # turn 4, beside turn 3
        assert [node["parent"] for node in (await shown(client, session))["metadata"]["tree"]] == [0, 1, 2, 2]
        for turn in (1, 2, 3, 4):
            response = await client.post(f"/sessions/{session}/fork", json={"turn": turn})
            assert response.status_code == 200, response.text
            forks.append(fork := response.json()["session_id"])
            info, page = await shown(client, fork), await tokens(client, fork)
            assert page["ids"] == (await tokens(client, session, turn=turn))["ids"]
            assert (info["turns"], info["history_length"], info["label"]) == (min(turn, 3), page["total"], "l")
        for fork, num in zip(forks[:2], (3, 5), strict=True):
            assert await take_turn(client, fork, said(*texts[:num])) == texts[num]
        await take_turn(client, forks[3], said(*texts[:5], retried, "d"))
        for turn in (0, 5, "1", -1):
            response = await client.post(f"/sessions/{session}/fork", json={"turn": turn})
            assert refusal_of(response) == (400, "invalid_argument")
        before = [await tokens(client, fork) for fork in forks]
    async with forest(**options) as (_, client, _):
        assert [await tokens(client, fork) for fork in forks] == before


async def tokens(client: httpx.AsyncClient, session: str, **query: int) -> Any:
    return (await client.get(f"/sessions/{session}/tokens", params=query)).json()


async def test_in_front_of_an_upstream_conversations_are_only_ids() -> None:
    async with chatting(delay_s=0.01) as (relay, upstream):
        session = await open_session(relay.http, history="forest")
        talks = {name: [name] for name in "abcdefgh"}
        for _ in range(3):
            replies = await asyncio.gather(*(take_turn(relay.http, session, said(*texts)) for texts in talks.values()))
            for texts, reply in zip(talks.values(), replies, strict=True):
                texts += [reply, "More"]
        info = await shown(relay.http, session)
        assert [one["turns"] for one in info["conversations"]] == [3] * 8
        told = sorted(seen.json["input_ids"] for seen in upstream.chats())
        assert sorted(record["request"]["input_ids"] for record in info["records"]) == told


Turn = tuple[list[dict[str, str]], str]  # what was sent, and the reply to it


class Talker:
    """An agent in a forest: it goes on, leaves, retries, edits and compacts, and keeps what it was told."""

    def __init__(self, name: str, source: random.Random, send: Any, path: str) -> None:
        self._source = source
        self._send = send
        self._path = path
        self._name = name
        self._messages: list[dict[str, str]] = [{"role": "system", "content": name}]
        self.told: list[Turn] = []
        self.num_recalled = 0  # tokens

    async def run(self, num_steps: int) -> None:
        for step in range(num_steps):
            action = self._source.choice(["go on", "go on", "leave", "retry", "edit", "compact", "repeat", "twin"])
            replies = [index for index, message in enumerate(self._messages) if message["role"] == "assistant"]
            if action == "edit" and replies:
                self._messages[self._source.choice(replies)] = {"role": "assistant", "content": f"edited {step}"}
            if action == "retry" and replies:
                del self._messages[replies[-1] - 1 :]
            if action == "compact":
                self._messages = [{"role": "system", "content": self._name}]
            self._messages.append({"role": "user", "content": f"{self._name} {step}"})
            sent = list(self._messages)
            body = {"messages": sent, "max_tokens": 3, "seed": 5}
            if action == "leave":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._source.random() * 0.02):
                        await self._answer(body, {})
                continue
            headers = {"idempotency-key": f"{self._name}-{step}"}
            if action == "twin":
                first, second = await asyncio.gather(self._answer(body, {}), self._answer(body, {}))
                self.told.append((sent, second))
            else:
                first = await self._answer(body, headers)
            if action == "repeat":
                assert await self._answer(body, headers) == first
            self.told.append((sent, first))
            self._messages.append({"role": "assistant", "content": first})

    async def _answer(self, body: dict[str, Any], headers: dict[str, str]) -> str:
        response = await self._send(self._path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        self.num_recalled += int(response.headers.get("holdfast-recalled-tokens", 0))
        return str(response.json()["choices"][0]["message"]["content"])


async def check_told(client: httpx.AsyncClient, session: str, talkers: list[Talker]) -> list[list[Turn]]:
    """Everything that the talkers were told is on record, and every path is one story. Returns the paths to leaves."""
    info = await eventually(lambda: shown(client, session), lambda info: not info["is_busy"])
    turns: dict[int, Turn] = {}
    for record in info["records"]:
        sent = [{key: message[key] for key in ("role", "content")} for message in record["request"]["messages"]]
        turns[record["turn"]] = sent, record["response"]["choices"][0]["message"]["content"]
    on_record = list(turns.values())
    for told in [told for talker in talkers for told in talker.told]:
        assert told in on_record
        on_record.remove(told)  # what was told twice is on record twice
    by_number = {record["turn"]: record for record in info["records"]}
    paths: dict[int, list[Turn]] = {}
    for number, record in by_number.items():
        paths[number] = [*paths.get(record["parent"], []), turns[number]]
        if above := by_number.get(record["parent"]):
            ids = above["request"]["input_ids"]
            assert record["request"]["input_ids"][: len(ids)] == ids
    parents = {record["parent"] for record in info["records"]}
    return [path for number, path in paths.items() if number not in parents]


@pytest.mark.parametrize("num_slabs", [1, 3, 8])
@pytest.mark.parametrize("seed", range(examples(1)))
async def test_eight_conversations_in_any_interleaving_are_what_each_of_them_would_be_alone(
    seed: int, num_slabs: int
) -> None:
    source = random.Random(seed)
    shape, recall = SlabShape(recent=96, max_pin=64, prefill_chunk=64, rewind_tokens=256), {"tokens": 40}
    engine = wordy_engine(forward_s=0.0, num_slabs=num_slabs, shape=shape)  # a window that the conversations outgrow
    async with serving(engine, default_chat(), max_parked=100) as server, client_of(server) as client:
        session = await open_session(client, history="forest", recall=recall)
        talkers = [
            Talker(f"talker {number}", random.Random(source.random()), client.post, chat_path(session))
            for number in range(8)
        ]
        await asyncio.gather(*(talker.run(8) for talker in talkers))
        assert any(talker.num_recalled for talker in talkers)
        paths = await check_told(client, session, talkers)
        for path in source.sample(paths, 6):
            alone = await open_session(client, recall=recall)
            for sent, reply in path:
                assert await take_turn(client, alone, {"messages": sent, "max_tokens": 3, "seed": 5}) == reply
            await client.delete(f"/sessions/{alone}")
        await client.delete(f"/sessions/{session}")
        await until(lambda: server.worker.num_free_slabs == num_slabs)


@pytest.mark.parametrize("seed", range(examples(1)))
async def test_eight_conversations_in_front_of_an_upstream_are_what_each_was_told(seed: int) -> None:
    source = random.Random(seed)
    async with chatting(delay_s=0.001) as (relay, upstream):
        session = await open_session(relay.http, history="forest")
        talkers = [
            Talker(f"talker {number}", random.Random(source.random()), relay.http.post, chat_path(session))
            for number in range(8)
        ]
        await asyncio.gather(*(talker.run(10) for talker in talkers))
        await check_told(relay.http, session, talkers)
        asked = [seen.json["input_ids"] for seen in upstream.chats()]
        for record in (await shown(relay.http, session))["records"]:
            asked.remove(record["request"]["input_ids"])  # each was asked for as it is on record


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_in_front_of_an_upstream_a_fork_from_a_turn_sends_its_path(history: str) -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http, history=history)
        texts = ["a"]
        for text in ("b", "c"):
            texts += [await take_turn(relay.http, session, said(*texts)), text]
        response = await relay.http.post(f"/sessions/{session}/fork", json={"turn": 1})
        fork = response.json()["session_id"]
        await take_turn(relay.http, fork, said(*texts[:2], "other"))
        first = (await tokens(relay.http, session, turn=1))["ids"]
        sent = chats_of(upstream)[-1]["input_ids"]
        assert sent[: len(first)] == first
        assert (await tokens(relay.http, fork))["ids"][: len(sent)] == sent
