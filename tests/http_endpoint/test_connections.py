"""Connections to the HTTP endpoint: how many, how long without a request, and how slow."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.http_endpoint.shared import CHAT
from tests.serving import Server, default_chat, held, serving, wordy_engine
from tests.talking import client_of, said, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_small_answer_does_not_wait_for_an_acknowledgement(client: httpx.AsyncClient) -> None:
    delays = [(await client.get("/health")).elapsed.total_seconds() for _ in range(10)]
    assert min(delays[2:]) < 0.03  # without TCP_NODELAY all but a connection's first take 0.04 or more


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
