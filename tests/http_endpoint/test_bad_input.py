"""Bad input at the HTTP endpoint is refused by the name of the field that is wrong."""

import json
from typing import Any

import httpx
import pytest

from tests.http_endpoint.shared import CHAT
from tests.serving import Server
from tests.talking import chat_path, error_of, open_session, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def chat_with(field: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, ' + field.encode() + b"}"


HI = '"messages": [{"role": "user", "content": "hi"}]'
BAD_CHATS: dict[str, tuple[bytes, str | None]] = {
    "list": (b"[]", None),
    "null": (b"null", None),
    "text": (b'"hi"', None),
    "number": (b"1", None),
    "nothing": (b"", None),
    "not JSON": (b"{", None),
    "two values": (b"{} {}", None),
    "bad UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
    "bad UTF-8 in a key": (b'{"\xff": 1}', None),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    "half a pair beside NaN": (b'{"\\ud800": NaN}', None),
    "no messages": (b"{}", "messages"),
    "empty messages": (b'{"messages": []}', "messages"),
    "messages null": (b'{"messages": null}', "messages"),
    "messages text": (b'{"messages": "hi"}', "messages"),
    "messages object": (b'{"messages": {}}', "messages"),
    "message number": (b'{"messages": [1]}', "messages[0]"),
    "no role": (b'{"messages": [{"content": "hi"}]}', "messages[0].role"),
    "unknown role": (b'{"messages": [{"role": "wizard", "content": "hi"}]}', "messages[0].role"),
    "role list": (b'{"messages": [{"role": ["user"], "content": "hi"}]}', "messages[0].role"),
    "role object": (b'{"messages": [{"role": {}, "content": "hi"}]}', "messages[0].role"),
    "content number": (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content"),
    "content image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        "messages[0].content[0].type",
    ),
    "call without a name": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
        "messages[0].tool_calls[0].function.name",
    ),
    "unknown field that changes the reply": (chat_with('"guided_regex": "a+"'), "guided_regex"),
    "bad type beside an unknown field": (chat_with('"wishes": 3, "top_p": "x"'), "top_p"),
    "audio of a message": (b'{"messages": [{"role": "assistant", "audio": {"id": "x"}}]}', "messages[0].audio"),
    "unsupported": (chat_with('"audio": {"voice": "alloy"}'), "audio"),
    "NaN temperature": (chat_with('"temperature": NaN'), "temperature"),
    "infinite top_p": (chat_with('"top_p": -Infinity'), "top_p"),
    "NaN within": (chat_with('"logit_bias": {"5": NaN}'), "logit_bias.5"),
    "temperature beyond any float": (chat_with('"temperature": 1e999'), "temperature"),
    "negative temperature": (chat_with('"temperature": -1'), "temperature"),
    "temperature text": (chat_with('"temperature": "hot"'), "temperature"),
    "negative max_tokens": ((f"{{{HI}, ").encode() + b'"max_tokens": -1}', "max_tokens"),
    "max_tokens zero": ((f"{{{HI}, ").encode() + b'"max_tokens": 0}', "max_tokens"),
    "max_tokens huge": ((f"{{{HI}, ").encode() + b'"max_tokens": ' + b"9" * 400 + b"}", "max_tokens"),
    "max_tokens half": ((f"{{{HI}, ").encode() + b'"max_tokens": 1.5}', "max_tokens"),
    "max_tokens true": ((f"{{{HI}, ").encode() + b'"max_tokens": true}', "max_tokens"),
    "seed huge": (chat_with('"seed": ' + "9" * 30), "seed"),
    "seed of 5,000 digits": (chat_with('"seed": ' + "9" * 5000), None),
    "stop of 1,000 strings": (chat_with('"stop": ' + json.dumps(["x"] * 1000)), "stop"),
    "stop empty": (chat_with('"stop": ""'), "stop"),
    "stop numbers": (chat_with('"stop": [1]'), "stop[0]"),
    "stop_token_ids outside": (chat_with('"stop_token_ids": [99999999]'), "stop_token_ids"),
    "n zero": (chat_with('"n": 0'), "n"),
    "n beyond what runs at once": (chat_with('"n": 100'), "n"),
    "logit_bias outside": (chat_with('"logit_bias": {"99999999": 1}'), "logit_bias.99999999"),
    "logit_bias word": (chat_with('"logit_bias": {"word": 1}'), "logit_bias.word"),
    "top_logprobs alone": (chat_with('"top_logprobs": 3'), "top_logprobs"),
    "top_logprobs 21": (chat_with('"logprobs": true, "top_logprobs": 21'), "top_logprobs"),
    "stream text": (chat_with('"stream": "yes"'), "stream"),
    "response_format unknown": (chat_with('"response_format": {"type": "xml"}'), "response_format.type"),
    "json_schema missing": (
        chat_with('"response_format": {"type": "json_schema"}'),
        "response_format.json_schema.schema",
    ),
    "json_schema nonsense": (
        chat_with('"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}'),
        "response_format.json_schema.schema",
    ),
    "tool without a function": (chat_with('"tools": [{"type": "function"}]'), "tools[0].function"),
    "tool without a type": (chat_with('"tools": [{"function": {"name": "x"}}]'), "tools[0].type"),
    "4,097 tools": (
        chat_with(f'"tools": {json.dumps([{"type": "function", "function": {"name": "x"}}] * 4097)}'),
        "tools",
    ),
    "no text wanted": (chat_with('"modalities": ["audio"]'), "modalities"),
    "custom tool without a name": (chat_with('"tools": [{"type": "custom", "custom": {}}]'), "tools[0].function.name"),
    "tool twice": (
        chat_with('"tools": [%s, %s]' % (('{"type": "function", "function": {"name": "x"}}',) * 2)),
        "tools[1].function.name",
    ),
    "tool_choice without tools": (chat_with('"tool_choice": "required"'), "tool_choice"),
    "tool_choice unknown": (
        chat_with(
            '"tools": [{"type": "function", "function": {"name": "x"}}], '
            '"tool_choice": {"type": "function", "function": {"name": "y"}}'
        ),
        "tool_choice.function.name",
    ),
    "metadata numbers": (chat_with('"metadata": {"a": 1}'), "metadata"),
    "Jinja's own variable": (chat_with('"chat_template_kwargs": {"self": 1}'), "chat_template_kwargs.self"),
    "Jinja's own function": (chat_with('"chat_template_kwargs": {"range": 1}'), "chat_template_kwargs.range"),
    "template's own variable": (chat_with('"chat_template_kwargs": {"messages": []}'), "chat_template_kwargs.messages"),
    "input_ids outside": (chat_with('"input_ids": [99999999]'), "input_ids"),
    "input_ids negative": (chat_with('"input_ids": [-1]'), "input_ids[0]"),
    "input_ids empty": (chat_with('"input_ids": []'), "input_ids"),
    "nested beyond the decoder": (chat_with('"metadata": ' + nested(100_000)), None),
    "nested list": (b"[" * 100_000, None),
    "nested deep in a tool": (
        chat_with(f'"tools": [{{"type": "function", "function": {{"name": "x", "parameters": {nested(800)}}}}}]'),
        None,
    ),
    "nested deep in arguments": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": %s}}]}]}'
        % nested(800).encode(),
        None,
    ),
    "nested deep in a schema": (
        chat_with(
            f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {nested(800)}}}}}'
        ),
        None,
    ),
}


