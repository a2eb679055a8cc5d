"""Chats and the window: what is refused, truncated, dropped and pinned."""

import httpx
import pytest

from tests.http_endpoint.shared import CHAT
from tests.talking import chat_path, open_session, refusal_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
