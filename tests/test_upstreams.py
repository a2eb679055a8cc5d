"""Upstreams that come and go: gaps, aborted replies, several servers, and what of a request goes along to them."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from holdfast.backends.passthrough import carried_headers
from holdfast.backends.probe import ProbeReport, TokenSample, probe
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import UpstreamBackend, upstream_model_info
from holdfast.backends.vllm import VLLMBackend
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import decode
from holdfast.config import UpstreamConfig
from holdfast.errors import UpstreamInvalid
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.testing.fake_servers import FakeSGLang, FakeVLLM
from holdfast.testing.fake_upstream import FakeModel, FakeUpstream, Fault
from tests.chaos import UpstreamProcess, chaos
from tests.relaying import Relay, relaying
from tests.serving import default_chat
from tests.talking import as_events_text, chat_path, error_of, eventually, open_session, refusal_of, said, until

KINDS: dict[type[UpstreamBackend], type[FakeUpstream]] = {SGLangBackend: FakeSGLang, VLLMBackend: FakeVLLM}


def fake_model(name: str = "fake-model") -> FakeModel:
    tokenizer = default_chat().model.tokenizer
    size = tokenizer.inner.get_vocab_size()
    return FakeModel(name=name, vocab_size=size, decode=lambda ids: tokenizer.decode(list(ids), skip_special=True))


@contextlib.asynccontextmanager
async def relay_to(*urls: str, **options: Any) -> AsyncIterator[Relay]:
    async with relaying(",".join(urls), default_chat(), fake_model().vocab_size, **options) as relay:
        yield relay


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


async def is_ready(relay: Relay) -> bool:
    return (await relay.http.get("/readyz")).status_code == 200


def ids_sent(*fakes: FakeUpstream) -> list[list[int]]:
    """The prompts of all chats but those of probes."""
    keyed = [seen for fake in fakes for seen in fake.chats() if seen.headers["x-smg-routing-key"] != "holdfast-probe"]
    return [seen.json["input_ids"] for seen in keyed]


async def test_a_server_starts_before_its_upstream_and_is_ready_when_that_is() -> None:
    port = free_port()
    async with relay_to(f"http://127.0.0.1:{port}") as relay:
        session = await open_session(relay.http)
        not_ready = await relay.http.get("/readyz")
        assert (not_ready.status_code, not_ready.json()["status"]) == (
            503,
            "no upstream is ready: cannot connect to the upstream",
        )
        assert 'holdfast_upstream_ready{upstream="0"} 0.0' in (await relay.http.get("/metrics")).text
        waiting = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi")))
        async with FakeSGLang(fake_model(), port=port):
            assert (await waiting).status_code == 200
            assert await is_ready(relay)
            assert relay.backend.model.context == 4096  # as the upstream says, once it does
            assert (await relay.http.post("/v1/chat/completions", json=said("Hi"))).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_in_a_gap_wait_for_the_upstream_and_go_on_from_the_record(
    kind: type[UpstreamBackend],
) -> None:
    async with KINDS[kind](fake_model()) as first, relay_to(first.url, kind=kind) as relay:
        session = await open_session(relay.http)
        reply = (await relay.http.post(chat_path(session), json=said("Hi"))).json()["choices"][0]["message"]["content"]
        tokens = await token_session(relay)
        await first._runner.cleanup()
        body = said("Hi", reply, "More")
        waiting = asyncio.ensure_future(relay.http.post(chat_path(session), json=body))
        await until(lambda: relay.backend.not_ready is not None)
        call = relay.stub.Generate(pb.GenerateRequest(session_id=tokens, max_tokens=3))
        generating = asyncio.ensure_future(_read(call, []))
        async with KINDS[kind](fake_model(), port=first.port):
            assert (await waiting).status_code == 200
            assert 1 <= len(await generating) <= 3
        info = (await relay.http.get(f"/sessions/{session}")).json()
        assert (info["turns"], len(info["records"])) == (2, 2)


async def token_session(relay: Relay) -> str:
    return str((await relay.stub.CreateSession(pb.CreateSessionRequest(token_ids=[5, 6]))).session_id)


async def _read(call: Any, got: list[int]) -> list[int]:
    async for event in call:
        if event.HasField("token"):
            got.append(event.token.token_id)
    return got


async def test_a_gap_longer_than_the_wait_is_503_at_both_doors_and_records_nothing() -> None:
    async with relay_to(f"http://127.0.0.1:{free_port()}", upstream_wait_s=0.0) as relay:
        session = await open_session(relay.http)
        for path, body in (
            (chat_path(session), said("Hi")),
            ("/v1/chat/completions", said("Hi")),
            (f"/sessions/{session}/tokenize", {"prompt": "Hi"}),
        ):
            refused = await relay.http.post(path, json=body)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "upstream_unavailable")
            assert refused.headers["retry-after"] == "5"
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 0
        tokens = await token_session(relay)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read(relay.stub.Generate(pb.GenerateRequest(session_id=tokens, max_tokens=3)), [])
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no upstream is ready" in (caught.value.details() or "")


@pytest.mark.parametrize("change", ["model", "tokenizer", "logprobs"])
async def test_another_model_after_a_gap_is_not_used_until_the_first_is_back(change: str) -> None:
    async with FakeSGLang(fake_model()) as first, relay_to(first.url, upstream_wait_s=0.0) as relay:
        relay.backend.sample = TokenSample("first", "some text", (7, 8))
        session = await open_session(relay.http)
        await first._runner.cleanup()
        assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 503
        other = fake_model("other" if change == "model" else "fake-model")
        if change == "tokenizer":
            other.encode = lambda text: [8, 7]
        if change == "logprobs":
            other.logprob_kind = "sampling"
        expected = {"model": "serves 'other'", "tokenizer": "not that of 'first'", "logprobs": "another kind"}[change]
        async with FakeSGLang(other, port=first.port) as fake:
            await until(lambda: expected in (relay.backend.not_ready or ""))
            assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 503
            assert ids_sent(fake) == []
        async with FakeSGLang(fake_model(), port=first.port):
            await until(lambda: relay.backend.not_ready is None)
            assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 200


async def test_of_two_models_that_are_probed_at_once_one_is_used() -> None:
    async with FakeSGLang(fake_model("one")) as one, FakeSGLang(fake_model("two")) as two:
        config = UpstreamConfig(upstream=f"{one.url},{two.url}")
        backend = SGLangBackend(config, upstream_model_info(name="m", vocab_size=fake_model().vocab_size))
        found = await asyncio.gather(
            *(probe(backend, server) for server in backend.servers.all), return_exceptions=True
        )
        (refused,) = [error for error in found if isinstance(error, UpstreamInvalid)]
        (used,) = [report for report in found if isinstance(report, ProbeReport)]
        assert used.model in str(refused)
        assert backend.known_model == used.model
        await backend.aclose()


@pytest.mark.parametrize(("error", "in_gap"), [(503, 200), (500, 502)])
async def test_an_error_counts_as_a_gap_only_where_the_health_check_fails_too(error: int, in_gap: int) -> None:
    async with FakeSGLang(fake_model()) as fake, relay_to(fake.url) as relay:
        session = await open_session(relay.http)
        for health, status in ((200, error), (404, error), (503, in_gap)):
            fake.health_status = health
            fake.faults.append(Fault(status=error, body=b"the engine is dead"))
            answer = await relay.http.post(chat_path(session), json=said("Hi"))
            assert (health, answer.status_code) == (health, status)
        assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 200


def aborted(reply: dict[str, Any]) -> None:
    for choice in reply.get("choices", []):
        choice["finish_reason"] = "abort"
        if "meta_info" in choice:
            choice["meta_info"]["finish_reason"] = {"type": "abort", "message": "weights are updated"}


async def test_an_aborted_or_cut_reply_is_sent_again_with_the_same_ids_and_recorded_once() -> None:
    async with FakeSGLang(fake_model()) as fake, relay_to(fake.url, retry_aborted=2) as relay:
        session = await open_session(relay.http)
        fake.faults.extend([Fault(edit=aborted), Fault(drops="middle")])
        assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 200
        first, second, third = ids_sent(fake)
        assert first == second == third
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 1
        told = (await relay.http.get("/metrics")).text
        assert 'holdfast_upstream_sent_again_total{reason="upstream_aborted"} 1.0' in told
        fake.faults.extend([Fault(edit=aborted)] * 3)
        refused = await relay.http.post(chat_path(session), json=said("Hello"))
        assert refusal_of(refused) == (503, "upstream_aborted")
        assert refused.headers["retry-after"]
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 1
        fake.faults.append(Fault(edit=aborted))
        streamed = await relay.http.post(chat_path(session), json=said("Hello", stream=True))
        assert as_events_text(streamed.text)[-1] == "[DONE]"
        fake.faults.append(Fault(edit=aborted))
        assert (await relay.backend.complete(said("Hi"), [1, 2], session_id="s")).num_aborted == 1


def ends_aborted(event: dict[str, Any]) -> None:
    if event["meta_info"]["completion_tokens"] > 2:
        event["meta_info"]["finish_reason"] = {"type": "abort", "message": "weights are updated"}


def begins_aborted(event: dict[str, Any]) -> None:
    event["meta_info"]["finish_reason"] = {"type": "abort"}


async def test_a_token_stream_is_begun_again_but_never_continued_in_silence() -> None:
    async with FakeSGLang(fake_model()) as fake, relay_to(fake.url, retry_aborted=1) as relay:
        session = await token_session(relay)
        request = pb.GenerateRequest(session_id=session, max_tokens=5)
        fake.faults.append(Fault(edit=begins_aborted))
        assert len(await _read(relay.stub.Generate(request), [])) == 5
        fake.faults.append(Fault(edit=ends_aborted))
        got: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read(relay.stub.Generate(request), got)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        history = [chunk async for chunk in relay.stub.GetHistory(pb.GetHistoryRequest(session_id=session))]
        tokens = [token for chunk in history for token in chunk.token_ids]
        assert len(got) == 2
        assert (len(tokens), tokens[-2:]) == (2 + 5 + 2, got)  # what was given out stays, and nothing else


@pytest.mark.parametrize("kind", KINDS)
async def test_chats_from_token_ids_alone_never_use_the_chat_api_and_are_on_record_as_sampled(
    kind: type[UpstreamBackend],
) -> None:
    async with KINDS[kind](fake_model()) as fake, relay_to(fake.url, kind=kind, upstream_api="generate") as relay:
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi", temperature=0.5))
        reply = first.json()["choices"][0]["message"]["content"]
        streamed = await relay.http.post(chat_path(session), json=said("Hi", reply, "More", stream=True))
        assert as_events_text(streamed.text)[-1] == "[DONE]"
        assert fake.chats() == []
        prompts = [body.get("input_ids") or body.get("token_ids") for body in (s.json for s in fake.requests if s.body)]
        shown = (await relay.http.get(f"/sessions/{session}")).json()
        first_prompt, second_prompt = (record["request"]["input_ids"] for record in shown["records"])
        assert prompts[-2:] == [first_prompt, second_prompt]
        assert second_prompt[: len(first_prompt)] == first_prompt
        assert {record["logprob_kind"] for record in shown["records"]} == {fake.model.logprob_kind}
        samples = decode((await relay.http.post(f"/sessions/{session}/samples", json={})).content)
        assert problems(samples) == []
        asked = said("Hi", reply, "As JSON", response_format={"type": "json_object"})
        refused = await relay.http.post(chat_path(session), json=asked)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "response_format")


async def test_a_session_stays_with_one_of_several_moves_when_it_is_gone_and_comes_back() -> None:
    async with FakeSGLang(fake_model()) as one, FakeSGLang(fake_model()) as two, relay_to(one.url, two.url) as relay:
        sessions = [await open_session(relay.http) for _ in range(12)]

        fakes = {one.url: one, two.url: two}

        async def homes() -> dict[str, list[str]]:
            for fake in fakes.values():
                fake.requests.clear()
            for session in sessions:
                assert (await relay.http.post(chat_path(session), json=said("Hi", max_tokens=1))).status_code == 200
            keys = {url: [seen.headers["x-smg-routing-key"] for seen in fake.chats()] for url, fake in fakes.items()}
            return {url: [key for key in found if key in sessions] for url, found in keys.items()}

        before = await homes()
        assert all(before.values())
        assert sorted(before[one.url] + before[two.url]) == sorted(sessions)
        assert await homes() == before
        await one._runner.cleanup()
        assert await homes() == {one.url: [], two.url: sessions}
        assert await is_ready(relay)
        metrics = (await relay.http.get("/metrics")).text
        assert 'upstream_ready{upstream="0"} 0.0' in metrics
        assert 'upstream_ready{upstream="1"} 1.0' in metrics
        async with FakeSGLang(fake_model(), port=one.port) as again:
            await until(lambda: relay.backend.servers.all[0].is_ready)
            fakes[one.url] = again
            assert await homes() == before


async def test_agents_whose_upstream_is_killed_end_with_right_trajectories_and_no_turn_twice() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    upstream = UpstreamProcess([sys.executable, "-m", "tests.chaos", str(port)], url)
    upstream.start()
    try:
        async with relay_to(url, kind=VLLMBackend, retry_aborted=1) as relay:
            await until(lambda: relay.backend.not_ready is None)
            report = await chaos(relay.http, upstream, num_agents=4, num_turns=3, num_kills=1, max_tokens=3)
    finally:
        upstream.kill()
    assert report.problems == []
    assert report.num_turns == 12


async def test_upstreams_of_different_models_fail_the_start() -> None:
    async with FakeSGLang(fake_model()) as one, FakeSGLang(fake_model("other")) as two:
        with pytest.raises(Exception, match="serves 'other', but 'fake-model' is expected"):
            async with relay_to(one.url, two.url):
                pass


TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=1",
    "baggage": "run=7",
    "x-request-id": "mine-1",
    "x-experiment": "blue",
}
NOT_CARRIED = {
    "authorization": "Bearer k",
    "x-api-key": "k",
    "api-key": "k",
    "cookie": "a=b",
    "x-smg-routing-key": "theirs",
    "x-smg-target-worker": "1",
    "x-data-parallel-rank": "1",
    "x-vllm-priority": "-5",
    "priority": "u=0",
    "x-session-id": "s",
    "x-amz-security-token": "t",
    "anthropic-beta": "b",
    "x-forwarded-for": "1.2.3.4",
    "content-language": "en",
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", said("Hi")),
        ("v1/messages", said("Hi", model="m")),
        ("v1/responses", {"input": "Hi", "model": "m", "max_output_tokens": 4}),
    ],
)
async def test_tracing_headers_reach_the_upstream_and_keys_and_steering_do_not(path: str, body: dict[str, Any]) -> None:
    body = {name: value for name, value in body.items() if name != "seed" or "chat" in path}
    async with FakeSGLang(fake_model()) as fake, relay_to(fake.url) as relay:
        session = await open_session(relay.http)
        headers = TRACE | NOT_CARRIED
        for prefix in (f"/sessions/{session}/", "/"):
            fake.requests.clear()
            answer = await relay.http.post(prefix + path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            (seen,) = fake.requests
            got = {name.lower(): value for name, value in seen.headers.items()}
            assert got.items() >= TRACE.items()
            assert not {name: value for name, value in NOT_CARRIED.items() if got.get(name) == value}
        fake.requests.clear()
        await relay.http.post(chat_path(session), json=said("Hello"))
        assert not TRACE.keys() & {name.lower() for name in fake.requests[0].headers}


def test_what_is_carried_is_bounded_and_tracing_comes_first() -> None:
    many = [(f"x-note-{index}", "y" * 400) for index in range(100)]
    kept = carried_headers([*many, *TRACE.items(), *NOT_CARRIED.items()])
    assert TRACE.items() - {("x-experiment", "blue")} <= kept.items()
    assert len(kept) <= 32
    assert sum(len(name) + len(value) for name, value in kept.items()) <= 8192
    assert not NOT_CARRIED.keys() & kept.keys()


async def test_probes_do_not_carry_the_headers_of_the_request_that_found_the_gap() -> None:
    async with FakeSGLang(fake_model()) as fake, relay_to(fake.url) as relay:
        session = await open_session(relay.http)
        fake.faults.append(Fault(drops="before"))
        fake.requests.clear()
        await relay.http.post(chat_path(session), json=said("Hi"), headers=TRACE)
        await eventually(lambda: relay.http.get("/readyz"), lambda answer: answer.status_code == 200)
        probes = [seen for seen in fake.requests[1:] if "traceparent" in {name.lower() for name in seen.headers}]
        assert not probes
