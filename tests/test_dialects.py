"""Messages and Responses: the official packages read our replies, and all APIs carry one conversation."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import httpx
import httpx2
import msgspec
import openai
import pytest

from holdfast.chat.matching import normal
from holdfast.chat.messages import read_messages
from holdfast.chat.reply import ReplyEnd, ReplyPiece, TokenUsage
from holdfast.errors import InvalidArgument
from holdfast.serving.http.dialects import CHAT, MESSAGES, RESPONSES
from holdfast.serving.http.dialects.base import Dialect
from holdfast.serving.http.dialects.messages import parse_input
from holdfast.serving.http.render import ChatWriter
from holdfast.serving.http.response_store import Kept, ResponseStore
from holdfast.testing.fake_upstream import Fault
from tests.serving import Server, default_chat, held, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, open_session, until
from tests.test_relay import chats_of, chatting

Json = dict[str, Any]
USER = {"role": "user", "content": "Hi"}
TEXT = {"type": "text", "text": "b"}
TOOLS = {
    "messages": [{"name": "look", "description": "at", "input_schema": {"type": "object"}}],
    "responses": [{"type": "function", "name": "look", "description": "at", "parameters": {"type": "object"}}],
}


# What the packages make of random replies


def _text(rng: random.Random) -> str:
    return "".join(rng.choice('ab \n\t"\\{}<>&é漢🙂\u2028') for _ in range(rng.randrange(1, 30)))


def _value(rng: random.Random, depth: int = 0) -> Any:
    plain = [None, True, rng.randrange(-9, 2**60), rng.random() * 1e9, _text(rng), [], {}]
    if depth < 2 and rng.random() < 0.3:
        return {_text(rng): _value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice(plain)


def _call(rng: random.Random, index: int) -> Json:
    given = json.dumps({_text(rng): _value(rng) for _ in range(rng.randrange(4))}, ensure_ascii=rng.random() < 0.5)
    odd = ("", "{", "[1]", '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "9" * 40 + "}", "text")
    arguments = rng.choice(odd) if rng.random() < 0.2 else given
    function = {"name": rng.choice(("look", "grep.files", "mcp__a__b")), "arguments": arguments}
    return {"id": f"call_{index}", "type": "function", "function": function}


def random_reply(rng: random.Random) -> tuple[list[ReplyPiece], ReplyEnd]:
    """A reply in pieces, and its end: text, reasoning, calls, each of them or not, and every reason to stop."""
    message: Json = {"role": "assistant", "content": _text(rng) if rng.random() < 0.8 else ""}
    if rng.random() < 0.4:
        message["reasoning_content"] = _text(rng)
    if rng.random() < 0.5:
        message["tool_calls"] = [_call(rng, index) for index in range(rng.randrange(1, 4))]
    pieces = []
    for name, field in (("reasoning_content", "reasoning"), ("content", "content")):
        rest = message.get(name, "")
        while rest:
            num = rng.randrange(1, len(rest) + 1)
            pieces.append(ReplyPiece(**{field: rest[:num]}))
            rest = rest[num:]
    pieces += [ReplyPiece(calls=(call,)) for call in message.get("tool_calls", ())] + [ReplyPiece()]
    reason = rng.choice(("stop", "length", "tool_calls") if "tool_calls" in message else ("stop", "length"))
    num_tokens = rng.randrange(100)
    usage = TokenUsage(
        prompt_tokens=num_tokens + rng.randrange(100),
        completion_tokens=rng.randrange(100),
        prefilled_tokens=num_tokens,
        reasoning_tokens=rng.randrange(9),
    )
    stop = rng.choice((None, 7, "END"))
    return pieces, ReplyEnd(message=message, finish_reason=reason, tokens=(), usage=usage, matched_stop=stop)


def written(dialect: Dialect, body: Json, reply: tuple[list[ReplyPiece], ReplyEnd]) -> tuple[bytes, bytes, bytes]:
    """The reply whole, as a stream, and as a stream of a reply that came whole."""
    pieces, end = reply
    replies = dialect.translate(body).reply
    options: Json = {"with_matched_stop": dialect.with_matched_stop, "id": f"{dialect.id_prefix}7"}
    writer = ChatWriter(model="m", tokenizer=default_chat().model.tokenizer, created=5, **options)
    whole = msgspec.json.encode(writer.whole([end]))
    encoder = replies.encoder(writer, with_usage=True)
    stream = b"".join(encoder.encode(0, item) for item in (*pieces, end)) + encoder.end()
    return replies.whole(whole, writer.id), stream, replies.encoder(writer, with_usage=True).whole(whole)


def _answer(content: bytes, kind: Any) -> Any:
    """A transport whose every response is this one."""
    is_events = content.startswith((b"event:", b"data:"))
    headers = {"content-type": "text/event-stream" if is_events else "application/json"}
    return kind.MockTransport(lambda request: kind.Response(200, headers=headers, content=content))


def openai_client(content: bytes) -> openai.OpenAI:
    kind = httpx2 if issubclass(openai.DefaultHttpxClient, httpx2.Client) else httpx
    client: Any = kind.Client(transport=_answer(content, kind))  # type: ignore[attr-defined]
    return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=client)


def anthropic_client(content: bytes) -> anthropic.Anthropic:
    client = httpx2.Client(transport=_answer(content, httpx2))
    return anthropic.Anthropic(api_key="k", base_url="http://x", http_client=client)


def by_messages(content: bytes) -> Json:
    client: Any = anthropic_client(content).messages
    asked: Json = {"model": "m", "max_tokens": 9, "messages": [USER]}
    if content.startswith(b"{"):
        return dict(client.create(**asked).to_dict())
    with client.stream(**asked) as stream:
        return dict(stream.get_final_message().to_dict())


def by_responses(content: bytes) -> Json:
    client: Any = openai_client(content).responses
    asked: Json = {"model": "m", "input": "Hi"}
    if content.startswith(b"{"):
        return dict(client.create(**asked).to_dict())
    final = None
    with client.stream(**asked) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
    assert final is not None
    return dict(final.to_dict())


def by_chat(content: bytes) -> Json:
    client: Any = openai_client(content).chat.completions
    asked: Json = {"model": "m", "messages": [USER]}
    if content.startswith(b"{"):
        reply = client.create(**asked).to_dict()
    else:
        with client.stream(**asked) as stream:
            for _ in stream:
                pass
            reply = stream.current_completion_snapshot.to_dict()
    (choice,) = reply["choices"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or ()
    ]
    message = {name: choice["message"].get(name) or "" for name in ("content", "reasoning_content")}
    return {"usage": reply["usage"], "finish": choice["finish_reason"], "calls": calls, **message}


PACKAGES: list[tuple[Dialect, Json, Callable[[bytes], Json]]] = [
    (CHAT, {"messages": [USER]}, by_chat),
    (MESSAGES, {"messages": [USER]}, by_messages),
    (RESPONSES, {"input": "Hi", "instructions": "Be brief.", "tools": TOOLS["responses"]}, by_responses),
]


@pytest.mark.parametrize(("dialect", "body", "read"), PACKAGES, ids=["chat", "messages", "responses"])
@pytest.mark.parametrize("seed", range(12))
def test_the_packages_make_the_same_of_a_stream_as_of_the_whole_reply(
    dialect: Dialect, body: Json, read: Callable[[bytes], Json], seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        reply = random_reply(rng)
        if dialect is CHAT and reply[1].finish_reason == "length":
            continue  # the package raises an error of its own instead
        whole, stream, at_once = (read(content) for content in written(dialect, body, reply))
        for other in (stream, at_once):
            _without_null(other), _without_null(whole)
            assert other == whole


def _without_null(value: Any) -> None:
    """The packages' helpers add empty fields of their own."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _without_null(inner)
    if isinstance(value, dict):
        for name in [name for name, inner in value.items() if inner is None]:
            del value[name]


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_a_reply_that_comes_back_is_the_message_on_record(dialect: Dialect) -> None:
    rng = random.Random(9)
    for _ in range(300):
        pieces, end = random_reply(rng)
        whole = msgspec.json.decode(written(dialect, {"messages": [USER], "input": "Hi"}, (pieces, end))[0])
        if dialect is MESSAGES:
            if not whole["content"]:
                continue  # nothing to send back
            body: Json = {"messages": [USER, {"role": "assistant", "content": whole["content"]}]}
        else:
            body = {"input": [USER, *whole["output"]]}
        *_, back = read_messages(dialect.translate(body).fields["messages"])
        assert normal(end.message, back) is None
        assert back.get("reasoning_content", "") == end.message.get("reasoning_content", "")


