"""The HTTP door over real sockets: headers, keys, limits, bad input, what is logged and counted."""

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from holdfast import __version__
from holdfast.chat.tokenizer import Tokenizer
from holdfast.engine.interface import Row
from holdfast.errors import ConfigError
from holdfast.serving.http import bodies
from holdfast.serving.http.descriptions import DESCRIPTIONS
from holdfast.serving.http.openapi import build
from tests.serving import Server, SlowEngine, default_chat, held, serving, wordy_engine
from tests.talking import (
    chat_path,
    client_of,
    error_of,
    events_of,
    eventually,
    open_session,
    refusal_of,
    said,
    text_of,
    until,
)

CHAT = "/v1/chat/completions"
DEPRECATION = ("deprecation", "sunset", "link")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that all share; what it opened is closed behind it."""
    async with client_of(server) as client:
        yield client
        for view in (await client.get("/sessions")).json()["data"]:
            await client.delete(f"/sessions/{view['session_id']}")
        assert server.worker.num_free_slabs == 4


# Headers


async def test_stateless_responses_and_their_errors_name_the_session_api(client: httpx.AsyncClient) -> None:
    for path, body in (
        (CHAT, said("hi")),
        (CHAT, said("hi", stream=True)),
        (CHAT, {"messages": []}),
        (CHAT, []),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/completions", {"prompt": ""}),
    ):
        headers = (await client.post(path, json=body)).headers
        assert headers["deprecation"] == "true"
        assert headers["sunset"] == "Fri, 31 Dec 2027 00:00:00 GMT"
        assert headers["link"] == '</sessions>; rel="successor-version"'
    assert (await client.get(CHAT)).headers["deprecation"] == "true"  # 405


async def test_sessions_and_everything_else_carry_no_deprecation_headers(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    responses = [
        await client.post(chat_path(session), json=said("hi")),
        await client.post(chat_path(session), json=[]),
        await client.get(f"/sessions/{session}"),
        await client.get("/v1/models"),
        await client.get("/health"),
        await client.get("/nothing"),
    ]
    assert [response.status_code for response in responses] == [200, 400, 200, 200, 200, 404]
    assert not any(name in response.headers for response in responses for name in DEPRECATION)


async def test_deprecation_headers_can_be_turned_off_and_their_date_set() -> None:
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), deprecation_headers=False) as server,
        client_of(server) as client,
    ):
        response = await client.post(CHAT, json=said("hi"))
        assert response.status_code == 200
        assert not any(name in response.headers for name in DEPRECATION)
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), sunset="2030-02-28") as server,
        client_of(server) as client,
    ):
        response = await client.post(CHAT, json=said("hi"))
        assert response.headers["sunset"] == "Thu, 28 Feb 2030 00:00:00 GMT"


async def test_every_response_has_a_request_id_the_clients_own_where_it_is_sane(client: httpx.AsyncClient) -> None:
    given = await client.post(CHAT, json=[], headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for insane in ("a" * 200, "two words", ""):
        made = (await client.get("/health", headers={"x-request-id": insane})).headers["x-request-id"]
        assert made.startswith("req-")
    assert len({(await client.get("/health")).headers["x-request-id"] for _ in range(3)}) == 3


async def test_a_stream_is_server_sent_events_that_no_proxy_keeps_back(client: httpx.AsyncClient) -> None:
    async with client.stream("POST", CHAT, json=said("hi", stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        events = [event async for event in events_of(response)]
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    whole = (await client.post(CHAT, json=said("hi"))).json()
    assert text_of(events) == whole["choices"][0]["message"]["content"]


async def test_a_head_request_gets_the_headers_alone(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/sessions"):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")


# Keys


@contextlib.asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[Server]:
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\nbob:key-b\n")
    async with serving(wordy_engine(forward_s=0), default_chat(), keys_file=str(keys)) as server:
        yield server


async def test_without_a_key_that_is_known_everything_but_health_is_401(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        for authorization in (b"", b"Bearer", b"Bearer wrong", b"Basic key-a", b"Bearer k\xe9y"):
            async with client_of(server) as client:
                client.headers = httpx.Headers([(b"authorization", authorization)])
                for path in ("/v1/models", "/sessions", "/nothing"):
                    response = await client.get(path)
                    assert refusal_of(response) == (401, "unauthenticated")
                    assert response.headers["www-authenticate"] == "Bearer"
                response = await client.post(CHAT, json=said("hi"))
                assert refusal_of(response) == (401, "unauthenticated")
                assert response.headers["deprecation"] == "true"
                for path in ("/health", "/healthz", "/readyz", "/metrics", "/openapi.json"):
                    assert (await client.get(path)).status_code == 200
        async with client_of(server, "key-a") as client:
            assert (await client.post(CHAT, json=said("hi"))).status_code == 200


async def test_several_authorization_headers_are_401(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server) as client:
        for keys in ((b"key-a", b"key-b"), (b"key-b", b"key-a"), (b"key-a", b"key-a")):
            headers = [(b"authorization", b"Bearer " + key) for key in keys]
            assert refusal_of(await client.get("/v1/models", headers=headers)) == (401, "unauthenticated")


async def test_sessions_are_listed_by_label_state_and_page() -> None:
    async with serving(wordy_engine(num_slabs=2), default_chat(), max_parked=9) as server, client_of(server) as client:
        opened = [await open_session(client, label=label) for label in ("a", "b", "a", "a", "")]

        async def listed(**query: Any) -> tuple[list[str], str]:
            answer = (await client.get("/sessions", params=query)).json()
            return [view["session_id"] for view in answer["data"]], answer["next_page_token"]

        assert await listed() == (opened, "")
        assert await listed(label="a") == ([opened[0], opened[2], opened[3]], "")
        assert await listed(label="") == (opened[4:], "")
        assert await listed(state="parked") == (opened[:3], "")
        first, token = await listed(label="a", page_size=2)
        assert first == [opened[0], opened[2]]
        assert await listed(label="a", page_size=2, page_token=token) == ([opened[3]], "")
        for query in (
            {"state": "asleep"},
            {"page_size": 0},
            {"page_size": "x"},
            {"page_size": 1001},
            {"page_token": "x"},
        ):
            answer = await client.get("/sessions", params=query)
            assert (answer.status_code, error_of(answer)["param"]) == (400, *query)


async def test_a_session_does_not_exist_for_another_owner(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-b") as bob:
        session = await open_session(alice)
        unknown = "0" * 32
        for method, path, body in (
            ("GET", "/sessions/{}", None),
            ("DELETE", "/sessions/{}", None),
            ("POST", "/sessions/{}/fork", {}),
            ("POST", chat_path("{}"), said("hi")),
            ("POST", chat_path("{}"), []),  # unknown beats malformed, so that it tells nothing
        ):
            theirs = await bob.request(method, path.format(session), json=body)
            nobodys = await bob.request(method, path.format(unknown), json=body)
            assert refusal_of(theirs) == (404, "session_not_found")
            assert theirs.json() == json.loads(nobodys.text.replace(unknown, session))
        assert (await bob.get("/sessions")).json()["data"] == []
        assert [view["session_id"] for view in (await alice.get("/sessions")).json()["data"]] == [session]
        assert (await alice.post(chat_path(session), json=said("hi"))).status_code == 200


async def test_models_of_a_session_are_listed_for_its_owner_only(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-b") as bob:
        session = await open_session(alice)
        assert (await alice.get(f"/sessions/{session}/v1/models")).json()["data"][0]["id"] == "test"
        assert refusal_of(await bob.get(f"/sessions/{session}/v1/models")) == (404, "session_not_found")


# Bad input


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


# Sizes


async def raw_request(server: Server, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: {server.http}\r\n{head}\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_body_of_100_mb_is_413_before_a_byte_of_it_is_read(server: Server) -> None:
    reader, writer = await raw_request(server, f"Content-Length: {100 << 20}")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 413")
    assert b"deprecation: true" in head
    await closed(writer)


async def test_a_chunked_body_is_413_as_soon_as_it_is_too_large(server: Server) -> None:
    reader, writer = await raw_request(server, "Transfer-Encoding: chunked")
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    megabyte, sent = b"100000\r\n" + b" " * (1 << 20) + b"\r\n", 0
    with contextlib.suppress(OSError):
        while not answer.done() and sent < 100:
            writer.write(megabyte)
            await writer.drain()
            sent += 1
    assert (await asyncio.wait_for(answer, 30)).startswith(b"HTTP/1.1 413")
    assert 64 <= sent < 80
    await closed(writer)


async def test_the_limit_of_bodies_can_be_set_and_names_itself() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat(), max_body_mb=1) as server, client_of(server) as client:
        body = json.dumps(said("hi")).encode()
        assert (await client.post(CHAT, content=body + b" " * 900_000)).status_code == 200
        response = await client.post(CHAT, content=body + b" " * 1_100_000)
        assert refusal_of(response) == (413, "payload_too_large")
        assert "--max-body-mb" in response.text


async def test_a_client_that_leaves_in_mid_body_is_no_error_of_ours(
    server: Server, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.access")
    _, writer = await raw_request(server, "Content-Length: 1000")
    await closed(writer)
    while not caplog.records:
        await client.get("/health")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "holdfast.access"]
    while not any(line["path"] == CHAT for line in lines):
        await client.get("/health")
        lines = [json.loads(record.message) for record in caplog.records if record.name == "holdfast.access"]
    assert [line["status"] for line in lines if line["path"] == CHAT] == [499]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Paths and methods


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/sessions/", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/sessions/unknown", 404, "session_not_found"),
        ("GET", "/sessions/%00%ff%2F", 404, None),
        ("DELETE", "/sessions/unknown", 404, "session_not_found"),
        ("POST", "/sessions/unknown/fork", 404, "session_not_found"),
        ("POST", "/sessions/unknown/v1/chat/completions", 404, "session_not_found"),
        ("GET", "/sessions/unknown/v1/models", 404, "session_not_found"),
        ("POST", "/sessions/unknown/update_weights", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/sessions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/sessions/unknown", 405, "method_not_allowed"),
        ("BREW", "/health", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_are_refused_in_the_envelope(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str | None
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert code is None or error_of(response)["code"] == code


async def test_a_wrong_method_is_told_all_right_ones(client: httpx.AsyncClient) -> None:
    for path, allowed in (("/sessions", {"GET", "HEAD", "POST"}), ("/sessions/x", {"GET", "HEAD", "DELETE"})):
        assert set((await client.put(path)).headers["allow"].split(", ")) == allowed


# Logs and metrics


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "holdfast.access"]


async def test_access_lines_tell_everything_but_the_prompt(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = await open_session(client)
    await client.post(CHAT, json=said("my secret"), headers={"x-request-id": "one"})
    await client.post(chat_path(session), json=said("my secret"))
    await client.post(CHAT, json=said("my secret", top_p=3))
    await client.get("/my%20path")
    _, first, second, third, fourth = access_lines(caplog)
    assert "secret" not in caplog.text
    assert first | {"duration_ms": 0} == {
        "request_id": "one",
        "method": "POST",
        "path": CHAT,
        "route": "chat_completions",
        "status": 200,
        "duration_ms": 0,
        "owner": "local",
        "client": "127.0.0.1",
    }
    assert first["duration_ms"] > 0
    assert (second["route"], second["status"]) == ("session_chat", 200)
    assert (third["route"], third["status"]) == ("chat_completions", 400)
    assert (fourth["route"], fourth["status"], fourth["path"]) == ("none", 404, "/my path")


async def test_prompts_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast.access")
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), log_prompts=True) as server,
        client_of(server) as client,
    ):
        await client.post(CHAT, json=said("my secret"))
        await client.post(CHAT, content=b"\xff")
    assert json.loads(access_lines(caplog)[0]["body"])["messages"][0]["content"] == "my secret"
    assert access_lines(caplog)[1]["body"] == "\ufffd"


async def test_keys_are_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-c") as other:
        assert (await alice.get("/sessions")).status_code == 200
        assert (await other.get("/sessions")).status_code == 401
    assert "key-a" not in caplog.text
    assert "key-c" not in caplog.text
    assert [(line["owner"], line["status"]) for line in access_lines(caplog)] == [("alice", 200), (None, 401)]


async def test_metrics_count_requests_admissions_and_prefilled_tokens() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        usage = (await client.post(CHAT, json=said("hi"))).json()["usage"]
        await client.post(CHAT, json=[])
        text = (await client.get("/metrics")).text
        value = server.metrics.registry.get_sample_value
        route = {"route": "chat_completions"}
        assert value("holdfast_http_requests_total", route | {"status": "200"}) == 1
        assert value("holdfast_http_requests_total", route | {"status": "400"}) == 1
        assert value("holdfast_admission_total", {"outcome": "admitted"}) == 1
        assert value("holdfast_generate_prefill_tokens_sum") == usage["prompt_tokens"]
        assert value("holdfast_generated_tokens_total") == usage["completion_tokens"] == 4
        assert value("holdfast_queue_depth") == 0
        assert value("holdfast_session_active") == 0
    for name in ("http_request_duration_seconds", "time_to_first_token_seconds", "event_loop_lag_seconds"):
        assert f"holdfast_{name}_bucket" in text


# The window


async def test_a_prompt_beyond_the_window_is_refused_unless_it_may_be_truncated(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    long = "word " * 300
    for path in (CHAT, chat_path(session)):
        response = await client.post(path, json=said(long))
        assert refusal_of(response) == (400, "context_length_exceeded")
        assert response.json()["error"]["param"] == "messages"
        response = await client.post(path, json=said(long, truncation="auto"))
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] > 300
        assert usage["holdfast"]["dropped_tokens"] > 40
    response = await client.post("/v1/completions", json={"prompt": long})
    assert refusal_of(response) == (400, "context_length_exceeded")


async def test_what_leaves_a_sessions_window_is_reported_three_times_over(client: httpx.AsyncClient) -> None:
    session = await open_session(client, pin_tokens=4)
    texts, dropped = [], 0
    for turn in range(6):
        texts.append(f"turn {turn} " + "word " * 60)
        response = await client.post(chat_path(session), json=said(*texts))
        body = response.json()
        texts.append(body["choices"][0]["message"]["content"])
        told, shown = body["usage"]["holdfast"], (await client.get(f"/sessions/{session}")).json()
        assert response.headers["holdfast-dropped-tokens"] == str(told["dropped_tokens"])
        assert shown["dropped_tokens"] == told["dropped_tokens"] == max(0, shown["history_length"] - 4 - 256)
        assert shown["dropped_range"] == ([4, 4 + shown["dropped_tokens"]] if shown["dropped_tokens"] else None)
        assert shown["turns"] == turn + 1
        assert shown["messages"][-1]["content"] == texts[-1]
        dropped = told["dropped_tokens"]
    assert dropped > 100


async def test_a_session_pins_its_system_prompt_and_tools_as_far_as_it_may(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    system = {"role": "system", "content": "Be brief."}
    body = said("hi")
    await client.post(chat_path(session), json=body | {"messages": [system, *body["messages"]]})
    small = (await client.get(f"/sessions/{session}")).json()["window"]["sink"]
    assert 4 < small < 64
    other = await open_session(client)
    system["content"] *= 100
    await client.post(chat_path(other), json=body | {"messages": [system, *body["messages"]], "truncation": "auto"})
    assert (await client.get(f"/sessions/{other}")).json()["window"]["sink"] == 64


# SGLang's extensions


async def test_input_ids_are_taken_instead_of_the_messages(client: httpx.AsyncClient) -> None:
    messages = said("hi")["messages"]
    ids = default_chat().model.continuation.first(messages).ids
    rendered = (await client.post(CHAT, json=said("hi", return_meta_info=True))).json()
    given = (await client.post(CHAT, json=said("something else", input_ids=ids, return_meta_info=True))).json()
    assert given["usage"]["prompt_tokens"] == len(ids) == rendered["usage"]["prompt_tokens"]
    assert given["choices"][0]["message"] == rendered["choices"][0]["message"]


async def test_meta_info_has_every_token_with_its_sampling_logprob(client: httpx.AsyncClient) -> None:
    tokenizer = default_chat().model.tokenizer
    session = await open_session(client)
    for path in (CHAT, chat_path(session)):
        body = (await client.post(path, json=said("hi", return_meta_info=True, logprobs=True, temperature=0.5))).json()
        (choice,) = body["choices"]
        meta = choice["meta_info"]
        entries = meta["output_token_logprobs"]
        assert len(entries) == meta["completion_tokens"] == 4
        assert all(logprob <= 0 and math.isfinite(logprob) for logprob, _, _ in entries)
        assert tokenizer.decode([token for _, token, _ in entries]) == choice["message"]["content"]
        assert meta["finish_reason"]["type"] == "length"
        raw = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert raw != [logprob for logprob, _, _ in entries]
    async with client.stream("POST", CHAT, json=said("hi", return_meta_info=True, stream=True)) as response:
        events = [event async for event in events_of(response)]
    assert len(events[-2]["choices"][0]["meta_info"]["output_token_logprobs"]) == 4
    assert "meta_info" not in (await client.post(CHAT, json=said("hi"))).json()["choices"][0]


async def test_text_offsets_go_on_from_chunk_to_chunk(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 6, "seed": 1, "logprobs": 1}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        events = [event async for event in events_of(response)]
    parts = [event["choices"][0]["logprobs"] for event in events[:-2]]
    assert [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"]
    assert whole["text_offset"][0] == 0
    assert whole["text_offset"][-1] == sum(map(len, whole["tokens"][:-1]))


# Streams that go wrong, and going away


class FailingEngine(SlowEngine):
    """Computes NaN from the `fails_at`-th forward on."""

    fails_at = 8

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        logits = super().forward(rows)
        return logits * np.nan if self.num_forwards >= self.fails_at else logits


@contextlib.asynccontextmanager
async def failing(fails_at: int) -> AsyncIterator[httpx.AsyncClient]:
    shaped = wordy_engine()
    engine = FailingEngine(shape=shaped.shape, vocab_size=shaped.info.vocab_size, forward_s=0)
    engine.fails_at = fails_at
    async with serving(engine, default_chat()) as server, client_of(server) as client:
        yield client


async def test_an_error_in_mid_stream_is_an_event_and_then_the_stream_ends() -> None:
    async with failing(5) as client:
        session = await open_session(client)
        for path in (chat_path(session), CHAT):
            async with client.stream("POST", path, json=said("hi", stream=True, max_tokens=50)) as response:
                if path == CHAT:  # fails from the first token on: there is a status for it
                    await response.aread()
                    assert refusal_of(response) == (500, "session_failed")
                    break
                assert response.status_code == 200
                events = [event async for event in events_of(response)]
            assert events[-1]["error"]["code"] == "session_failed"
            assert events[-1]["error"]["type"] == "api_error"
            assert text_of(events)
        assert (await client.get(f"/sessions/{session}")).json()["state"] == "failed"


async def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    async with failing(1) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json=said("hi", stream=stream))
            assert refusal_of(response) == (500, "session_failed")


async def test_readiness_ends_with_draining_while_what_runs_may_end() -> None:
    leaving, engine = contextlib.AsyncExitStack(), wordy_engine()
    server = await leaving.enter_async_context(serving(engine, default_chat(), drain_s=60))
    async with client_of(server) as client:
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        session = await open_session(client)
        async with client.stream("POST", CHAT, json=said("hi", stream=True, max_tokens=150)) as response:
            events = events_of(response)
            await anext(events)
            with held(engine):
                closing = asyncio.create_task(leaving.aclose())
                ready = await eventually(lambda: client.get("/readyz"), lambda answer: answer.status_code != 200)
                assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
                assert (await client.get("/health")).status_code == 200
                for path in (CHAT, chat_path(session)):
                    refused = await client.post(path, json=said("hi"))
                    assert refusal_of(refused) == (503, "draining")
                    assert int(refused.headers["retry-after"]) > 0
            rest = [event async for event in events]
            assert rest[-1] == "[DONE]"
            assert rest[-2]["choices"][0]["finish_reason"] == "length"
        await closing


# The document


async def test_the_openapi_document_has_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    for path, methods in document["paths"].items():
        for method in methods.keys() & {"get", "post", "put", "delete"}:
            names = dict.fromkeys(("session_id", "model", "response_id", "conversation_id"), "x")
            response = await client.request("TRACE", path.format(**names))
            assert response.status_code == 405
            assert method.upper() in response.headers["allow"].split(", ")
    schema = document["components"]["schemas"]["ChatCompletion"]
    assert {"messages", "stop", "seed", "response_format"} <= schema["properties"].keys()


async def test_the_openapi_document_describes_every_field_and_parameter() -> None:
    document = build()
    schemas = document["components"]["schemas"]
    fields = {
        f"{name}.{field}": about for name, schema in schemas.items() for field, about in schema["properties"].items()
    }
    assert len(fields) > 80
    assert [name for name, about in fields.items() if not about.get("description")] == []
    for path, item in document["paths"].items():
        operations = [item[method] for method in item.keys() & {"get", "post", "put", "delete"}]
        assert all(operation["summary"] for operation in operations)
        for parameter in [*item.get("parameters", []), *(p for o in operations for p in o.get("parameters", []))]:
            assert parameter.get("description"), f"{path}: {parameter['name']}"
    known = {field for schema in schemas.values() for field in schema["properties"]}
    assert {name.rpartition(".")[2] for name in DESCRIPTIONS} == known


async def test_the_root_says_what_is_where(client: httpx.AsyncClient) -> None:
    told = (await client.get("/")).json()
    assert (told["name"], told["version"]) == ("holdfast", __version__)
    for path in told["endpoints"].values():
        assert (await client.get("/v1/models" if path == "/v1" else path)).status_code == 200


async def test_a_model_is_found_by_its_name_alone_and_on_sessions(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    for prefix in ("", f"/sessions/{session}"):
        assert (await client.get(f"{prefix}/v1/models/test")).json()["id"] == "test"
        answer = await client.get(f"{prefix}/v1/models/org/other")
        assert refusal_of(answer) == (404, "model_not_found")
        assert "'test'" in error_of(answer)["message"]
    assert refusal_of(await client.get("/sessions/x/v1/models/test")) == (404, "session_not_found")


async def test_other_clients_are_served_while_a_long_text_is_read(client: httpx.AsyncClient, server: Server) -> None:
    assert isinstance(server.worker.engine, SlowEngine)
    before, started = server.worker.engine.num_forwards, time.perf_counter()
    text = said("some words " * 200_000, truncation="auto")  # otherwise it would not be read at all
    long = asyncio.create_task(client.post(CHAT, json=text, timeout=240))
    slowest = 0.0
    while server.worker.engine.num_forwards == before:
        response = await client.get("/health")
        slowest = max(slowest, response.elapsed.total_seconds())
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    # where reading keeps the others waiting, one of them waits for nearly all of it
    assert slowest < (time.perf_counter() - started) / 3
    await until(lambda: server.worker.num_free_slabs == 4)


@pytest.mark.parametrize("size_kb", [100, 5 * 1024], ids=["window", "text"])
async def test_a_text_that_is_too_long_is_refused_by_its_size_before_it_is_tokenized(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, size_kb: int
) -> None:
    """A text has at least as many tokens as the longest token fits into it: 81 characters."""
    encoded: list[int] = []
    encode = Tokenizer._encode
    monkeypatch.setattr(Tokenizer, "_encode", lambda *given: encoded.append(len(given[2])) or encode(*given))
    session, long = await open_session(client), "some words " * (size_kb * 1024 // 11)
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    chats = [said(long), said("hi", "hello", long), said("hi", tools=[tool])]
    if size_kb > 1024:  # whatever the window is
        chats += [said(long, truncation="auto"), said("hi", chat_template_kwargs={"x": long})]
    for body in chats:
        for path in (CHAT, chat_path(session)):
            response = await client.post(path, json=body)
            assert refusal_of(response) == (400, "context_length_exceeded")
            assert response.json()["error"]["param"] == "messages"
    for prompt in (long, [long, "hi"], ["hi", long]):
        response = await client.post("/v1/completions", json={"prompt": prompt})
        assert refusal_of(response) == (400, "context_length_exceeded")
        assert response.json()["error"]["param"] == "prompt"
    assert max(encoded, default=0) < 1000


async def test_a_small_answer_does_not_wait_for_an_acknowledgement(client: httpx.AsyncClient) -> None:
    delays = [(await client.get("/health")).elapsed.total_seconds() for _ in range(10)]
    assert min(delays[2:]) < 0.03  # without TCP_NODELAY all but a connection's first take 0.04 or more


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


@pytest.mark.parametrize(
    ("path", "body", "refused"),
    [
        ("/sessions", b" " * (9 << 20), (413, "payload_too_large")),
        (CHAT, b'{"messages": [' + b"1," * 2_000_001, (400, "invalid_argument")),
        ("/v1/completions", b'{"prompt": [' + b"1," * 2_000_001, (400, "invalid_argument")),
    ],
)
async def test_a_body_that_would_block_the_event_loop_is_refused_before_it_is_decoded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes, refused: tuple[int, str]
) -> None:
    monkeypatch.setattr(bodies, "msgspec", None)
    assert refusal_of(await client.post(path, content=body)) == refused


# Web pages


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "["]
)
async def test_without_keys_a_name_that_is_not_ours_is_403(client: httpx.AsyncClient, host: str) -> None:
    for method, path in (("GET", "/sessions"), ("POST", "/control/pause"), ("GET", "/metrics"), ("GET", "/")):
        assert refusal_of(await client.request(method, path, headers={"host": host})) == (403, "forbidden")
    assert not (await client.post(CHAT, json=said("hi"))).is_error  # nothing was paused


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "app.localhost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.7:80"]
)
async def test_without_keys_localhost_and_addresses_are_answered(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", ""])
async def test_without_keys_a_page_that_is_not_allowed_is_403(client: httpx.AsyncClient, origin: str) -> None:
    for method, path in (("GET", "/sessions"), ("POST", "/control/pause"), ("POST", CHAT), ("OPTIONS", CHAT)):
        answer = await client.request(method, path, headers={"origin": origin})
        assert refusal_of(answer) == (403, "forbidden")
        assert "access-control-allow-origin" not in answer.headers


async def test_names_can_be_allowed_and_with_keys_or_insecure_all_are(tmp_path: Path) -> None:
    named = {"host": "llm.example:80"}
    for options in ({"allowed_hosts": "a.example, LLM.example"}, {"insecure": True}):
        async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
            assert (await client.get("/v1/models", headers=named)).status_code == 200
    async with guarded(tmp_path) as server, client_of(server, "key-a") as client:
        headers = named | {"origin": "https://evil.example"}
        answer = await client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_an_allowed_origin_may_ask_read_and_stream() -> None:
    origin = "http://localhost:3000"
    options = {"cors_origin": f"https://a.example, {origin}", "max_body_mb": 1}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked |= {"access-control-request-headers": "authorization,content-type,idempotency-key"}
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "idempotency-key" in preflight.headers["access-control-allow-headers"]
        session = await open_session(client)
        for path, body in (
            (CHAT, said("hi")),
            (CHAT, said("hi", stream=True)),
            (chat_path(session), said("hi")),
            (CHAT, []),
            ("/nothing", {}),
            (CHAT, said("x" * 2_000_000)),
        ):
            answer = await client.post(path, json=body, headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            ours = [
                name for name in answer.headers if name.startswith(("holdfast-", "x-", "retry-")) or name in DEPRECATION
            ]
            assert set(ours) - {"x-accel-buffering"} <= set(exposed)
        other = await client.options(CHAT, headers=asked | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert refusal_of(await client.post(CHAT, json=[], headers={"origin": "https://evil.example"}))[0] == 403


async def test_any_origin_may_be_allowed_only_with_keys(tmp_path: Path) -> None:
    for wrong, says in (("*", "needs --keys-file"), ("example.org", "is not an origin"), ("https://a/b", "is not an")):
        with pytest.raises(ConfigError, match=says):
            await serving(wordy_engine(), default_chat(), cors_origin=wrong).__aenter__()
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\n")
    options = {"keys_file": str(keys), "cors_origin": "*"}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://a.example"})
        assert refusal_of(answer) == (401, "unauthenticated")
        assert answer.headers["access-control-allow-origin"] == "*"


# Connections


async def connected(server: Server, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.http.rsplit(":", 1))
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def test_idle_connections_are_closed_for_new_ones_the_oldest_first() -> None:
    async with serving(wordy_engine(), default_chat(), max_connections=8) as server:
        idle = [await connected(server) for _ in range(20)]
        async with client_of(server) as client:
            assert (await client.get("/health")).status_code == 200
            shown = (await client.get("/metrics")).text
        assert [await reader.read() for reader, _ in idle[:13]] == [b""] * 13
        assert not any(reader.at_eof() for reader, _ in idle[13:])
        assert 'holdfast_http_connections_closed_total{reason="displaced"} 13.0' in shown
        assert "holdfast_http_connections 8.0" in shown
        for _, writer in idle:
            writer.close()


async def test_connections_with_a_request_stay_and_whoever_comes_then_is_refused_at_once() -> None:
    engine = wordy_engine()
    options = {"max_connections": 2, "max_concurrent": 1}
    async with serving(engine, default_chat(), **options) as server, client_of(server) as client:
        body = json.dumps(said("hi", max_tokens=2)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with held(engine):
            busy = [await connected(server, head + body) for _ in range(2)]
            await until(lambda: server.metrics.registry.get_sample_value("holdfast_queue_depth") == 1)
            reader, writer = await connected(server)
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
            writer.close()
        for reader, writer in busy:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nhost: loc", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"]
)
async def test_a_connection_without_a_whole_request_is_closed_in_time(sent: bytes) -> None:
    async with serving(wordy_engine(), default_chat(), connection_timeout_s=0.05) as server:
        reader, writer = await connected(server, sent)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 OK") if sent.endswith(b"\r\n\r\n") else not answer
        writer.close()


async def test_headers_that_trickle_in_do_not_buy_time() -> None:
    async with serving(wordy_engine(), default_chat(), connection_timeout_s=0.1) as server:
        reader, writer = await connected(server, b"GET /health HTTP/1.1\r\n")
        trickling = asyncio.create_task(_trickle(writer, b"a"))
        assert await asyncio.wait_for(reader.read(), 20) == b""
        trickling.cancel()
        writer.close()


async def _trickle(writer: asyncio.StreamWriter, byte: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(byte)
            await writer.drain()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_trickling", [False, True])
async def test_a_body_that_stalls_or_trickles_in_is_408(is_trickling: bool) -> None:
    async with serving(wordy_engine(), default_chat(), connection_timeout_s=0.1) as server:
        head = b"POST /sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n{"
        reader, writer = await connected(server, head)
        trickling = asyncio.create_task(_trickle(writer, b" ")) if is_trickling else None
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in await asyncio.wait_for(reader.read(), 20)
        if trickling:
            trickling.cancel()
        writer.close()


async def test_a_body_that_keeps_arriving_may_take_longer_than_a_stall() -> None:
    async with serving(wordy_engine(), default_chat(), connection_timeout_s=0.2) as server, client_of(server) as client:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 8192
                await asyncio.sleep(0.04)
            yield b"{}"

        assert (await client.post("/sessions", content=chunks())).status_code == 200


@pytest.mark.parametrize(("num_bytes", "is_aside"), [(1000, False), (400_000, True)], ids=["small", "large"])
async def test_a_large_body_is_decoded_once_and_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_aside: bool
) -> None:
    threads: list[threading.Thread] = []

    def watched(work: Any) -> Any:
        return lambda *given, **options: (threads.append(threading.current_thread()), work(*given, **options))[1]

    monkeypatch.setattr(bodies.msgspec, "convert", watched(msgspec.convert))
    monkeypatch.setattr(bodies, "read_messages", watched(bodies.read_messages))
    session = await open_session(client)
    for path in (CHAT, chat_path(session)):
        threads.clear()
        await client.post(path, json=said("x" * num_bytes))
        assert [thread is not threading.current_thread() for thread in threads] == [is_aside, is_aside]
