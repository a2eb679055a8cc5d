"""Chat sessions over real sockets: who continues, who retries, what is refused, and that no turn is lost.

Qwen3's real tokenizer and template, and an engine that says what the test tells it to.
"""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.tree import Tree
from holdfast.config import ChatConfig
from holdfast.engine.slab import SlabShape
from holdfast.generation import Sampled
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.serving.http.session_json import _mismatch
from holdfast.serving.lifecycle import Chat
from tests.qwen3 import VOCABULARY, qwen3
from tests.serving import ScriptedEngine, Server, default_chat, serving
from tests.talking import eventually

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<think>\nFrance, then.\n</think>\n\nParis."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Client:
    """Speaks plain HTTP, as any client could. Each `say` is scripted."""

    def __init__(self, server: Server, engine: ScriptedEngine, http: httpx.AsyncClient) -> None:
        self.server = server
        self.engine = engine
        self.http = http
        self._seeds = itertools.count(1)

    async def open(self, **body: Any) -> str:
        reply = await self.http.post("/sessions", json=body)
        assert reply.status_code == 200
        return str(reply.json()["session_id"])

    async def say(self, session: str, messages: list[Any], script: str = "Yes.", **body: Any) -> httpx.Response:
        seed = next(self._seeds)
        ended = [*qwen3().tokenizer.encode(script), qwen3().continuation.end_of_turn]
        self.engine.scripts[seed] = ended
        asked = {"messages": messages, "seed": seed, "max_tokens": 200} | body
        return await self.http.post(f"/sessions/{session}/v1/chat/completions", json=asked)

    async def message(self, *args: Any, **body: Any) -> dict[str, Any]:
        reply = await self.say(*args, **body)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message

    async def info(self, session: str) -> dict[str, Any]:
        info: dict[str, Any] = (await self.http.get(f"/sessions/{session}")).json()
        return info

    async def idle(self, session: str) -> None:
        """Returns once nothing runs on the session; it is nobody's to tell."""
        await eventually(lambda: self.info(session), lambda info: not info["is_busy"])

    async def text(self, session: str) -> str:
        """The session's whole history, as the engine has it."""
        ids: list[int] = []
        async for chunk in self.server.stub.GetHistory(pb.GetHistoryRequest(session_id=session)):
            ids += chunk.token_ids
        return qwen3().tokenizer.decode(ids)


@contextlib.asynccontextmanager
async def chatting(**options: Any) -> AsyncIterator[Client]:
    max_recompute = options.pop("max_recompute", 65536)
    chat_options = {key: options.pop(key) for key in ("max_rollback", "edited_reply", "matcher") if key in options}
    shape = SlabShape(recent=512, max_pin=256, prefill_chunk=64, rewind_tokens=256)
    engine = ScriptedEngine({}, num_slabs=4, shape=shape, forward_s=0.0, vocab_size=VOCABULARY)
    chat = Chat(qwen3(), ChatConfig(**chat_options))
    async with (
        serving(engine, chat, max_recompute=max_recompute, **options) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}", timeout=30) as http,
    ):
        yield Client(server, engine, http)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_client_that_never_sends_reasoning_back_loses_nothing() -> None:
    async with chatting() as client:
        session = await client.open()
        first = await client.message(session, [user("Capital?")], THOUGHT)
        assert (first["content"], first["reasoning_content"]) == ("Paris.", "France, then.")
        conversation = [user("Capital?"), {"role": "assistant", "content": "Paris."}, user("Sure?")]
        reply = await client.say(session, conversation)
        assert reply.status_code == 200
        assert "holdfast-branched" not in reply.headers
        assert THOUGHT in await client.text(session)
        assert (await client.info(session))["turns"] == 2


async def test_null_content_beside_tool_calls_and_content_in_parts_are_the_same_messages() -> None:
    async with chatting() as client:
        session = await client.open()
        calling = await client.message(session, [user("Weather?")], CALL, tools=[TOOL])
        assert calling["content"] is None
        (call,) = calling["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        spaced = {**call, "index": 0, "function": {"name": "weather", "arguments": '{ "city":"Paris" }'}}
        conversation = [
            {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
            {"role": "assistant", "content": None, "tool_calls": [spaced]},
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "sunny"}]},
        ]
        reply = await client.say(session, conversation, tools=[TOOL])
        assert reply.status_code == 200
        assert "holdfast-branched" not in reply.headers
        assert CALL in await client.text(session)
        assert (await client.info(session))["turns"] == 2


