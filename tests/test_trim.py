"""Templates without an end of turn: the model stops at the opener of a message, and another message may come."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode
from holdfast.config import ChatConfig
from holdfast.engine.slab import SlabShape
from holdfast.serving.lifecycle import Chat
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import FakeModel
from tests.families import family_model
from tests.relaying import relaying
from tests.serving import ScriptedEngine, serving
from tests.talking import chat_path, client_of, open_session, said

MODEL = family_model("glm4_moe")
IDS = {text: MODEL.tokenizer.control_tokens[text] for text in ("<|user|>", "<|observation|>", "<|endoftext|>")}
ENDS = ["<|observation|>", "<|user|>", "<|endoftext|>", "<|user|>"]  # where the model stops, turn by turn
SCRIPTS = {turn: [*MODEL.tokenizer.encode(f"Reply {turn}."), IDS[end]] for turn, end in enumerate(ENDS)}


@contextlib.asynccontextmanager
async def _embedded(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    shape = SlabShape(recent=2000, max_pin=64, prefill_chunk=64, draft_length=0, rewind_tokens=32)
    engine = ScriptedEngine(SCRIPTS, shape=shape, forward_s=0.0, vocab_size=MODEL.tokenizer.inner.get_vocab_size())
    async with serving(engine, Chat(MODEL, ChatConfig()), **options) as server, client_of(server) as client:
        yield client


async def _talk(client: httpx.AsyncClient, session: str, turns: range) -> None:
    texts = [part for turn in range(turns.start) for part in (f"Question {turn}", f"Reply {turn}.")]
    for turn in turns:
        texts.append(f"Question {turn}")
        response = await client.post(chat_path(session), json=said(*texts, seed=turn, max_tokens=20))
        assert response.status_code == 200, response.text
        reply = response.json()["choices"][0]
        assert (reply["message"]["content"], reply["finish_reason"]) == (f"Reply {turn}.", "stop")
        texts.append(reply["message"]["content"])


async def _check(client: httpx.AsyncClient, session: str) -> None:
    """The history is what the template renders, and the sample has what was sampled of it."""
    told = (await client.get(f"/sessions/{session}")).json()["metadata"]
    ids = told["accumulated_token_ids"]
    assert told["max_trim_tokens"] == 1
    assert (ids.count(IDS["<|user|>"]), ids.count(IDS["<|observation|>"])) == (len(ENDS) + 1, 0)
    export = decode((await client.post(f"/sessions/{session}/samples", json={"format": "json"})).content)
    assert problems(export) == []
    (sample,) = export.samples
    assert sample.tokens.tolist() == ids  # with the last end, which was sampled, whatever comes next
    trained = {turn.number: sample.tokens[turn.sampled_start : turn.end].tolist() for turn in sample.turns}
    kept = {turn: script if ENDS[turn] == "<|user|>" else script[:-1] for turn, script in SCRIPTS.items()}
    assert trained == {turn + 1: script for turn, script in kept.items()}
    assert sample.loss_mask.sum() == sum(map(len, kept.values()))


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_no_opener_stays_that_the_next_message_does_not_have(history: str, tmp_path: Any) -> None:
    options = {"data_dir": str(tmp_path), "max_parked": 4}
    async with _embedded(**options) as client:
        session = await open_session(client, history=history)
        await _talk(client, session, range(2))
    async with _embedded(**options) as client:  # as it was, after a restart
        await _talk(client, session, range(2, len(ENDS)))
        await _check(client, session)
        content = (await client.get(f"/sessions/{session}/export")).content
        copy = (await client.post("/sessions/import", content=content)).json()["session_id"]
        await _check(client, copy)


async def test_in_front_of_an_upstream_its_prompt_has_the_opener_of_the_next_message() -> None:
    size = MODEL.tokenizer.inner.get_vocab_size()
    model = FakeModel(vocab_size=size, eos_token_id=IDS["<|endoftext|>"], decode=_spoken)
    async with (
        FakeSGLang(model) as upstream,
        relaying(upstream.url, Chat(MODEL, ChatConfig()), size) as relay,
    ):
        session = await open_session(relay.http)
        model.scripted.extend(SCRIPTS.values())
        await _talk(relay.http, session, range(len(ENDS)))
        await _check(relay.http, session)
        records = (await relay.http.get(f"/sessions/{session}")).json()["records"]
        sent = [json.loads(seen.body)["input_ids"] for seen in upstream.requests[-len(ENDS) :]]
        assert [record["request"]["input_ids"] for record in records] == sent


def _spoken(ids: Sequence[int]) -> str:
    """As servers have it: without the token that ends the reply."""
    return MODEL.tokenizer.decode([token for token in ids if not MODEL.tokenizer.is_control(token)])
