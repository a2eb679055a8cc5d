"""Headers of the HTTP endpoint: deprecation, request ids, streams, HEAD."""

import httpx
import pytest

from tests.http_endpoint.shared import CHAT, DEPRECATION
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, events_of, open_session, said, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