async def test_a_turn_costs_only_its_new_tokens() -> None:
    async with chatting() as client:
        session = await client.open()
        messages: list[Any] = []
        before = 0
        for number in range(6):
            messages.append(user(f"Question {number}?"))
            reply = await client.say(session, messages, THOUGHT)
            usage = reply.json()["usage"]
            new = usage["prompt_tokens"] - before + (number > 0)  # and the last sampled one, which was still pending
            assert usage["holdfast"]["prefilled_tokens"] == new
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - new
            before = usage["total_tokens"]
            messages.append(reply.json()["choices"][0]["message"])
        assert (await client.info(session))["history_length"] == before


async def test_other_tools_in_mid_session_branch_while_they_may_and_are_named_when_not() -> None:
    async with chatting() as client:
        session = await client.open()
        first = await client.message(session, [user("a")], tools=[TOOL])
        branched = await client.say(session, [user("a"), first, user("b")], "No.", tools=[OTHER])
        assert branched.status_code == 200
        assert branched.headers["holdfast-branched"] == "0"
        assert '"time"' in await client.text(session)
        second = branched.json()["choices"][0]["message"]
        third = await client.message(session, [user("a"), first, user("b"), second, user("c")], tools=[OTHER])
        conversation = [user("a"), first, user("b"), second, user("c"), third, user("d")]
        refused = await client.say(session, conversation, tools=[TOOL])
        assert refused.status_code == 400
        assert refused.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "invalid_request_error",
            "code": "message_mismatch",
            "param": "tools",
        }
        assert (await client.say(session, conversation, tools=[OTHER])).status_code == 200
        info = await client.info(session)
        assert (info["turns"], info["branches"]) == (3, 1)


async def test_dropping_the_reply_retries_beside_it() -> None:
    async with chatting() as client:
        session = await client.open()
        first = await client.message(session, [user("a")], "One.")
        await client.message(session, [user("a"), first, user("b")], "Two.")
        again = await client.say(session, [user("a"), first, user("b")], "Three.")
        assert again.headers["holdfast-branched"] == "1"
        assert again.json()["usage"]["holdfast"]["recomputed_tokens"] == 0
        text = await client.text(session)
        assert "One." in text
        assert "Three." in text
        assert "Two." not in text
        messages = (await client.info(session))["messages"]
        assert [message["content"] for message in messages] == ["a", "One.", "b", "Three."]


async def test_going_back_to_an_older_branch_computes_it_again_and_says_so() -> None:
    async with chatting(max_rollback=-1) as client:
        session = await client.open()
        one = await client.message(session, [user("a")], "One.")
        two = await client.message(session, [user("a")], "Two.")
        back = await client.say(session, [user("a"), one, user("b")], "Three.")
        assert back.headers["holdfast-branched"] == "1"
        assert back.json()["usage"]["holdfast"]["recomputed_tokens"] > 0
        text = await client.text(session)
        assert "One." in text
        assert "Two." not in text
        assert (await client.say(session, [user("a"), two, user("b")])).status_code == 200


async def test_an_edited_reply_is_refused_with_both_spellings() -> None:
    async with chatting() as client:
        session = await client.open()
        await client.message(session, [user("a")], "One.")
        edited = [user("a"), {"role": "assistant", "content": "Two."}, user("b")]
        refused = (await client.say(session, edited)).json()["error"]
        assert (refused["code"], refused["param"]) == ("message_mismatch", "messages[1].content")
        assert "'One.' on record" in refused["message"]
        assert "'Two.' in the request" in refused["message"]
        assert (await client.info(session))["turns"] == 1


async def test_an_edited_reply_may_be_allowed_and_is_given_then() -> None:
    async with chatting(edited_reply="branch") as client:
        session = await client.open()
        await client.message(session, [user("a")], "One.")
        edited = [user("a"), {"role": "assistant", "content": "Two."}, user("b")]
        assert (await client.say(session, edited)).status_code == 200
        assert "Two." in await client.text(session)


async def test_a_retry_that_goes_too_far_back_says_where_it_parts() -> None:
    async with chatting() as client:
        session = await client.open()
        one = await client.message(session, [user("a")], "One.")
        await client.message(session, [user("a"), one, user("b")], "Two.")
        refused = (await client.say(session, [user("z")])).json()["error"]
        assert (refused["code"], refused["param"]) == ("message_mismatch", "messages[0].content")
        assert "2 sampled turns behind, --max-rollback allows 1" in refused["message"]
        short = (await client.say(session, [user("a")])).json()["error"]
        assert short["param"] == "messages[1]"


async def test_the_token_door_reads_a_chat_and_changes_only_its_copies() -> None:
    async with chatting() as client:
        session = await client.open()
        one = await client.message(session, [user("a")], "One.")
        stub = client.server.stub
        for call in (
            stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[1, 2])),
            stub.RewindSession(pb.RewindSessionRequest(session_id=session, to_position=1)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="is a chat session"):
                await call
        fork = (await stub.ForkSession(pb.ForkSessionRequest(session_id=session))).session_id
        await stub.AppendTokens(pb.AppendTokensRequest(session_id=fork, token_ids=[1, 2]))
        assert (await client.say(session, [user("a"), one, user("b")])).status_code == 200


