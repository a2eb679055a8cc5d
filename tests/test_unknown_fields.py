"""Fields that agents send and that mean nothing here: left out and named, or refused, as the server is set."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from holdfast.chat.messages import MAX_IGNORED, IgnoredFields, read_messages
from holdfast.chat.template import ChatTemplate
from holdfast.engine.slab import SlabShape
from holdfast.errors import InvalidArgument
from holdfast.serving.http.bodies import convert_chat, decode_chat
from holdfast.serving.http.parse import template_variables, unread_fields
from holdfast.serving.http.schema import ChatCompletion, Completion, RelayedChat
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, error_of, open_session, said

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x-note": "stays"}}}
NOISY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "Hi", "provider_specific_fields": None},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "provider_specific_fields": {"a": 1},
        "thinking_blocks": [{"type": "thinking"}],
        "reasoning_details": [{"text": "Hm"}],
        "tool_calls": [{**CALL, "function": {**CALL["function"], "extra": 1}, "extra_content": {"google": {}}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "4", "cache_control": {}},
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "c"},
]
PATHS = [
    "messages[0].content[0].cache_control",
    "messages[2].provider_specific_fields",
    "messages[2].thinking_blocks",
    "messages[2].reasoning_details",
    "messages[2].tool_calls[0].extra_content",
    "messages[2].tool_calls[0].function.extra",
    "messages[3].cache_control",
]


def test_unknown_fields_of_messages_parts_and_calls_are_left_out_and_named_by_path() -> None:
    ignored = IgnoredFields()
    assert read_messages(NOISY, ignored=ignored) == PLAIN
    assert ignored.paths == PATHS
    with pytest.raises(InvalidArgument) as caught:
        read_messages(NOISY)
    assert caught.value.param == PATHS[0]


@pytest.mark.parametrize("field", ["refusal", "audio", "function_call", "images", "file"])
def test_content_that_cannot_be_rendered_is_refused_and_never_left_out(field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_messages([{"role": "assistant", "content": "x", field: "y"}], ignored=IgnoredFields())
    assert caught.value.param == f"messages[0].{field}"


def test_no_more_than_a_few_names_are_collected_and_none_is_long() -> None:
    ignored = IgnoredFields()
    read_messages([{"role": "user", "content": "x", "n" * 1000: 1}] * 1000, ignored=ignored)
    assert len(ignored.paths) == MAX_IGNORED
    assert max(map(len, ignored.paths)) <= 200


def test_a_function_message_is_a_tool_message_and_a_custom_call_a_function_call() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    messages = read_messages(
        [{"role": "assistant", "tool_calls": [custom]}, {"role": "function", "name": "shell", "content": "a b"}]
    )
    call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"input": "ls"}'}}
    assert messages == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a b", "name": "shell"},
    ]


@pytest.mark.parametrize("kind", [ChatCompletion, RelayedChat])
async def test_a_body_is_read_without_the_fields_that_its_type_does_not_have(kind: Any) -> None:
    tool = {**TOOL, "cache_control": {}, "function": {**TOOL["function"], "deferred": True}}
    raw = {
        "messages": NOISY,
        "tools": [TOOL | {"function": {"name": "g"}}, tool],
        "stream": True,
        "stream_options": {"x": 1},
    }
    decoded = await decode_chat(json.dumps(raw).encode(), kind, may_ignore=True)
    assert decoded.body.messages == decoded.fields["messages"] == PLAIN
    assert decoded.fields["tools"] == [{"type": "function", "function": {"name": "g"}}, TOOL]
    assert set(decoded.ignored) == {*PATHS, "stream_options.x", "tools[1].cache_control", "tools[1].function.deferred"}


def test_top_level_fields_leave_what_is_recorded_and_null_is_not_named() -> None:
    given = said("Hi", wishes=3, store=None, colour=None)
    decoded = convert_chat(given, ChatCompletion, may_ignore=True)
    assert decoded.ignored == ("wishes",)
    assert decoded.fields == said("Hi", store=None)
    assert given["wishes"] == 3
    assert convert_chat({"prompt": "a", "wishes": 3}, Completion, may_ignore=True).ignored == ("wishes",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"wishes": 3}, "wishes"),
        ({"a\nb": 3}, "a\nb"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages[0].x"),
        ({"tools": [{**TOOL, "cache_control": {}}]}, "tools[0].cache_control"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "auto"}, "tools[0].type"),
    ],
)
@pytest.mark.parametrize("setting", ["ignore", "reject"])
async def test_the_server_ignores_or_rejects_as_it_is_set(setting: str, fields: dict[str, Any], param: str) -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), unknown_fields=setting) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}") as client,
    ):
        session = await open_session(client)
        for path in ("/v1/chat/completions", chat_path(session)):
            reply = await client.post(path, json=said("hi") | fields)
            if setting == "ignore":
                assert reply.status_code == 200, reply.text
                assert reply.headers["holdfast-ignored-fields"] == param.removesuffix(".type").replace("\n", "?")
            else:
                assert (reply.status_code, error_of(reply)["param"]) == (400, param)


# Fields that are known, and have no effect or a bounded one


def custom(name: str, **about: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **about}}


def function(name: str, **about: Any) -> dict[str, Any]:
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"type": "function", "function": {"name": name, **about, "parameters": text}}


@pytest.mark.parametrize("kind", [ChatCompletion, RelayedChat])
def test_a_custom_tool_is_a_function_with_one_text_and_other_types_are_left_out(kind: Any) -> None:
    tools = [TOOL, {"type": "web_search"}, custom("shell", description="runs", format={"type": "text"})]
    given = said("Hi", tools=tools, tool_choice={"type": "custom", "custom": {"name": "shell"}})
    decoded = convert_chat(given, kind, may_ignore=True)
    assert decoded.fields["tools"] == [TOOL, function("shell", description="runs")]
    assert decoded.fields["tool_choice"] == {"type": "function", "function": {"name": "shell"}}
    assert decoded.ignored == ("tools[1]", "tools[2].custom.format")
    given = said("Hi", tools=[{"type": "web_search"}], tool_choice="auto")
    assert convert_chat(given, kind, may_ignore=True).fields == said("Hi")


AGENT = {
    "verbosity": "low",
    "reasoning_effort": "high",
    "store": True,
    "service_tier": "flex",
    "modalities": ["text"],
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "stream": True,
    "max_tokens": 2**40,
    "tools": [{"type": "function", "function": {"name": f"tool_{index}"}} for index in range(200)],
}


@pytest.mark.parametrize("setting", ["ignore", "reject"])
async def test_what_agents_send_works_stateless_as_on_sessions(setting: str) -> None:
    engine = wordy_engine(forward_s=0, shape=SlabShape(recent=8192, max_pin=64, prefill_chunk=8192))
    async with (
        serving(engine, default_chat(), unknown_fields=setting, max_reply_tokens=3) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}") as client,
    ):
        session = await open_session(client)
        for path in ("/v1/chat/completions", chat_path(session)):
            reply = await client.post(path, json=said("hi") | AGENT)
            assert reply.status_code == 200, reply.text
            assert '"finish_reason":"length"' in reply.text
            assert set(reply.headers["holdfast-ignored-fields"].split(",")) == {"reasoning_effort", "verbosity"}
        (record,) = (await client.get(f"/sessions/{session}")).json()["records"]
        samples = (await client.post(f"/sessions/{session}/samples", json={"format": "json"})).json()["samples"]
        assert samples[0]["turns"][0]["sampling"]["max_tokens"] == 3
        assert not {"verbosity", "reasoning_effort"} & record["request"].keys()


def test_reasoning_effort_is_a_variable_of_a_template_that_reads_it() -> None:
    source = default_chat().model.template.source
    reading = replace(default_chat().model, template=ChatTemplate(source + "{{ reasoning_effort }}"))
    assert unread_fields(default_chat().model) == {"reasoning_effort", "verbosity"}
    assert unread_fields(reading) == {"verbosity"}
    for kind in (ChatCompletion, RelayedChat):
        body = convert_chat(said("Hi", reasoning_effort="high", verbosity="low"), kind, may_ignore=True).body
        assert template_variables(body, reading) == {"reasoning_effort": "high"}
        assert template_variables(body, default_chat().model) == {}
        body.chat_template_kwargs = {"reasoning_effort": "low"}
        assert template_variables(body, reading) == {"reasoning_effort": "low"}
