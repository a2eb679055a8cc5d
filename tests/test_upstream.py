"""Upstream backends against fakes on real sockets: what goes out, what comes back, and everything that can fail."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.backends import transport as transports
from holdfast.backends.passthrough import client_headers, match_route, parse_routes
from holdfast.backends.probe import probe
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.transport import Transport
from holdfast.backends.upstream import DecodeQueue, UpstreamBackend, upstream_model_info
from holdfast.bench.relay_server import ThreadedQueue
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    CapacityExhausted,
    ConfigError,
    HoldfastError,
    InvalidArgument,
    UpstreamAborted,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnavailable,
    UpstreamUnreachable,
)
from holdfast.generation import Event, Sampled
from holdfast.metrics import Metrics
from holdfast.serving.http.error_response import response_for
from holdfast.sessions.ports import LogprobKind, UpstreamReply
from holdfast.sessions.runtime import Runtime
from holdfast.testing.fake_servers import FakeSGLang, FakeVLLM
from holdfast.testing.fake_upstream import FakeModel, FakeUpstream, Fault, flat_rows
from tests.upstream_cases import MESSAGES, greedy, sglang, vllm

PROMPT = [5, 9, 33, 7]
Pair = tuple[UpstreamBackend, FakeUpstream]


async def chat(backend: UpstreamBackend, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    return await backend.complete(body, PROMPT, session_id="session-1")


@pytest.fixture(params=[sglang, vllm], ids=["sglang", "vllm"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with request.param(upstream_timeout_s=5.0, max_upstream_mb=1) as opened:
        yield opened


# What goes out


async def test_sglang_gets_the_forced_fields_and_the_routing_key() -> None:
    async with sglang(upstream_key="secret", upstream_extra='{"lora_path": "a", "temperature": 0.3}') as (
        backend,
        fake,
    ):
        reply = await chat(backend, temperature=1.0, stream=True, tools=None)
        seen = fake.chats()[0]
        assert seen.json == reply.request
        assert seen.json == {
            "messages": MESSAGES,
            "max_tokens": 4,
            "tools": None,
            "temperature": 0.3,
            "lora_path": "a",
            "input_ids": PROMPT,
            "logprobs": True,
            "return_meta_info": True,
            "no_stop_trim": False,
        }
        headers = {name.lower(): value for name, value in seen.headers.items()}
        assert headers["x-smg-routing-key"] == "session-1"
        assert headers["authorization"] == "Bearer secret"
        assert headers["accept-encoding"] == "identity"


async def test_vllm_gets_the_forced_fields() -> None:
    async with vllm() as (backend, fake):
        await chat(backend, top_logprobs=3)
        await chat(backend)
        forced = {
            "kv_transfer_params": {"prompt_token_ids": PROMPT},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": True,
        }
        first, second = (seen.json for seen in fake.chats())
        assert first == {"messages": MESSAGES, "max_tokens": 4, "top_logprobs": 3, **forced}
        assert second == {"messages": MESSAGES, "max_tokens": 4, "top_logprobs": 0, **forced}


def said(reply: UpstreamReply) -> Any:
    """The routed experts, where they are told to stand."""
    assert reply.completion is not None
    assert reply.completion.routed_experts is not None
    return json.loads(reply.received[slice(*reply.completion.routed_experts)])


@pytest.mark.parametrize(("replay", "start"), [("full", 0), ("additional", 3)])
async def test_routing_replay_asks_for_experts_and_cuts_them_from_the_clients_copy(replay: str, start: int) -> None:
    fake = FakeSGLang(routed_experts=lambda num_rows: flat_rows(num_rows, 1000))
    async with sglang(fake, routing_replay=replay) as (backend, _):
        body = {"messages": MESSAGES, "max_tokens": 4}
        reply = await backend.complete(body, PROMPT, session_id="s", known={"routed_experts": 3})
        assert fake.chats()[0].json["routed_experts_start_len"] == start
        assert reply.completion is not None
        assert said(reply) == flat_rows(len(PROMPT) + reply.completion.completion_tokens - 1 - start, 1000)
        assert b"routed_experts" in reply.received
        assert b"routed_experts" not in reply.body
        expected = json.loads(reply.received)
        del expected["choices"][0]["meta_info"]["routed_experts"], expected["sglext"]["routed_experts"]
        assert json.loads(reply.body) == expected


async def test_payloads_stay_where_they_are_kept_or_the_client_asked_itself() -> None:
    fake = FakeSGLang(routed_experts=lambda num_rows: [[1, 2]] * num_rows)
    async with sglang(fake, routing_replay="full", keep_training_payloads=True) as (backend, _):
        reply = await chat(backend)
        assert reply.body is reply.received
        assert said(reply) == [[1, 2]] * (len(PROMPT) + reply.completion.completion_tokens - 1)
    async with sglang(FakeSGLang(routed_experts="AAAA")) as (backend, _):
        reply = await chat(backend, return_routed_experts=True)
        assert b"AAAA" in reply.body
        assert reply.completion.routed_experts is None


async def test_vllms_routed_experts_are_recorded_and_cut() -> None:
    async with vllm(FakeVLLM(routed_experts=flat_rows), routing_replay="full") as (backend, _):
        reply = await chat(backend)
        assert said(reply) == flat_rows(len(PROMPT) + reply.completion.completion_tokens - 1)
        assert b"AAAA" not in reply.body


# What comes back


async def test_the_clients_copy_is_the_upstreams_bytes(pair: Pair) -> None:
    backend, fake = pair
    fake.faults.append(Fault(edit=lambda reply: reply.update(odd="  \u20ac ")))
    reply = await chat(backend)
    assert reply.body is reply.received
    assert json.loads(reply.body)["odd"] == "  \u20ac "
    assert set(reply.headers) == {"content-type"}


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_an_error_passes_through_unrecorded(pair: Pair, status: int) -> None:
    backend, fake = pair
    headers = {"content-type": "text/odd", "retry-after": "3", "location": "http://127.0.0.1:1/", "x-dup": "1"}
    fake.faults.append(Fault(status=status, body=b"\xff not json", headers=headers))
    reply = await chat(backend)
    assert (reply.status, reply.body, reply.completion) == (status, b"\xff not json", None)
    assert reply.headers == {"content-type": "text/odd", "retry-after": "3", "x-dup": "1"}
    assert len(fake.chats()) == 1


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(body=b"<html>"), UpstreamInvalid),
        (Fault(body=b""), UpstreamInvalid),
        (Fault(status=307), UpstreamInvalid),
        (Fault(edit=lambda reply: reply["choices"].clear()), UpstreamInvalid),
        (Fault(edit=lambda reply: reply["choices"][0].update(finish_reason="abort")), UpstreamAborted),
        (Fault(edit=lambda reply: reply["usage"].clear() or reply["choices"][0].pop("meta_info", 0)), UpstreamInvalid),
        (Fault(body=b'{"choices": "' + b"x" * (2 << 20) + b'"}'), UpstreamInvalid),
        (Fault(drops="before"), UpstreamUnreachable),
        (Fault(drops="middle"), UpstreamUnreachable),
        (Fault(headers={"content-encoding": "gzip"}), UpstreamUnreachable),
        (Fault(is_hanging=True), UpstreamTimeout),
    ],
    ids=lambda value: None if isinstance(value, Fault) else value.__name__,
)
async def test_each_failure_has_its_own_error_and_the_next_chat_works(
    request: pytest.FixtureRequest, fault: Fault, error: type[HoldfastError]
) -> None:
    for opened in (sglang, vllm):
        async with opened(upstream_timeout_s=0.3, max_upstream_mb=1) as (backend, fake):
            fake.faults.append(fault)
            with pytest.raises(error):
                await chat(backend)
            assert (await chat(backend)).completion is not None
            await idle(fake)


async def test_a_reply_to_another_prompt_is_refused() -> None:
    fake = FakeVLLM()
    fake.honours_ids = False
    async with vllm(fake) as (backend, _):
        with pytest.raises(UpstreamInvalid, match="not the ones that were sent"):
            await chat(backend)
        with pytest.raises(UpstreamInvalid, match="not the ones that were sent"):
            await probe(backend)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    config = UpstreamConfig(upstream=url, upstream_wait_s=0.0)
    backend = SGLangBackend(config, upstream_model_info(name="m", vocab_size=64))
    with pytest.raises(UpstreamUnavailable):
        await chat(backend)
    with pytest.raises(UpstreamUnreachable):
        await probe(backend)
    await backend.aclose()


async def test_something_that_speaks_no_http_is_invalid() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"220 mail.example.com ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backend = SGLangBackend(UpstreamConfig(upstream=url), upstream_model_info(name="m", vocab_size=64))
        with pytest.raises(UpstreamInvalid, match="HTTP"):
            await chat(backend)
        await backend.aclose()


async def test_cancelling_a_chat_closes_the_upstream_request(pair: Pair) -> None:
    backend, fake = pair
    fake.faults.append(Fault(is_hanging=True))
    task = asyncio.ensure_future(chat(backend))
    await running(fake)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(fake)
    assert fake.num_left == 1


async def test_no_more_connections_than_allowed() -> None:
    async with sglang(upstream_connections=2) as (backend, fake):
        fake.faults.extend([Fault(is_hanging=True)] * 2)
        tasks = [asyncio.ensure_future(chat(backend)) for _ in range(3)]
        while len(fake.requests) < 2:
            await asyncio.sleep(0)
        assert fake.num_running == 2
        tasks[0].cancel()
        assert (await tasks[2]).completion is not None
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(fake)
        fake.delay_s, fake.most_running = 0.005, 0
        await asyncio.gather(*(chat(backend) for _ in range(8)))
        assert fake.most_running == 2


async def test_every_outcome_is_counted() -> None:
    metrics = Metrics()
    async with FakeSGLang() as fake:
        model = upstream_model_info(name="m", vocab_size=64)
        backend = SGLangBackend(UpstreamConfig(upstream=fake.url), model, metrics=metrics)
        fake.faults.extend([Fault(), Fault(status=500, body=b""), Fault(body=b"x")])
        await chat(backend)
        await chat(backend)
        with pytest.raises(UpstreamInvalid):
            await chat(backend)
        await backend.aclose()
    (family,) = metrics.upstream_requests.collect()
    counted = {one.labels["outcome"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert counted == {"200": 1, "500": 1, "upstream_invalid": 1}


# Start-up


async def test_a_stated_logprob_kind_must_be_what_is_seen() -> None:
    for kind, stated, found in (
        ("raw", "auto", LogprobKind.RAW),
        ("sampling", "auto", LogprobKind.SAMPLING),
        ("raw", "raw", LogprobKind.RAW),
        ("raw", "unknown", LogprobKind.UNKNOWN),
    ):
        for opened, fake in (
            (sglang, FakeSGLang(FakeModel(logprob_kind=kind))),
            (vllm, FakeVLLM(FakeModel(logprob_kind=kind))),
        ):
            async with opened(fake, logprob_kind=stated) as (backend, _):  # type: ignore[operator]
                assert (await probe(backend)).logprob_kind is found
                assert (await chat(backend)).completion.logprob_kind is found
    async with sglang(FakeSGLang(FakeModel(logprob_kind="raw")), logprob_kind="sampling") as (backend, _):
        with pytest.raises(ConfigError, match="returns raw logprobs"):
            await probe(backend)


async def test_a_server_that_renders_its_own_prompt_fails_the_probe() -> None:
    async with sglang() as (backend, fake):
        fake.faults.extend(
            [Fault(), Fault(edit=lambda reply: reply["choices"][0]["meta_info"].update(prompt_tokens=9))]
        )
        with pytest.raises(UpstreamInvalid, match="ignores our token ids"):
            await probe(backend)


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        ([Fault(status=500, body=b"")], UpstreamInvalid),
        ([Fault(edit=lambda reply: {"data": []})], UpstreamInvalid),
        ([Fault(body=b"[]")], UpstreamInvalid),
        ([Fault(), Fault(status=503, body=b"")], UpstreamAborted),
        ([Fault(), Fault(status=401, body=b"")], UpstreamInvalid),
    ],
)
async def test_an_upstream_that_cannot_be_used_fails_the_probe(faults: list[Fault], error: type[HoldfastError]) -> None:
    for opened in (sglang, vllm):
        async with opened() as (backend, fake):
            fake.faults.extend(faults)
            with pytest.raises(error):
                await probe(backend)


@pytest.mark.parametrize("fault", [Fault(status=404, body=b""), Fault(status=400, body=b""), Fault(body=b"{}")])
async def test_where_logprobs_cannot_be_compared_their_kind_is_unknown(pair: Pair, fault: Fault) -> None:
    backend, fake = pair
    fake.faults.extend([Fault(), Fault(), fault])
    assert (await probe(backend)).logprob_kind is LogprobKind.UNKNOWN
    empty = {"meta_info": {"output_top_logprobs": []}, "choices": [{"logprobs": {"top_logprobs": [{}]}}]}
    fake.faults.extend([Fault(), Fault(), Fault(edit=lambda reply: empty)])
    assert (await probe(backend)).logprob_kind is LogprobKind.UNKNOWN


async def test_what_json_cannot_say_is_never_sent(pair: Pair) -> None:
    backend, fake = pair
    for value in (object(), {(1, 2): 3}, "\ud800"):
        with pytest.raises(InvalidArgument, match="as JSON"):
            await chat(backend, stop=value)
    assert not fake.requests


async def test_a_full_backend_opens_no_more() -> None:
    backend = SGLangBackend(
        UpstreamConfig(upstream="http://x"), upstream_model_info(name="m", vocab_size=64), capacity=1
    )
    handle = await backend.open(sink=0)
    await backend.pin(handle, 3)
    with pytest.raises(CapacityExhausted):
        await backend.open(sink=0)
    with pytest.raises(InvalidArgument, match="rewind"):
        await backend.rewind(handle, 1)
    assert await backend.close(handle) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"upstream": ""},
        {"upstream": "http://[::1"},
        {"upstream": "localhost:30000"},
        {"upstream": "ftp://x"},
        {"upstream": "http://x", "upstream_extra": "[]"},
        {"upstream": "http://x", "upstream_extra": "{"},
        {"upstream": "http://x", "forward_fields": "a b"},
        {"upstream": "http://x", "forward_fields": "input_ids"},
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SGLangBackend(UpstreamConfig(**options), upstream_model_info(name="m", vocab_size=64))


# Streams


def aborted(event: dict[str, Any]) -> None:
    if "meta_info" in event:
        event["meta_info"]["finish_reason"] = {"type": "abort", "message": "no memory"}
    for choice in event.get("choices", []):
        choice["finish_reason"] = "abort"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=500, body=b"boom"), UpstreamInvalid),
        (Fault(status=503, body=b"busy"), UpstreamAborted),
        (Fault(status=422, body=b"bad"), InvalidArgument),
        (Fault(drops="before"), UpstreamUnreachable),
        (Fault(is_hanging=True), UpstreamTimeout),
        (Fault(ends_after=0), UpstreamUnreachable),
        (Fault(edit=lambda event: {"error": {"message": "out of memory", "code": 500}}), UpstreamInvalid),
        (Fault(edit=lambda event: {"nothing": 1}), UpstreamInvalid),
        (Fault(edit=lambda event: {"choices": event.get("choices", []) * 2}), UpstreamInvalid),
        (Fault(edit=aborted), UpstreamAborted),
    ],
)
async def test_a_stream_that_fails_before_its_first_token_leaves_the_session_as_it_was(
    fault: Fault, error: type[HoldfastError]
) -> None:
    for opened in (sglang, vllm):
        async with opened(upstream_timeout_s=0.3) as (backend, fake):
            runtime = Runtime(backend)
            session = await runtime.create("owner", tokens=PROMPT)
            fake.faults.append(fault)
            with pytest.raises(error):
                await collected(runtime, session.session_id, tokens=[1, 2])
            assert runtime.info(session.session_id, "owner").history_length == len(PROMPT)
            events = await collected(runtime, session.session_id, tokens=[1, 2])
            assert len(events) == 9
            assert runtime.info(session.session_id, "owner").history_length == len(PROMPT) + 2 + 8
            await idle(fake)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(drops="middle", ends_after=3), UpstreamUnreachable),
        (Fault(is_hanging=True, ends_after=3), UpstreamTimeout),
        (Fault(ends_after=3), UpstreamUnreachable),
    ],
)
async def test_a_stream_that_fails_later_keeps_what_was_sampled(fault: Fault, error: type[HoldfastError]) -> None:
    for opened in (sglang, vllm):
        async with opened(upstream_timeout_s=0.3) as (backend, fake):
            runtime = Runtime(backend)
            session = await runtime.create("owner", tokens=PROMPT)
            fake.faults.append(fault)
            with pytest.raises(error):
                await collected(runtime, session.session_id)
            info = runtime.info(session.session_id, "owner")
            assert 1 <= info.sampled[1] <= 3
            assert info.history_length == len(PROMPT) + info.sampled[1]
            assert info.kv_live_bytes is None
            await collected(runtime, session.session_id)


@pytest.mark.parametrize(
    ("told", "seconds"), [({"retry-after": "7"}, 7), ({"retry-after": "Fri, 31 Dec 2027 23:59:59 GMT"}, 1), ({}, 1)]
)
async def test_when_to_retry_is_told_as_the_upstream_says_it(pair: Pair, told: dict[str, str], seconds: int) -> None:
    backend, fake = pair
    fake.faults.append(Fault(status=503, body=b"busy", headers=told))
    runtime = Runtime(backend)
    session = await runtime.create("owner", tokens=PROMPT)
    with pytest.raises(UpstreamAborted) as caught:
        await collected(runtime, session.session_id)
    response = response_for(caught.value)
    assert response.status_code == 503
    assert response.headers["retry-after"] == str(seconds)
    assert json.loads(response.body)["error"]["retry_after_s"] == str(seconds)


async def test_a_caller_who_leaves_closes_the_upstream_stream(pair: Pair) -> None:
    backend, fake = pair
    fake.delay_s = 0.002
    runtime = Runtime(backend)
    session = await runtime.create("owner", tokens=PROMPT)
    task = asyncio.ensure_future(collected(runtime, session.session_id, max_tokens=300))
    while runtime.info(session.session_id, "owner").history_length < len(PROMPT) + 5:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(fake)
    info = runtime.info(session.session_id, "owner")
    assert not info.is_busy
    assert 5 <= info.sampled[1] < 300


async def test_an_event_beyond_the_limit_is_refused() -> None:
    async with sglang(max_upstream_mb=1) as (backend, fake):
        fake.faults.append(Fault(edit=lambda event: event.update(text="x" * (2 << 20))))
        handle = await backend.open(sink=0)
        stream = backend.generate(handle, greedy(), PROMPT)
        with pytest.raises(UpstreamInvalid, match="max_upstream_mb"):
            await stream.__aenter__()
        assert backend.view(handle).history_length == 0


@pytest.mark.parametrize("num_sampled", [17, 500])
async def test_an_upstream_that_ignores_max_tokens_is_cut_off(pair: Pair, num_sampled: int) -> None:
    backend, fake = pair
    fake.model.scripted.append([5] * num_sampled)
    runtime = Runtime(backend)
    session = await runtime.create("owner", tokens=PROMPT)
    with pytest.raises(UpstreamInvalid, match="at most 16 were requested"):
        await collected(runtime, session.session_id, max_tokens=16)
    info = runtime.info(session.session_id, "owner")
    assert (info.sampled[1], info.history_length) == (16, len(PROMPT) + 16)
    await idle(fake)
    assert len(await collected(runtime, session.session_id)) == 9


async def test_a_chat_that_ignores_max_tokens_is_refused(pair: Pair) -> None:
    backend, fake = pair
    for fields in ({"max_tokens": 4}, {"max_tokens": None, "max_completion_tokens": 4}):
        fake.model.scripted.append([5] * 5)
        with pytest.raises(UpstreamInvalid, match="at most 4 were requested"):
            await chat(backend, **fields)


def finished_early(event: dict[str, Any]) -> None:
    if "meta_info" in event:
        event["meta_info"]["finish_reason"] = {"type": "stop"}
    for choice in event.get("choices", []):
        choice["finish_reason"] = "stop"


def without_tokens(event: dict[str, Any]) -> None:
    finished_early(event)
    if "meta_info" in event:
        event["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": []}
    for choice in event.get("choices", []):
        choice |= {"token_ids": [], "logprobs": None}


@pytest.mark.parametrize("edit", [finished_early, without_tokens])
async def test_tokens_after_the_end_or_none_before_it_are_refused(pair: Pair, edit: Any) -> None:
    backend, fake = pair
    fake.faults.append(Fault(edit=edit))
    runtime = Runtime(backend)
    session = await runtime.create("owner", tokens=PROMPT)
    with pytest.raises(UpstreamInvalid, match="tokens"):
        await collected(runtime, session.session_id)
    assert runtime.info(session.session_id, "owner").sampled[1] == (edit is finished_early)


async def test_a_stream_that_never_ends_its_line_ends_at_the_size_limit() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * (1 << 16))
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backend = SGLangBackend(
            UpstreamConfig(upstream=url, max_upstream_mb=48, upstream_timeout_s=10),
            upstream_model_info(name="m", vocab_size=64),
        )
        stream = backend.generate(await backend.open(sink=0), greedy(), PROMPT)
        with pytest.raises(UpstreamInvalid, match="max_upstream_mb"):
            await stream.__aenter__()
        await backend.aclose()


async def test_a_connection_that_the_upstream_has_closed_is_not_used_again() -> None:
    """The upstream runs in a thread, and the loop stands still while it closes: only the socket can tell."""
    may_close, has_closed = threading.Event(), threading.Event()
    num_requests = 0

    def serve() -> None:
        nonlocal num_requests
        for is_first in (True, False):
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as file:
                length = 0
                while (line := file.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                file.read(length)
                num_requests += 1
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                if is_first:
                    may_close.wait(10)
            has_closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(UpstreamConfig(upstream=f"http://127.0.0.1:{listening.getsockname()[1]}"))
        assert (await transport.post("/x", {}, {})).status == 200
        may_close.set()
        has_closed.wait(10)
        assert (await transport.post("/x", {}, {})).status == 200
        thread.join(10)
        await transport.close()
    assert num_requests == 2


async def test_a_request_that_may_have_been_read_is_not_sent_again(pair: Pair) -> None:
    backend, fake = pair
    await chat(backend)  # leaves an idle connection
    fake.faults.append(Fault(drops="before"))
    with pytest.raises(UpstreamUnreachable):
        await chat(backend)
    assert len(fake.chats()) == 2


async def test_headers_that_http_cannot_carry_are_left_out() -> None:
    headers = [("x-odd", "a\x01b"), ("x-null", "a\x00"), ("bad name", "1"), ("x-del", "\x7f"), ("X-Fine", "\xe9\t1")]
    assert client_headers(headers) == {"x-fine": "\xe9\t1"}


async def collected(runtime: Runtime, session_id: str, *, tokens: Any = (), max_tokens: int = 8) -> list[Event]:
    events: list[Event] = []
    async for batch in runtime.generate(session_id, "owner", greedy(max_tokens), tokens=tokens):
        events += batch
    assert sum(isinstance(event, Sampled) for event in events) == len(events) - 1
    return events


# Passthrough


@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("GET", "v1/models", "/v1/models"),
        ("get", "/v1/models", "/v1/models"),
        ("GET", "v1/%6dodels", "/v1/models"),
        ("POST", "tokenize", "/tokenize"),
        ("POST", "detokenize", "/detokenize"),
        ("GET", "metrics", "/metrics"),
        ("POST", "v1/models", None),
        ("GET", "tokenize", None),
        ("POST", "update_weights", None),
        ("POST", "pause_generation", None),
        ("GET", "v1/models/", None),
        ("GET", "v1//models", None),
        ("GET", "//v1/models", None),
        ("GET", "v1/../v1/models", None),
        ("GET", "v1/%2e%2e/v1/models", None),
        ("GET", "v1%2fmodels", None),
        ("GET", "v1%2Fmodels", None),
        ("GET", "v1%5cmodels", None),
        ("GET", "v1\\models", None),
        ("GET", "v1/models%00", None),
        ("GET", "v1/models%0d%0aX:1", None),
        ("GET", "v1/models?x=1", None),
        ("GET", "v1/models%3fx", None),
        ("GET", "v1/%256dodels", None),
        ("GET", "v1/mod%C3%A9ls", None),
        ("GET", "", None),
        ("GET", "http://elsewhere/v1/models", None),
    ],
)
def test_only_listed_paths_are_open(method: str, path: str, target: str | None) -> None:
    routes = parse_routes("get:metrics, POST:/v1/score")
    assert match_route(routes, method, path) == target


@pytest.mark.parametrize("text", ["metrics", "GET:", "GET:a//b", "GET:../x", "GET:a b", "G ET:x", ":x"])
def test_a_route_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_routes(text)


async def test_forwarding_filters_headers_both_ways() -> None:
    async with FakeSGLang(FakeModel(encode=lambda text: list(text.encode()))) as fake:
        transport = Transport(UpstreamConfig(upstream=fake.url, upstream_key="ours"))
        fake.faults.append(Fault(headers={"x-kept": "1", "connection": "x-hop", "x-hop": "1", "server": "s"}))
        sent = {
            "Authorization": "Bearer theirs",
            "Cookie": "a=b",
            "X-Forwarded-For": "1.2.3.4",
            "Forwarded": "for=1",
            "Connection": "keep-alive, X-Secret",
            "X-Secret": "1",
            "Idempotency-Key": "k",
            "X-SMG-Routing-Key": "theirs",
            "Transfer-Encoding": "chunked",
            "Host": "elsewhere",
            "Accept-Encoding": "gzip",
            "Content-Type": "application/json",
            "X-Kept": "yes",
        }
        reply = await transports.forward(
            transport,
            "post",
            "/tokenize",
            query="a=%2F&b=1",
            headers=sent.items(),
            body=b'{"prompt": "ab"}',
            session_id="s",
        )
        await transport.close()
    assert (reply.status, json.loads(reply.body), reply.completion) == (200, {"tokens": [97, 98]}, None)
    assert reply.headers == {"content-type": "application/json", "x-kept": "1"}
    seen = {name.lower(): value for name, value in fake.requests[0].headers.items()}
    assert fake.requests[0].query == "a=%2F&b=1"
    assert seen.pop("host").startswith("127.0.0.1")
    assert seen == {
        "accept": "*/*",
        "accept-encoding": "identity",
        "user-agent": "holdfast",
        "authorization": "Bearer ours",
        "content-type": "application/json",
        "content-length": "16",
        "x-smg-routing-key": "s",
        "x-kept": "yes",
    }


# Decoding


async def test_large_bodies_are_decoded_one_a_pass_of_the_loop() -> None:
    queue = DecodeQueue(inline_bytes=10)
    order: list[str] = []

    async def ticking() -> None:
        while order.count("decoded") < 4:
            order.append("tick")
            await asyncio.sleep(0)

    work = [queue.decode(lambda: order.append("decoded"), 11) for _ in range(4)]
    await asyncio.gather(ticking(), *work)
    first, last = order.index("decoded"), len(order) - order[::-1].index("decoded")
    between = order[first:last]
    assert all(pair != ("decoded", "decoded") for pair in itertools.pairwise(between))
    assert await queue.decode(lambda: 5, 10) == 5


async def test_the_threads_of_the_bench_are_bounded_and_their_queue_can_be_cancelled() -> None:
    queue = ThreadedQueue(2)
    loop, gate = asyncio.get_running_loop(), asyncio.Event()
    started: list[int] = []

    def hold() -> None:
        started.append(1)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)

    tasks = [asyncio.ensure_future(queue.decode(hold, 0)) for _ in range(4)]
    while len(started) < 2:
        await asyncio.sleep(0.001)
    tasks[3].cancel()
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(started) == 3


async def test_a_backend_starts_and_stops_as_a_server_does_it() -> None:
    async with FakeSGLang() as fake:
        backend = SGLangBackend(UpstreamConfig(upstream=fake.url), upstream_model_info(name="m", vocab_size=64))
        backend.start()
        await chat(backend)
        assert backend.failure is None
        await asyncio.to_thread(backend.stop)


async def running(fake: FakeUpstream) -> None:
    async with asyncio.timeout(5):
        while not fake.num_running:
            await asyncio.sleep(0.001)


async def idle(fake: FakeUpstream) -> None:
    async with asyncio.timeout(5):
        while fake.num_running:
            await asyncio.sleep(0.001)