async def test_what_was_sampled_beyond_a_stop_string_is_taken_back() -> None:
    async with chatting() as client:
        session = await client.open()
        reply = await client.say(session, [user("a")], "One two three four five six seven.", stop=[" four"])
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One two three", "stop")
        text = await client.text(session)
        assert text.endswith("One two three four")
        one = choice["message"]
        assert (await client.say(session, [user("a"), one, user("b")])).status_code == 200
        assert "One two three four<|im_end|>\n<|im_start|>user\nb" in await client.text(session)


async def test_a_turn_whose_client_leaves_is_not_recorded_and_the_next_one_works() -> None:
    async with chatting() as client:
        client.engine.forward_s = 0.005
        session = await client.open()
        one = await client.message(session, [user("a")], "One.")
        length = (await client.info(session))["history_length"]
        body = {"messages": [user("a"), one, user("b")], "stream": True, "max_tokens": 500}
        async with client.http.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                break
        await client.idle(session)
        info = await client.info(session)
        assert (info["history_length"], info["turns"]) == (length, 1)
        assert (await client.say(session, [user("a"), one, user("b")])).status_code == 200


async def test_a_fork_shares_the_past_and_nothing_else() -> None:
    async with chatting() as client:
        session = await client.open(label="one", metadata={"a": "b"})
        one = await client.message(session, [user("a")], "One.")
        fork = (await client.http.post(f"/sessions/{session}/fork", json={"label": "two"})).json()["session_id"]
        reply = await client.say(fork, [user("a"), one, user("b")], "Two.")
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [message["content"] for message in (await client.info(session))["messages"]] == ["a", "One."]
        assert (await client.info(fork))["label"] == "two"
        assert (await client.say(session, [user("a"), one, user("c")], "Three.")).status_code == 200


async def test_a_fork_after_an_abandoned_retry_has_all_turns() -> None:
    async with chatting() as client:
        client.engine.forward_s = 0.005
        session = await client.open()
        one = await client.message(session, [user("a")], "One.")
        two = await client.message(session, [user("a"), one, user("b")], "Two.")
        body = {"messages": [user("a"), one, user("other")], "stream": True, "max_tokens": 500}
        async with client.http.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                break
        await client.idle(session)
        fork = (await client.http.post(f"/sessions/{session}/fork")).json()["session_id"]
        assert (await client.info(fork))["turns"] == 2
        reply = await client.say(fork, [user("a"), one, user("b"), two, user("c")], "Three.")
        assert reply.status_code == 200
        assert "holdfast-branched" not in reply.headers
        assert "Two." in await client.text(fork)


async def test_a_cancelled_turn_is_taken_back_however_long_the_history_is() -> None:
    async with chatting(max_recompute=10) as client:
        client.engine.forward_s = 0.002
        session = await client.open()
        long = "word " * 300
        one = await client.message(session, [user(long)], "One.", truncation="auto")
        length = (await client.info(session))["history_length"]
        body = {"messages": [user(long), one, user(long)], "stream": True, "max_tokens": 500}
        async with client.http.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                break
        await client.idle(session)
        assert (await client.info(session))["history_length"] == length
        assert (await client.say(session, [user(long), one, user("b")])).status_code == 200


async def test_a_record_keeps_what_was_new_and_shows_the_whole() -> None:
    async with chatting() as client:
        session = await client.open()
        messages: list[Any] = []
        for number in range(4):
            messages.append(user(f"Question {number}? " * 20))
            messages.append(await client.message(session, messages, "Yes."))
        records = (await client.info(session))["records"]
        asked = [[message["content"] for message in record["request"]["messages"]] for record in records]
        assert asked[-1] == [message["content"] for message in messages[:-1]]
        light = (await client.http.get(f"/sessions/{session}?payloads=false")).json()["records"]
        assert "input_ids" in records[-1]["request"]
        assert "input_ids" not in light[-1]["request"]


async def test_the_system_prompt_and_the_tools_stay_in_the_window() -> None:
    async with chatting() as client:
        session = await client.open()
        system = {"role": "system", "content": "Be brief."}
        await client.message(session, [system, user("a")], tools=[TOOL])
        sink = (await client.info(session))["window"]["sink"]
        ids = qwen3().continuation.first([system, user("a")], [TOOL]).ids
        text = qwen3().tokenizer.decode(ids[:sink])
        assert "Be brief." in text
        assert "weather" in text
        chosen = await client.open(pin_tokens=7)
        await client.message(chosen, [system, user("a")])
        assert (await client.info(chosen))["window"]["sink"] == 7


