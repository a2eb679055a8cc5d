"""From agents to training data: what was sampled is what comes out, token for token, whoever generated it."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.chat.chat_model import ChatModel
from holdfast.chats.embedded_turn import _speculation
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode, encode
from holdfast.chats.samples.sample import Export
from holdfast.config import ChatConfig
from holdfast.engine.interface import Row
from holdfast.engine.slab import SlabShape
from holdfast.generation import Done, StopReason
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.lifecycle import Chat
from tests.qwen3 import qwen3
from tests.relaying import relaying
from tests.serving import ScriptedEngine, Server, default_chat, serving
from tests.talking import chat_path, client_of, error_of, open_session, said
from tests.test_relay import chatting

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


class WatchedEngine(ScriptedEngine):
    """Remembers, slab by slab, every token that the model has seen."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[list[int]] = []  # one list a prompt, in the order in which they began
        self._current: dict[int, list[int]] = {}

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        for slab, tokens, _ in rows:
            if slab.length == 0:
                self._current[slab.slot] = []
                self.seen.append(self._current[slab.slot])
            del self._current[slab.slot][slab.length :]
            self._current[slab.slot] += tokens
        return super().forward(rows)


def model_of(name: str) -> ChatModel:
    return default_chat().model if name == "default" else qwen3()


@asynccontextmanager
async def holdfast_behind_holdfast(chat: ChatModel) -> AsyncIterator[tuple[httpx.AsyncClient, WatchedEngine, Server]]:
    """One Holdfast with an engine, and another that has it for its SGLang."""
    vocab_size = chat.grammars.vocab_size
    shape = SlabShape(recent=4096, max_pin=512, prefill_chunk=512, rewind_tokens=512)
    engine = WatchedEngine({}, num_slabs=2, shape=shape, forward_s=0.0, vocab_size=vocab_size)
    wrapped = Chat(chat, ChatConfig())
    async with (
        serving(engine, wrapped) as inner,
        relaying(f"http://{inner.http}", wrapped, vocab_size) as relay,
    ):
        engine.seen.clear()
        yield relay.http, engine, inner


async def converse(http: httpx.AsyncClient, engine: ScriptedEngine, chat: ChatModel, session: str, turns: int) -> None:
    """A tool-using agent that never sends reasoning back."""
    messages: list[Any] = [{"role": "system", "content": "You look at things."}, {"role": "user", "content": "Go."}]
    for turn in range(turns):
        script = f'<tool_call>\n{{"name": "look", "arguments": {{"at": "thing {turn}"}}}}\n</tool_call>'
        if chat.reasons:
            script = f"<think>\nThing {turn} is next.\n</think>\n\n{script}"
        engine.scripts[turn + 1] = [*chat.tokenizer.encode(script), chat.continuation.end_of_turn]
        body = {"messages": messages, "tools": [TOOL], "seed": turn + 1, "max_tokens": 100}
        reply = await http.post(chat_path(session), json=body)
        assert reply.status_code == 200, reply.text
        assert "holdfast-branched" not in reply.headers
        message = reply.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"at": f"thing {turn}"}
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"It is number {turn}."})


async def fetch(http: httpx.AsyncClient, session: str, **options: Any) -> Export:
    reply = await http.post(f"/sessions/{session}/samples", json=options)
    assert reply.status_code == 200, reply.text
    export = decode(reply.content)
    assert problems(export) == []
    return export


