"""Talking to the HTTP door: a client, the bodies that are sent most, and what an answer must look like."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx

from holdfast.serving.http.dialects import MESSAGES, dialect_of
from tests.serving import Server

T = TypeVar("T")


def client_of(server: Server, key: str = "") -> httpx.AsyncClient:
    """Plain HTTP only: a TLS context for each client would cost more than most tests do."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://{server.http}", headers=headers, timeout=20, verify=False)


def said(*texts: str, **options: Any) -> dict[str, Any]:
    """A chat request: user and assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": 4, "seed": 1} | options


async def open_session(client: httpx.AsyncClient, **fields: Any) -> str:
    response = await client.post("/sessions", json=fields)
    assert response.status_code == 200, response.text
    return str(response.json()["session_id"])


def chat_path(session: str) -> str:
    return f"/sessions/{session}/v1/chat/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response that must be one, in OpenAI's envelope or, on the paths of Messages, in Anthropic's."""
    assert response.status_code >= 400, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    error: dict[str, Any] = body["error"]
    if dialect_of(response.request.url.path) is MESSAGES:
        assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
        assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        assert {"type", "message"} <= set(error) <= {"type", "message", "details"}
    else:
        assert set(body) == {"error"}
        assert {"message", "type", "code", "param"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, error_of(response)["code"]


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a stream as they come, decoded; "[DONE]" as it is."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def as_events_text(text: str) -> list[Any]:
    """The events of a stream that has been read already."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait for something of which nobody tells."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


async def eventually(ask: Callable[[], Awaitable[T]], is_it: Callable[[T], bool], timeout_s: float = 60) -> T:
    """The first answer to `ask` that is what is waited for."""
    deadline = time.monotonic() + timeout_s
    while not is_it(answer := await ask()):
        assert time.monotonic() < deadline, f"it never came true; the last answer was {answer}"
        await asyncio.sleep(0.002)
    return answer
