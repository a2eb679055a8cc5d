"""Bodies and texts that are large, or too large, keep nobody waiting."""

import asyncio
import contextlib
import json
import logging
import threading
import time
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.chat.tokenizer import Tokenizer
from holdfast.serving.http import bodies
from tests.http_endpoint.shared import CHAT
from tests.serving import Server, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, refusal_of, said, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