def test_arguments_that_json_cannot_carry_stay_text() -> None:
    for text in ("{", "[1]", '{"a": 1e999}', '{"a": "\\ud800"}'):
        assert parse_input({"function": {"arguments": text}}) == {"_raw_arguments": text}
    assert parse_input({"function": {"arguments": ""}}) == {}


# Translations


def test_a_rich_message_becomes_what_the_table_says() -> None:
    given = {
        "model": "m", "max_tokens": 5, "stop_sequences": ["x"], "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"}, "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "tools": [*TOOLS["messages"], {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, TEXT]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"}, {"type": "tool_use", "id": "c", "name": "look", "input": {"a": "é"}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "go on"},
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}]}]},
            {"role": "system", "content": "reminder"},
        ],
    }  # fmt: skip
    translated = MESSAGES.translate(given)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "é"}'}}
    assert translated.fields == {
        "model": "m", "max_tokens": 5, "stop": ["x"], "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
        "tools": [
            {"type": "function", "function": {"name": "look", "description": "at", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required", "parallel_tool_calls": False,
        "messages": [
            {"role": "system", "content": "A\nB"}, {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "seen"}, {"role": "user", "content": "go on"},
            {"role": "system", "content": "reminder"},
        ],
    }  # fmt: skip
    assert translated.ignored == ("metadata", "tools[1]", "messages[0].content[0].cache_control")


def test_a_rich_response_becomes_what_the_table_says() -> None:
    given = {
        "model": "m", "max_output_tokens": 5, "instructions": "Be brief.", "store": False, "include": [],
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}, "client_metadata": {},
        "tools": [
            *TOOLS["responses"], {"type": "web_search", "x": 1}, {"type": "custom", "name": "patch", "format": {}},
            {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "open"}, {"type": "x"}]},
        ],
        "tool_choice": {"type": "custom", "name": "open"},
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "A"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "open", "namespace": "files", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "é"},
            {"type": "function_call_output", "call_id": "c", "output": "seen"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "done"}]},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "reasoning", "summary": []}, {"type": "message", "role": "assistant", "content": "one"},
            {"type": "reasoning", "summary": []}, {"type": "message", "role": "assistant", "content": "two"},
        ],
    }  # fmt: skip
    translated = RESPONSES.translate(given)
    messages = translated.fields["messages"]
    names = [tool["function"]["name"] for tool in translated.fields["tools"]]
    assert names == ["look", "patch", "files.open"]
    assert translated.fields["tool_choice"] == {"type": "function", "function": {"name": "files.open"}}
    assert [message["role"] for message in messages] == [
        "developer",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["files.open", "patch"]
    assert messages[1]["tool_calls"][1]["function"]["arguments"] == '{"input": "é"}'
    assert messages[1]["reasoning_content"] == "hm"
    assert translated.instructions == {"role": "system", "content": "Be brief."}
    assert translated.ignored == ("client_metadata", "input[7]", "tools[1]", "tools[3].tools[1]", "tools[2].format")


def test_a_reference_to_a_tool_is_its_name() -> None:
    found = [{"type": "tool_reference", "tool_name": "Fetch"}, {"type": "tool_reference", "tool_name": "Edit"}]
    content = [{"type": "tool_result", "tool_use_id": "c", "content": found}]
    translated = MESSAGES.translate({"max_tokens": 5, "messages": [{"role": "user", "content": content}]})
    assert translated.fields["messages"] == [{"role": "tool", "tool_call_id": "c", "content": "Fetch\nEdit"}]
    assert translated.ignored == ()
    found[0]["tool_name"] = 7  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match=r"content\[0\].content\[0\].tool_name"):
        MESSAGES.translate({"max_tokens": 5, "messages": [{"role": "user", "content": content}]})