@pytest.mark.parametrize("case", BAD_CHATS)
async def test_bad_chats_are_400_by_the_name_of_the_field(client: httpx.AsyncClient, case: str) -> None:
    body, param = BAD_CHATS[case]
    session = await open_session(client)
    for path in (CHAT, chat_path(session)):
        if path != CHAT and case.startswith(("n beyond", "input_ids")):
            continue  # a session refuses these whatever they hold
        response = await client.post(path, content=body)
        error = error_of(response)
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
        if param is not None:
            assert error["param"] is not None, error
            assert error["param"].startswith(param), error
            assert param in error["message"]
    assert (await client.get(f"/sessions/{session}")).json()["history_length"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "n": 100}, "n"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "messages": ["b"]}, "messages"),
    ],
    ids=str,
)
async def test_bad_completions_are_400_by_the_name_of_the_field(
    client: httpx.AsyncClient, body: Any, param: str
) -> None:
    response = await client.post("/v1/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"].startswith(param), error
    assert param in error["message"]


async def test_more_prompts_than_may_run_at_once_are_refused_by_their_own_name(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/v1/completions", json={"prompt": ["a"] * 5}))
    assert "5" in error["message"]
    assert "prompt" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b"{", None),
        (b'{"pin_tokens": -1}', "pin_tokens"),
        (b'{"pin_tokens": 9999}', "pin_tokens"),
        (b'{"metadata": {"a": {}}}', "metadata"),
        (b'{"label": 1}', "label"),
        (b'{"colour": "red"}', "colour"),
    ],
)
async def test_bad_sessions_are_400_and_take_no_place(
    server: Server, client: httpx.AsyncClient, body: bytes, param: str | None
) -> None:
    response = await client.post("/sessions", content=body)
    error = error_of(response)
    assert response.status_code == 400
    assert param is None or error["param"].startswith(param)
    assert server.worker.num_free_slabs == 4


async def test_a_session_refuses_what_only_a_stateless_chat_can_do(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    for options in ({"n": 2}, {"input_ids": [1]}):
        error = error_of(await client.post(chat_path(session), json=said("hi", **options)))
        assert error["param"] == next(iter(options))


async def test_a_key_of_many_letters_before_a_long_list_costs_no_memory_to_refuse(client: httpx.AsyncClient) -> None:
    body = b'{"' + b"k" * 400_000 + b'": [' + b"0," * 250_000 + b"NaN]}"
    error = error_of(await client.post(CHAT, content=body))
    assert len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sessions", {"label": "x" * 1001}, "label"),
        ("/sessions", {"group": "x" * 1001}, "group"),
        ("/sessions", {"metadata": {str(number): "" for number in range(65)}}, "metadata"),
        ("/sessions", {"metadata": {"x" * 257: ""}}, "metadata"),
        ("/sessions", {"metadata": {"a": "x" * 4097}}, "metadata.a"),
        (CHAT, said("hi", metadata={str(number): "" for number in range(65)}), "metadata"),
        (CHAT, said("hi", user="x" * 4097), "user"),
        (CHAT, said("hi", stop_token_ids=[1] * 4097), "stop_token_ids"),
    ],
)
async def test_lists_and_labels_without_measure_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