async def test_a_session_of_raw_tokens_does_not_chat() -> None:
    async with chatting() as client:
        raw = (await client.server.stub.CreateSession(pb.CreateSessionRequest())).session_id
        refused = await client.say(raw, [user("a")])
        assert refused.status_code == 400
        assert "session of raw tokens" in refused.json()["error"]["message"]


async def test_a_closed_session_is_gone_for_both_doors_and_is_not_kept() -> None:
    async with chatting() as client:
        session = await client.open()
        await client.message(session, [user("a")])
        await client.server.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        assert (await client.say(session, [user("a")])).json()["error"]["detail"] == "closed"
        other = await client.open()
        assert (await client.http.delete(f"/sessions/{other}")).status_code == 204
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=other))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# What the trainer is told about differences

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks",
            "parameters": {"type": "object", "required": ["at"], "properties": {"at": {"type": "string"}}},
        },
    }
]


def tools_in(chat: ChatModel, ids: list[int]) -> list[Any]:
    """The tools that a prompt in Qwen3's format shows, with their members in order."""
    text = chat.tokenizer.decode(ids)
    lines = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    return [json.loads(line, object_pairs_hook=list) for line in lines]


@pytest.mark.parametrize("compat", ["none", "miles"])
async def test_tools_are_rendered_in_the_clients_order_or_in_sglangs_and_are_no_mismatch(compat: str) -> None:
    async with chatting(compat=compat) as client:
        session = await client.open()
        reply = await client.message(session, [user("Hi")], "<think>\n\n</think>\n\nI look.", tools=TOOLS)
        told = await client.info(session)
        assert told["metadata"]["tito_session_mismatch"] is None
        reordered = [dict(reversed(tool.items())) for tool in TOOLS]
        await client.message(session, [user("Hi"), reply, user("And now?")], tools=reordered)
        told = await client.info(session)
        assert (told["turns"], told["branches"]) == (2, 0)  # they are the same tools
    (shown,) = tools_in(qwen3(), told["metadata"]["accumulated_token_ids"])
    expected: Any = json.loads(json.dumps(TOOLS[0]), object_pairs_hook=list)
    if compat == "miles":
        name, description, parameters = expected[1][1]
        expected[1] = ["function", [description, name, parameters, ["strict", False]]]
    assert json.dumps(shown) == json.dumps(expected)


async def test_differences_from_a_new_render_are_found_without_tokenizing_what_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The template drops the reasoning of earlier turns."""
    chat, question = qwen3(), user("A long question <|im_end|> about words. " * 20)
    async with chatting() as client:
        session = await client.open()
        reply = await client.message(session, [question], THOUGHT)
        assert (await client.info(session))["metadata"]["tito_session_mismatch"] is None
        await client.message(session, [question, reply, user("And?")], "<think>\n\n</think>\n\nYes.")
        encoded: list[str] = []
        encode = Tokenizer._encode
        monkeypatch.setattr(Tokenizer, "_encode", lambda *given: encoded.append(given[2]) or encode(*given))
        told = await client.info(session)
        monkeypatch.undo()
        samples = (await client.http.post(f"/sessions/{session}/samples", json={"format": "json"})).json()
    (difference,) = samples["session_metadata"]["tito_session_mismatch"]  # in the layout that miles reads
    assert difference == {
        "type": "assistant_text",
        "segment_index": 4,
        "expected_text": "assistant\nParis.",
        "actual_text": f"assistant\n{THOUGHT}",
        "detail": "",
    }
    assert not any("question" in text for text in encoded)
    ids, found = told["metadata"]["accumulated_token_ids"], told["metadata"]["tito_session_mismatch"]
    rendered = chat.continuation.first(told["messages"]).ids
    expected = next(index for index, (one, other) in enumerate(zip(ids, rendered, strict=False)) if one != other)
    assert found["position"] == expected
    assert "France" in found["stored"]
    assert "France" not in found["rendered"]


def test_replies_with_other_tokens_than_their_text_has_are_a_difference() -> None:
    chat = default_chat().model
    prompt = chat.continuation.first([{"role": "user", "content": "Hi"}]).ids
    whole = chat.tokenizer.encode("wonderful")
    letters = [token for letter in "wonderful" for token in chat.tokenizer.encode(letter)]
    assert letters != whole
    for reply, expected in ((whole, None), (letters, len(prompt) + 1)):  # both begin with "w"
        tree = Tree()
        tree.attach(
            tree.root,
            messages=[{"role": "user", "content": "Hi"}],
            reply={"role": "assistant", "content": "wonderful"},
            root=chat.continuation.root(),
            given=prompt,
            sampled=[Sampled(token=token, logprob=0.0, sampling_logprob=0.0) for token in reply],
            finish_reason="stop",
        )
        found = _mismatch(tree.tip, chat)
        assert (found and found["position"]) == expected