def saying(kind: str) -> Json:
    return {"role": "user", "content": [{"type": kind}]}


ASKED: Json = {"messages": [USER], "tools": TOOLS["messages"]}
BAD: dict[str, tuple[str, Any, str]] = {
    "an image": ("messages", {"messages": [saying("image")]}, "messages[0].content[0].type"),
    "no messages": ("messages", {}, "messages"),
    "another role": ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    "a tool without a name": ("messages", {"messages": [USER], "tools": [{}]}, "tools[0].name"),
    "no choice": ("messages", ASKED | {"tool_choice": {"type": "x"}}, "tool_choice.type"),
    "another tool": ("messages", ASKED | {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    "a tool twice": ("messages", ASKED | {"tools": TOOLS["messages"] * 2}, "tools[1].name"),
    "too many tokens": ("messages", {"messages": [USER], "max_tokens": "x"}, "max_tokens"),
    "odd stops": ("messages", {"messages": [USER], "stop_sequences": [5]}, "stop_sequences[0]"),
    "an input image": ("responses", {"input": [saying("input_image")]}, "input[0].content[0].type"),
    "a file": ("responses", {"input": [saying("input_file")]}, "input[0].content[0].type"),
    "a reference": ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "in the background": ("responses", {"input": "Hi", "background": True}, "background"),
    "both pasts": ("responses", {"input": "Hi", "previous_response_id": "a", "conversation": "b"}, "conversation"),
    "odd tokens": ("responses", {"input": "Hi", "max_output_tokens": "x"}, "max_output_tokens"),
    "an odd format": ("responses", {"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    "not an object": ("responses", [], "the request body"),
}  # fmt: skip


def refused(answer: httpx.Response) -> str:
    """The message of an error, which must be in the envelope of the path's API."""
    return str(error_of(answer)["message"])


@contextlib.asynccontextmanager
async def talking(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    engine = options.pop("engine", None) or wordy_engine()
    async with serving(engine, default_chat(), **options) as server, client_of(server) as client:
        yield client, server


async def test_what_cannot_be_understood_is_refused_by_its_path_in_the_apis_envelope() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        for name, (api, body, where) in BAD.items():
            for path in (f"/v1/{api}", f"/sessions/{session}/v1/{api}"):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, name
                assert refused(answer).startswith(where), name
        for path in ("/v1/messages", "/v1/responses"):
            for content in (b"", b"{", b"\xff", b"[" * 10_000, b'{"a": NaN}'):
                answer = await client.post(path, content=content)
                assert answer.status_code == 400
                assert refused(answer)
            assert refused(await client.get(path)) == "this path does not allow the method"
            unknown = await client.post(f"/sessions/none{path}", json={})
            assert unknown.status_code == 404
            assert refused(unknown)
        for depth in range(300, 1100, 100):
            nested = '{"type": "text", "text": "", "content": ' + "[" * depth + "]" * depth + "}"
            deep = '{"messages": [{"role": "user", "content": [' + nested + ']}], "max_tokens": 1}'
            call = '{"type": "tool_use", "name": "f", "input": {"a": ' + "[" * depth + "]" * depth + "}}"
            deeper = '{"messages": [{"role": "assistant", "content": [' + call + ']}], "max_tokens": 1}'
            for content in (deep, deeper):
                assert (await client.post("/v1/messages", content=content)).status_code in (200, 400)
        missing = await client.post("/v1/messages/batches", json={})
        assert refused(missing) == "no such path"
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_a_body_that_is_too_large_and_a_wrong_key_get_the_apis_envelope(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:one\nbob:two\n")
    async with talking(max_body_mb=1, keys_file=str(keys)) as (client, _):
        big = await client.post("/v1/messages", content=b" " * (2 << 20), headers={"x-api-key": "one"})
        assert (big.status_code, big.json()["error"]["type"]) == (413, "request_too_large")
        given = [
            {"x-api-key": "no"},
            {},
            {"x-api-key": "one", "authorization": "Bearer two"},
            {"authorization": "Basic one"},
        ]
        for headers in given:
            answer = await client.post("/v1/messages", json={}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        body = {"messages": [USER], "max_tokens": 2}
        for headers in ({"x-api-key": "one"}, {"x-api-key": "one", "authorization": "Bearer one"}):
            assert (await client.post("/v1/messages", json=body, headers=headers)).status_code == 200
        session = (await client.post("/sessions", headers={"x-api-key": "one"})).json()["session_id"]
        other = await client.post(f"/sessions/{session}/v1/messages", json=body, headers={"x-api-key": "two"})
        assert other.json()["error"]["type"] == "not_found_error"


# One conversation in three APIs


def chat_turn(messages: list[Json], text: str) -> tuple[str, Json]:
    return "chat/completions", {"messages": [*messages, {"role": "user", "content": text}], "max_tokens": 4}


def message_turn(messages: list[Json], text: str) -> tuple[str, Json]:
    system = [message["content"] for message in messages if message["role"] == "system"]
    said = [message for message in messages if message["role"] != "system"]
    return "messages", {"system": system[0], "messages": [*said, {"role": "user", "content": text}], "max_tokens": 4}


def response_turn(messages: list[Json], text: str) -> tuple[str, Json]:
    body = message_turn(messages, text)[1]
    return "responses", {"instructions": body["system"], "input": body["messages"], "max_output_tokens": 4}


def said_in(api: str, reply: Json) -> str:
    if api == "chat/completions":
        return str(reply["choices"][0]["message"]["content"])
    parts = reply["content"] if api == "messages" else [part for item in reply["output"] for part in item["content"]]
    return "".join(part["text"] for part in parts)


Turn = Callable[[list[Json], str], tuple[str, Json]]


async def converse(client: httpx.AsyncClient, *turns: Turn, is_stream: bool) -> Json:
    """What is on record after these turns, one after the other on one session."""
    session = await open_session(client)
    messages: list[Json] = [{"role": "system", "content": "Be brief."}]
    for number, turn in enumerate(turns):
        api, body = turn(messages, f"Turn {number}")
        asked = body | {"temperature": 0, "stream": is_stream}
        answer = await client.post(f"/sessions/{session}/v1/{api}", json=asked)
        assert answer.status_code == 200, answer.text
        assert "holdfast-branched" not in answer.headers
        record = (await client.get(f"/sessions/{session}")).json()
        messages = record["messages"]
        if not is_stream:
            assert said_in(api, answer.json()) == messages[-1]["content"]
    return dict(record)


ALL: tuple[Turn, ...] = (chat_turn, message_turn, response_turn, message_turn, chat_turn, response_turn)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_turns_in_any_api_continue_one_conversation_token_by_token(is_stream: bool) -> None:
    async with talking() as (client, _):
        mixed = await converse(client, *ALL, is_stream=is_stream)
        plain = await converse(client, *[chat_turn] * len(ALL), is_stream=False)
        assert mixed["metadata"]["accumulated_token_ids"] == plain["metadata"]["accumulated_token_ids"]
        assert (mixed["turns"], mixed["branches"], mixed["messages"]) == (len(ALL), 0, plain["messages"])
        assert {record["response"]["object"] for record in mixed["records"]} == {"chat.completion"}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_the_same_in_front_of_an_upstream(is_stream: bool) -> None:
    async with chatting() as (relay, upstream):
        mixed = await converse(relay.http, *ALL, is_stream=is_stream)
        prompts = [sent["input_ids"] for sent in chats_of(upstream)]
        upstream.requests.clear()
        plain = await converse(relay.http, *[chat_turn] * len(ALL), is_stream=False)
        assert [sent["input_ids"] for sent in chats_of(upstream)] == prompts
        assert mixed["metadata"]["accumulated_token_ids"] == plain["metadata"]["accumulated_token_ids"]
        assert (mixed["turns"], mixed["branches"]) == (len(ALL), 0)


async def test_a_tool_call_of_an_upstream_goes_round_in_each_api() -> None:
    call = {"id": "c1", "index": None, "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}

    def calling(reply: Json) -> None:
        reply["choices"][0]["message"] |= {"content": None, "tool_calls": [call], "reasoning_content": "hm"}
        reply["choices"][0]["finish_reason"] = "tool_calls"

    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(edit=calling))
        path = f"/sessions/{session}/v1/messages"
        first = {"messages": [USER], "tools": TOOLS["messages"], "max_tokens": 4}
        reply = (await relay.http.post(path, json=first)).json()
        assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"]
        assert (reply["stop_reason"], reply["content"][1]["input"]) == ("tool_use", {"at": "it"})
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "seen"}
        messages = [USER, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
        upstream.faults.append(Fault(edit=calling))
        assert (await relay.http.post(path, json=first | {"messages": messages})).status_code == 200
        path = f"/sessions/{session}/v1/responses"
        items = [
            USER,
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"it"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        ]
        body = {"input": [*items, *items[1:]], "tools": TOOLS["responses"], "max_output_tokens": 4}
        answer = await relay.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        record = (await relay.http.get(f"/sessions/{session}")).json()
        assert (record["turns"], record["branches"]) == (3, 0)


# Responses that go on from earlier ones


async def test_a_response_continues_the_one_before_with_only_what_is_new() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        for base in (f"/sessions/{session}/v1", "/v1"):
            asked = {"instructions": "Be brief.", "max_output_tokens": 4, "temperature": 0}
            first = (await client.post(f"{base}/responses", json=asked | {"input": "Hi"})).json()
            more = asked | {"input": "More", "previous_response_id": first["id"]}
            second = (await client.post(f"{base}/responses", json=more)).json()
            assert second["previous_response_id"] == first["id"]
            given = first["usage"]["total_tokens"]
            assert second["usage"]["input_tokens"] > given
            again = await client.get(f"{base}/responses/{second['id']}")
            assert again.json()["output"] == second["output"]
            items = (await client.get(f"{base}/responses/{second['id']}/input_items?order=asc")).json()["data"]
            assert [item["role"] for item in items] == ["user", "assistant", "user"]
            page = (
                await client.get(f"{base}/responses/{second['id']}/input_items?limit=1&after={items[2]['id']}")
            ).json()
            assert (page["data"], page["has_more"]) == ([items[1]], True)
            unknown = await client.post(f"{base}/responses", json=more | {"previous_response_id": "resp_none"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "response_not_found")
        record = (await client.get(f"/sessions/{session}")).json()
        assert (record["turns"], record["branches"]) == (2, 0)
        assert [message["role"] for message in record["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]


async def test_a_thread_continues_with_the_system_and_the_tools_on_record() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        for base in (f"/sessions/{session}/v1", "/v1"):
            begun = {"system": "Be brief.", "messages": [USER], "tools": TOOLS["messages"], "max_tokens": 4}
            first = (await client.post(f"{base}/messages", json=begun | {"thread": {"type": "create"}})).json()
            more = {"messages": [USER], "max_tokens": 4, "tool_choice": {"type": "none"}}
            more |= {"thread": {"type": "continue", "previous_message_id": first["id"]}}
            second = await client.post(f"{base}/messages", json=more)
            assert second.status_code == 200, second.text
            usage, counted = second.json()["usage"], await client.post("/v1/messages/count_tokens", json=begun)
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] > counted.json()["input_tokens"] + 4
            lost = more | {"thread": {"type": "continue", "previous_message_id": "msg_none"}}
            unknown = await client.post(f"{base}/messages", json=lost)
            assert unknown.status_code == 404  # then the package sends everything again
            assert unknown.json()["error"]["details"] == {"error_code": "thread_not_found"}
            again = await client.post(f"{base}/messages", json=more | {"system": "x"})
            assert refused(again).startswith("system must be left out")
        record = (await client.get(f"/sessions/{session}")).json()
        assert (record["turns"], record["branches"]) == (2, 0)
        assert " ".join(message["role"] for message in record["messages"]) == "system user assistant user assistant"


def test_tools_that_come_as_an_item_are_tools_of_the_request() -> None:
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    item = {"type": "additional_tools", "role": "developer", "tools": [look, {"type": "custom", "name": "exec"}]}
    spaced = {"type": "additional_tools", "tools": [{"type": "namespace", "name": "team", "tools": [look]}]}
    asked = {"role": "user", "content": "Hi"}
    translated = RESPONSES.translate({"input": [item, asked, spaced, item], "tools": [look | {"description": "first"}]})
    names = [tool["function"]["name"] for tool in translated.fields["tools"]]
    assert names == ["look", "exec", "team.look"]
    assert translated.fields["tools"][0]["function"]["description"] == "first"
    assert (translated.fields["messages"], translated.ignored) == ([asked], ())


async def test_a_request_for_a_summary_is_refused_by_name() -> None:
    async with talking() as (client, _):
        body = {"messages": [USER], "max_tokens": 4, "compaction": {"type": "summarize"}}
        assert "compaction" in refused(await client.post("/v1/messages", json=body))


async def test_instructions_are_not_inherited() -> None:
    async with talking() as (client, _):
        short = {"max_output_tokens": 2, "temperature": 0}
        begun = {"instructions": "Be brief.", "input": "Hi"} | short
        first = (await client.post("/v1/responses", json=begun)).json()
        body = {"input": "More", "previous_response_id": first["id"]} | short
        bare = (await client.post("/v1/responses", json=body)).json()
        full = (await client.post("/v1/responses", json=body | {"instructions": "Be brief."})).json()
        session = await open_session(client, history="forest")
        path = f"/sessions/{session}/v1/responses"
        first = (await client.post(path, json=begun)).json()
        body |= {"previous_response_id": first["id"]}
        assert (await client.post(path, json=body)).json()["usage"]["input_tokens"] == bare["usage"]["input_tokens"]
        again = (await client.post(path, json=body | {"instructions": "Be brief."})).json()
        assert again["usage"]["input_tokens"] == full["usage"]["input_tokens"]
        roots = (await client.get(f"/sessions/{session}")).json()["conversations"]
        assert [root["turns"] for root in roots] == [2, 1]  # without its instructions it is another conversation


async def test_a_conversation_goes_on_by_its_name() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        for base in (f"/sessions/{session}/v1", "/v1"):
            created = (await client.post(f"{base}/conversations", json={"metadata": {"a": "b"}})).json()
            assert (created["object"], created["metadata"]) == ("conversation", {"a": "b"})
            asked = {"conversation": created["id"], "max_output_tokens": 2}
            first = (await client.post(f"{base}/responses", json=asked | {"input": "Hi"})).json()
            assert first["conversation"] == {"id": created["id"]}
            more = asked | {"input": "More", "conversation": {"id": created["id"]}}
            second = (await client.post(f"{base}/responses", json=more)).json()
            assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert (await client.get(f"/sessions/{session}")).json()["turns"] == 2
        path = f"/v1/conversations/{created['id']}"
        assert (await client.get(path)).json() == created
        assert (await client.delete(path)).json()["deleted"] is True
        assert (await client.get(path)).status_code == 404


async def test_a_response_is_kept_unless_store_is_false_and_until_it_is_deleted() -> None:
    async with talking() as (client, _):
        body = {"input": "Hi", "max_output_tokens": 2}
        for options in ({}, {"stream": True}):
            answer = await client.post("/v1/responses", json=body | options)
            text = answer.text.split("event: response.created\ndata: ")[-1].split("\n")[0]
            kept = json.loads(text)
            path = f"/v1/responses/{(kept.get('response') or kept)['id']}"
            assert (await client.get(path)).json()["status"] == "incomplete"
            assert (await client.delete(path)).json()["deleted"] is True
            gone = await client.get(path)
            assert gone.status_code == 404
            assert "use a session" in gone.json()["error"]["message"]
        unkept = (await client.post("/v1/responses", json=body | {"store": False})).json()
        assert (await client.get(f"/v1/responses/{unkept['id']}")).status_code == 404
        session = await open_session(client)
        turn = (await client.post(f"/sessions/{session}/v1/responses", json=body | {"store": False})).json()
        path = f"/sessions/{session}/v1/responses/{turn['id']}"
        assert (await client.get(path)).status_code == 200
        assert (await client.delete(path)).status_code == 400


def test_the_store_forgets_the_least_recently_used_of_each_owner() -> None:
    store = ResponseStore(max_entries=2, max_bytes=2000)
    for id in ("a", "b"):
        store.put("ann", Kept(body={"id": id}))
        store.put("bob", Kept(body={"id": id}))
    store.get("ann", "a")
    store.put("ann", Kept(body={"id": "c"}))
    with pytest.raises(Exception, match="no 'b'"):
        store.get("ann", "b")
    assert store.get("ann", "a").body == store.get("bob", "a").body == {"id": "a"}
    store.put("ann", Kept(body={"id": "d", "text": "x" * 1990}))
    with pytest.raises(Exception, match="no 'a'"):
        store.get("ann", "a")


# The rest of the two APIs


async def test_count_tokens_is_what_the_message_then_costs() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        body = {"system": "Be brief.", "messages": [USER]}
        asked = await client.post("/v1/messages", json=body | {"max_tokens": 2})
        for path in ("/v1/messages/count_tokens", f"/sessions/{session}/v1/messages/count_tokens"):
            counted = await client.post(path, json=body)
            assert counted.json() == {"input_tokens": asked.json()["usage"]["input_tokens"]}


async def test_a_stop_sequence_is_named_and_a_replay_says_the_same() -> None:
    async with talking() as (client, _):
        session = await open_session(client)
        path = f"/sessions/{session}/v1/messages"
        first = (await client.post(path, json={"messages": [USER], "max_tokens": 8, "temperature": 0})).json()
        stop = first["content"][0]["text"][2:5]
        session = await open_session(client)
        path = f"/sessions/{session}/v1/messages"
        body = {"messages": [USER], "max_tokens": 8, "temperature": 0, "stop_sequences": [stop]}
        stopped = await client.post(path, json=body, headers={"idempotency-key": "k"})
        assert (stopped.json()["stop_reason"], stopped.json()["stop_sequence"]) == ("stop_sequence", stop)
        again = await client.post(path, json=body, headers={"idempotency-key": "k"})
        assert again.headers["idempotent-replayed"] == "true"
        assert again.content == stopped.content


async def _replays(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    for number, turn in enumerate((message_turn, response_turn)):
        record = (await client.get(f"/sessions/{session}")).json()["messages"]
        api, body = turn(record or [{"role": "system", "content": "Be brief."}], "Hi")
        for is_stream in (False, True):
            headers = {"idempotency-key": f"{number}{is_stream}"}
            path = f"/sessions/{session}/v1/{api}"
            first = await client.post(path, json=body | {"stream": is_stream, "temperature": 0}, headers=headers)
            again = await client.post(path, json=body | {"stream": is_stream, "temperature": 0}, headers=headers)
            assert again.headers["idempotent-replayed"] == "true"
            assert _final(again) == _final(first)


def _final(answer: httpx.Response) -> Json:
    """The reply in the end, without the time that it was made."""
    if answer.headers["content-type"] == "application/json":
        reply = answer.json()
    elif "message_start" in answer.text:
        reply = by_messages(answer.content)
    else:
        reply = by_responses(answer.content)
    return {name: value for name, value in reply.items() if name != "created_at" and value is not None}


async def test_a_request_that_is_sent_again_gets_the_same_reply_in_its_api() -> None:
    async with talking() as (client, _):
        await _replays(client)
    async with chatting() as (relay, _upstream):
        await _replays(relay.http)


async def test_the_same_body_and_key_in_another_api_is_another_request() -> None:
    async with talking() as (client, _):
        session = await open_session(client, history="forest")
        body = {"messages": [USER], "max_tokens": 2}
        for path in (chat_path(session), f"/sessions/{session}/v1/messages"):
            answer = await client.post(path, json=body, headers={"idempotency-key": "k"})
            assert answer.status_code == 200
            assert "idempotent-replayed" not in answer.headers


async def test_what_is_ignored_is_named() -> None:
    async with talking() as (client, _):
        body = {"messages": [USER], "max_tokens": 2, "metadata": {"user_id": "u"}, "context_management": {}}
        answer = await client.post("/v1/messages", json=body)
        assert answer.headers["holdfast-ignored-fields"] == "context_management,metadata"
    async with talking(unknown_fields="reject") as (client, _):
        answer = await client.post("/v1/messages", json=body)
        assert refused(answer) == "context_management is not supported here"


async def test_an_upstreams_refusal_is_told_in_the_apis_envelope() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        said = b'{"object": "error", "message": "too hot", "code": 400}'
        for path, body in (
            (f"/sessions/{session}/v1/messages", {"messages": [USER]}),
            (f"/sessions/{session}/v1/responses", {"input": "Hi"}),
        ):
            for is_stream in (False, True):
                upstream.faults.append(Fault(body=said, status=400, headers={"content-type": "text/plain"}))
                answer = await relay.http.post(path, json=body | {"stream": is_stream})
                assert answer.status_code == 400
                assert answer.headers["content-type"] == "application/json"
                assert refused(answer) == "too hot"


# Bytes at once


PINGS = {
    "chat/completions": (b": ping\n\n", {"messages": [USER], "max_tokens": 2, "stream": True}),
    "messages": (b"event: message_start", {"messages": [USER], "max_tokens": 2, "stream": True}),
    "responses": (b"event: response.created", {"input": "Hi", "max_output_tokens": 2, "stream": True}),
}


@pytest.mark.parametrize("api", PINGS)
@pytest.mark.parametrize("on_session", [False, True], ids=["stateless", "session"])
async def test_a_stream_pings_while_the_engine_takes_its_time(api: str, on_session: bool) -> None:
    engine = wordy_engine()
    async with talking(engine=engine, stream_ping_s=0.02) as (client, _):
        base = f"/sessions/{await open_session(client)}" if on_session else ""
        first, body = PINGS[api]
        seen = b""
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(engine))
            async with client.stream("POST", f"{base}/v1/{api}", json=body) as answer:
                assert answer.status_code == 200
                chunks = answer.aiter_bytes()
                while seen.count(b"ping\n\n") + seen.count(b'"ping"}') < 3:
                    seen += await anext(chunks)
                assert seen.startswith(first)
                stack.close()
                async for chunk in chunks:
                    seen += chunk
    assert b"error" not in seen.replace(b'"error":null', b"")
    assert seen.rstrip().endswith(b"[DONE]") or b"message_stop" in seen or b"response.incomplete" in seen


@pytest.mark.parametrize("api", PINGS)
async def test_an_error_after_a_ping_is_an_event_of_the_api(api: str) -> None:
    ends = {
        "chat/completions": b'"message":"too hot"',
        "messages": b"event: error",
        "responses": b"event: response.failed",
    }
    async with chatting(stream_ping_s=0.02) as (relay, upstream):
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        upstream.faults.append(Fault(body=b'{"error": {"message": "too hot"}}', status=400))
        seen = b""
        async with relay.http.stream("POST", f"/sessions/{session}/v1/{api}", json=PINGS[api][1]) as answer:
            assert answer.status_code == 200
            async for chunk in answer.aiter_bytes():
                seen += chunk
                upstream.may_answer.set()
        assert ends[api] in seen
        assert b"too hot" in seen
        record = (await relay.http.get(f"/sessions/{session}")).json()
        assert record["turns"] == 0


async def test_without_pings_a_stream_begins_with_its_first_event_and_an_error_has_its_status() -> None:
    async with chatting(stream_ping_s=0) as (relay, upstream):
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        upstream.faults.append(Fault(body=b"{}", status=418))
        asked = asyncio.ensure_future(relay.http.post(f"/sessions/{session}/v1/messages", json=PINGS["messages"][1]))
        await until(lambda: len(upstream.requests) == 1)
        upstream.may_answer.set()
        assert (await asked).status_code == 418


# Sessions by header


async def test_a_header_names_a_session_that_all_apis_share() -> None:
    async with talking(session_header="X-Thread, session-id") as (client, _):
        named = {"holdfast-session": "mine"}
        ids = set()
        messages: list[Json] = [{"role": "system", "content": "Be brief."}]
        for turn in (chat_turn, message_turn, response_turn):
            api, body = turn(messages, "Hi")
            headers = named | {"x-claude-code-agent-id": "a1", "thread-id": "t" * 999}
            answer = await client.post(f"/v1/{api}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "deprecation" not in answer.headers
            ids.add(answer.headers["holdfast-session"])
            messages = (await client.get(f"/sessions/{answer.headers['holdfast-session']}")).json()["messages"]
        (session,) = ids
        record = (await client.get(f"/sessions/{session}")).json()
        (conversation,) = record["conversations"]
        assert conversation["turns"] == 3
        assert conversation["agent"] == {"x-claude-code-agent-id": "a1", "thread-id": "t" * 256}
        models = await client.get("/v1/models", headers=named)
        assert models.headers["holdfast-session"] == session
        other = await client.post("/v1/messages", json=body | {"messages": [USER]}, headers={"x-thread": "mine"})
        assert other.headers["holdfast-session"] not in ids
        for name in ("", "x" * 257, "a\tb"):
            answer = await client.post("/v1/messages", json={}, headers={"holdfast-session": name})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


# The packages against a server


async def test_the_packages_talk_to_a_session() -> None:
    async with talking() as (client, server):
        session = await open_session(client)
        url = f"http://{server.http}/sessions/{session}"
        claude: Any = anthropic.AsyncAnthropic(api_key="k", base_url=url)
        gpt: Any = openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1")
        async with claude, gpt:
            asked: Json = {"model": "m", "max_tokens": 4, "messages": [USER]}
            async with claude.messages.stream(**asked) as stream:
                first = await stream.get_final_message()
            assert first.stop_reason == "max_tokens"
            text = first.content[0].text
            history = [USER, {"role": "assistant", "content": text}, USER]
            async with gpt.responses.stream(model="m", input=history, max_output_tokens=4) as stream:
                events = [event async for event in stream]
            kept = await gpt.responses.retrieve(events[-1].response.id)
            assert kept.output_text == events[-1].response.output_text
            assert (await claude.messages.count_tokens(model="m", messages=[USER])).input_tokens > 0
            with pytest.raises(anthropic.BadRequestError) as caught:
                await claude.messages.create(**asked | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
            assert caught.value.request_id
            with pytest.raises(openai.NotFoundError):
                await gpt.responses.retrieve("resp_none")