@pytest.mark.parametrize("name", ["default", "qwen3"])
async def test_samples_of_a_tool_using_agent_are_what_the_upstream_really_saw(name: str) -> None:
    chat = model_of(name)
    async with holdfast_behind_holdfast(chat) as (http, engine, _):
        session = await open_session(http, group="g1", label="agent", metadata={"task": "7"})
        await converse(http, engine, chat, session, 20)
        await http.post(f"/sessions/{session}/reward", json={"reward": 0.5})
        export = await fetch(http, session)
        (sample,) = export.samples
        assert export.session_metadata["accumulated_token_ids"] == sample.tokens.tolist()
        found = export.session_metadata["tito_session_mismatch"]
        assert found == []
        records = (await http.get(f"/sessions/{session}")).json()["records"]
        assert len(records) == 20
        for record, seen in zip(records, engine.seen, strict=True):
            sampled = [entry[1] for entry in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
            whole = record["request"]["input_ids"] + sampled
            assert seen == whole[:-1]  # the last one was sampled, and never needed computing
            assert sample.tokens.tolist()[: len(whole)] == whole
        start = len(sample.tokens) - len(sample.loss_mask)
        trained = sample.tokens[start:][sample.loss_mask.astype(bool)].tolist()
        entries = [e for r in records for e in r["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
        assert trained == [entry[1] for entry in entries]
        logprobs = sample.rollout_log_probs[sample.loss_mask.astype(bool)]
        assert np.isfinite(logprobs).all()
        assert logprobs.tolist() == [entry[0] for entry in entries]
        assert (sample.rollout_log_probs[sample.loss_mask == 0] == 0).all()
        assert (sample.group, sample.label, sample.reward) == ("g1", "agent", 0.5)
        assert sample.metadata["task"] == "7"


async def test_a_changed_token_is_found() -> None:
    chat = model_of("default")
    async with holdfast_behind_holdfast(chat) as (http, engine, _):
        session = await open_session(http)
        await converse(http, engine, chat, session, 2)
        export = await fetch(http, session)
        tokens = export.samples[0].tokens.copy()
        tokens[len(tokens) // 2] += 1
        tampered = encode(Export(samples=(replace(export.samples[0], tokens=tokens),)))
        assert problems(decode(tampered))


async def test_branches_share_what_they_have_in_common_and_train_it_once() -> None:
    async with serving(_engine(), default_chat()) as server, client_of(server) as http:
        session = await open_session(http)
        one = (await http.post(chat_path(session), json=said("a"))).json()["choices"][0]["message"]["content"]
        second = (await http.post(chat_path(session), json=said("a", one, "b"))).json()["usage"]
        effort = (await http.get(f"/sessions/{session}")).json()["records"][1]["effort"]
        assert effort["prompt_tokens"] == second["prompt_tokens"]
        assert effort["cached_tokens"] == second["prompt_tokens_details"]["cached_tokens"] > 0
        assert min(effort["queue_s"], effort["total_s"] - effort["first_token_s"]) >= 0
        await http.post(chat_path(session), json=said("a", one, "c"))
        tip, every = await fetch(http, session), await fetch(http, session, branch="all")
        assert (len(tip.samples), len(every.samples)) == (1, 2)
        assert sum(int(sample.loss_mask.sum()) for sample in every.samples) == 3 * 4


def test_drafts_are_told_with_the_steps_that_verified_them() -> None:
    """A step samples one token, and as many more as it accepts: 10 tokens of which 6 were drafted took 4 steps."""
    none = Done(
        stop_reason=StopReason.EOS,
        num_generated=10,
        history_length=30,
        num_dropped=0,
        prefill_tokens=5,
        prefill_duration_s=0.0,
        total_duration_s=0.0,
        seed=1,
    )
    assert _speculation(none) == _speculation(None) == {}
    drafted = replace(none, num_proposed=9, num_accepted=6)
    assert _speculation(drafted) == {"spec_drafted": 9, "spec_accepted": 6, "spec_steps": 4}


async def test_sessions_of_raw_tokens_have_samples_too() -> None:
    async with serving(_engine(), default_chat()) as server, client_of(server) as http:
        created = await server.stub.CreateSession(pb.CreateSessionRequest(token_ids=[1, 2, 3]))
        request = pb.GenerateRequest(session_id=created.session_id, max_tokens=5)
        events = [event async for event in server.stub.Generate(request)]
        sampled = [event.token.token_id for event in events if event.HasField("token")]
        (sample,) = (await fetch(http, created.session_id)).samples
        assert sample.tokens.tolist() == [1, 2, 3, *sampled]
        assert sample.loss_mask.tolist() == [1] * 5


async def test_nothing_to_export_says_so() -> None:
    async with serving(_engine(), default_chat()) as server, client_of(server) as http:
        session = await open_session(http)
        assert str((await fetch(http, session)).empty_reason) == "no_records"
        await http.post(chat_path(session), json=said("a"))
        assert str((await fetch(http, session, max_seq_len=1)).empty_reason) == "all_truncated"
        for form in ("json", "parquet"):
            assert len((await fetch(http, session, format=form)).samples) == 1
        refused = await http.post(f"/sessions/{session}/samples", json={"format": "csv"})
        assert refused.json()["error"]["param"] == "format"


def _engine() -> ScriptedEngine:
    shape = SlabShape(recent=256, max_pin=64, prefill_chunk=64, rewind_tokens=256)
    return ScriptedEngine({}, shape=shape, vocab_size=default_chat().model.grammars.vocab_size)


async def test_the_server_verifies_samples_in_every_format_and_says_what_is_wrong() -> None:
    async with chatting() as (relay, _):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("hi"))
        files = {}
        for form in ("json", "safetensors"):
            files[form] = (await relay.http.post(f"/sessions/{session}/samples", json={"format": form})).content
            answer = await relay.http.post("/samples/verify", content=files[form])
            assert (answer.status_code, answer.json()) == (200, {"valid": True, "problems": []})
        export = json.loads(files["json"])
        export["samples"][0]["tokens"][-1] += 1
        answer = (await relay.http.post("/samples/verify", json=export)).json()
        assert (answer["valid"], answer["problems"]) == (False, ["sample 0: turn 1 is not what was certified"])
        for content in (b"", b"{}", files["safetensors"][:-9], b"PAR1", b"[" * 5000):
            refused = await relay.http.post("/samples/verify", content=content)
            assert refused.status_code in (422, 501), refused.text
            assert error_of(refused)["code"] in ("samples_unusable", "unimplemented")
