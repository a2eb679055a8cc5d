"""Chat sessions in front of an upstream: its bytes untouched, its tokens on record, and nothing else."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from yarl import URL

from holdfast.backends.fields import DECISIVE
from holdfast.chats.samples.formats import decode
from holdfast.errors import ConfigError, UpstreamInvalid
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.sessions.payload import expert_rows
from holdfast.sessions.ports import UpstreamReply
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import DrawnToken, FakeModel, Fault, flat_rows
from tests.effort import examples
from tests.relaying import Relay, relaying
from tests.serving import default_chat
from tests.talking import as_events_text, chat_path, error_of, eventually, open_session, said, until


class HeldSGLang(FakeSGLang):
    """Answers no request for tokens while `may_answer` is clear."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _draw(self, *args: Any) -> list[DrawnToken]:
        drawn = await super()._draw(*args)
        await self.may_answer.wait()
        return drawn


def fake_upstream(context: int = 4096, **options: Any) -> HeldSGLang:
    tokenizer = default_chat().model.tokenizer
    model = FakeModel(
        vocab_size=tokenizer.inner.get_vocab_size(),
        context=context,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special=True),
    )
    return HeldSGLang(model, **options)


@contextlib.asynccontextmanager
async def chatting(**options: Any) -> AsyncIterator[tuple[Relay, HeldSGLang]]:
    fake = {key: options.pop(key) for key in ("context", "delay_s", "routed_experts") if key in options}
    async with fake_upstream(**fake) as upstream:
        vocab_size = upstream.model.vocab_size
        async with relaying(upstream.url, default_chat(), vocab_size, **options) as relay:
            upstream.requests.clear()  # what the probe asked
            yield relay, upstream


def chats_of(upstream: FakeSGLang) -> list[dict[str, Any]]:
    return [seen.json for seen in upstream.requests if seen.path == "/v1/chat/completions"]


async def test_the_upstream_gets_our_ids_and_the_client_its_bytes() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi", min_p=0.25))
        assert first.status_code == 200
        sent = chats_of(upstream)[0]
        prompt = default_chat().model.continuation.first([{"role": "user", "content": "Hi"}]).ids
        assert sent["input_ids"] == prompt
        assert sent["min_p"] == 0.25  # not ours to judge
        assert "stream" not in sent
        (record,) = (await relay.http.get(f"/sessions/{session}")).json()["records"]
        assert record["response"] == first.json()
        assert record["request"] == sent
        sampled = [entry[1] for entry in first.json()["choices"][0]["meta_info"]["output_token_logprobs"]]
        reply = first.json()["choices"][0]["message"]["content"]
        await relay.http.post(chat_path(session), json=said("Hi", reply, "More"))
        again = chats_of(upstream)[1]["input_ids"]
        assert again[: len(prompt) + len(sampled)] == prompt + sampled


async def test_two_chats_at_once_are_one_upstream_request_and_a_409() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        body = said("Hi")
        upstream.may_answer.clear()
        first = asyncio.ensure_future(relay.http.post(chat_path(session), json=body))
        await until(lambda: len(upstream.requests) == 1)
        second = await relay.http.post(chat_path(session), json=said("Hello"))
        assert (second.status_code, error_of(second)["code"]) == (409, "session_busy")
        assert second.headers["x-should-retry"] == "false"
        assert second.headers["retry-after"]
        upstream.may_answer.set()
        assert (await first).status_code == 200
        assert len(upstream.requests) == 1


async def test_sixty_four_sessions_run_at_once() -> None:
    async with chatting() as (relay, upstream):
        sessions = [await open_session(relay.http) for _ in range(64)]
        upstream.may_answer.clear()
        turns = [asyncio.ensure_future(relay.http.post(chat_path(s), json=said("Hi", max_tokens=1))) for s in sessions]
        await until(lambda: upstream.num_running == 64)
        upstream.may_answer.set()
        assert {reply.status_code for reply in await asyncio.gather(*turns)} == {200}


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def edit(reply: dict[str, Any]) -> None:
        inner: Any = reply
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]

    return edit


def _put(*path: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edit(reply: dict[str, Any]) -> dict[str, Any]:
        inner: Any = reply
        for step in path[:-2]:
            inner = inner[step]
        inner[path[-2]] = path[-1]
        return reply

    return edit


def _counting(reply: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    reply["usage"]["completion_tokens"] = num_tokens
    return _put(*META, "completion_tokens", num_tokens)(reply)


CHOICE = ("choices", 0)
META = (*CHOICE, "meta_info")
ENTRY = (*META, "output_token_logprobs", 0)
MALFORMED = {
    "no JSON": Fault(body=b"<html>"),
    "not UTF-8": Fault(body=b'{"choices": "\xff"}'),
    "too deep": Fault(body=b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "a list": Fault(body=b"[]"),
    "no choices": Fault(edit=_drop("choices")),
    "null choices": Fault(edit=_put("choices", None)),
    "empty choices": Fault(edit=_put("choices", [])),
    "two choices": Fault(edit=lambda reply: reply["choices"].append(reply["choices"][0])),
    "no message": Fault(edit=_put(*CHOICE, "message", "hi")),
    "another role": Fault(edit=_put(*CHOICE, "message", "role", "user")),
    "odd content": Fault(edit=_put(*CHOICE, "message", "content", 7)),
    "no meta_info": Fault(edit=_drop(*META)),
    "logprobs no list": Fault(edit=_put(*META, "output_token_logprobs", "x")),
    "short entry": Fault(edit=_put(*ENTRY, [-0.5])),
    "bool id": Fault(edit=_put(*ENTRY, [-0.5, True])),
    "float id": Fault(edit=_put(*ENTRY, [-0.5, 3.0])),
    "text id": Fault(edit=_put(*ENTRY, [-0.5, "3"])),
    "null id": Fault(edit=_put(*ENTRY, [-0.5, None])),
    "negative id": Fault(edit=_put(*ENTRY, [-0.5, -1])),
    "id beyond the vocabulary": Fault(edit=_put(*ENTRY, [-0.5, 10**7])),
    "bool logprob": Fault(edit=_put(*ENTRY, [True, 3])),
    "text logprob": Fault(edit=_put(*ENTRY, ["-0.5", 3])),
    "null logprob": Fault(edit=_put(*ENTRY, [None, 3])),
    "positive logprob": Fault(edit=_put(*ENTRY, [0.5, 3])),
    "NaN": Fault(edit=_put(*ENTRY, [float("nan"), 3])),
    "Infinity": Fault(edit=_put(*ENTRY, [float("-inf"), 3])),
    "no count": Fault(edit=_drop(*META, "completion_tokens")),
    "bool count": Fault(edit=_put(*META, "completion_tokens", True)),
    "wrong count": Fault(edit=_put(*META, "completion_tokens", 99)),
    "no finish_reason": Fault(edit=_drop(*CHOICE, "finish_reason")),
    "another number of prompt tokens": Fault(edit=_put(*META, "prompt_tokens", 1)),
    "another number of prompt tokens in usage": Fault(edit=_put("usage", "prompt_tokens", 1)),
    "the ids of another prompt": Fault(edit=_put(*CHOICE, "prompt_token_ids", [1, 2, 3])),
    "text without tokens": Fault(edit=lambda reply: _put(*META, "output_token_logprobs", [])(_counting(reply, 0))),
    "more tokens than requested": Fault(
        edit=lambda reply: _put(*META, "output_token_logprobs", [[-0.5, 5]] * 5)(_counting(reply, 5))
    ),
    "unknown finish_reason": Fault(edit=_put(*CHOICE, "finish_reason", "because")),
    "empty finish_reason": Fault(edit=_put(*CHOICE, "finish_reason", "")),
    "another finish_reason in meta_info": Fault(
        edit=lambda reply: _put(*META, "finish_reason", {"type": "stop"})(
            _put(*CHOICE, "finish_reason", "length")(reply)
        )
    ),
    **{f"status {status}": Fault(status=status) for status in (201, 204, 206, 999)},
}
BROKEN = {
    "drops before": (Fault(drops="before"), 502, "upstream_unreachable"),
    "drops in the middle": (Fault(drops="middle"), 502, "upstream_unreachable"),
    "hangs": (Fault(is_hanging=True), 504, "upstream_timeout"),
    "aborts": (Fault(edit=_put(*CHOICE, "finish_reason", "abort")), 503, "upstream_aborted"),
    "aborts in meta_info": (Fault(edit=_put(*META, "finish_reason", {"type": "abort"})), 503, "upstream_aborted"),
    **{name: (fault, 502, "upstream_invalid") for name, fault in MALFORMED.items()},
}


async def _is_untouched(relay: Relay, upstream: FakeSGLang, session: str, before: dict[str, Any]) -> None:
    """The slot is free, nothing was recorded, and the next legal chat works."""
    now = (await relay.http.get(f"/sessions/{session}")).json()
    for field in ("history_length", "turns", "records", "metadata"):
        assert now[field] == before[field]
    reply = before["messages"][-1]["content"]
    assert (await relay.http.post(chat_path(session), json=said("Hi", reply, "More"))).status_code == 200


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_not_exactly_right_is_refused_and_leaves_nothing(name: str) -> None:
    fault, status, code = BROKEN[name]
    async with chatting(upstream_timeout_s=3.0 if fault.is_hanging else 60.0) as (relay, upstream):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi"))
        reply = first.json()["choices"][0]["message"]["content"]
        before = (await relay.http.get(f"/sessions/{session}")).json()
        upstream.faults.append(fault)
        refused = await relay.http.post(chat_path(session), json=said("Hi", reply, "Go on"))
        assert (refused.status_code, error_of(refused)["code"]) == (status, code)
        assert upstream.url.removeprefix("http://") not in refused.text
        await _is_untouched(relay, upstream, session, before)


async def test_other_statuses_and_content_types_pass_through_byte_for_byte() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        first = await relay.http.post(chat_path(session), json=said("Hi"))
        before = (await relay.http.get(f"/sessions/{session}")).json()
        body = b"\x00\xfe not json \xff"
        odd = {"content-type": "application/x-odd", "x-from": "there", "set-cookie": "a=b", "server": "theirs"}
        upstream.faults.append(Fault(body=body, status=418, headers=odd))
        reply = first.json()["choices"][0]["message"]["content"]
        passed = await relay.http.post(chat_path(session), json=said("Hi", reply, "Go on"))
        assert (passed.status_code, passed.content) == (418, body)
        assert passed.headers["content-type"] == "application/x-odd"
        assert passed.headers["x-from"] == "there"
        assert passed.headers["holdfast-recorded"] == "false"
        assert "set-cookie" not in passed.headers
        names = [name.lower() for name, _ in passed.headers.raw]
        assert len(names) == len(set(names))
        await _is_untouched(relay, upstream, session, before)


OURS = {"holdfast-recorded": "true", "holdfast-turn": "x", "idempotent-replayed": "true", "x-request-id": "theirs"}
NOT_THEIRS = {"x-should-retry": "true", "access-control-allow-origin": "*", "strict-transport-security": "max-age=1"}


async def test_an_upstream_cannot_speak_in_our_name() -> None:
    async with chatting(passthrough="GET:v1/odd") as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(headers=OURS | NOT_THEIRS))
        answer = await relay.http.post(chat_path(session), json=said("Hi"))
        assert answer.status_code == 200
        assert answer.headers["holdfast-turn"] != "x"
        upstream.faults.append(Fault(status=500, headers=OURS | NOT_THEIRS))
        failed = await relay.http.post(chat_path(session), json=said("Hello"))
        assert failed.headers["holdfast-recorded"] == "false"
        upstream.faults.append(Fault(headers=OURS | NOT_THEIRS))
        passed = await relay.http.get(f"/sessions/{session}/v1/models", headers={"origin": "http://evil.example"})
        assert "holdfast-recorded" not in passed.headers
        assert "origin" not in {name.lower() for name in upstream.requests[-1].headers}
        for one in (answer, failed, passed):
            assert one.headers["x-request-id"] != "theirs"
            assert "idempotent-replayed" not in one.headers
            assert not NOT_THEIRS.keys() & one.headers.keys()


async def test_a_status_that_is_none_gets_an_answer_all_the_same() -> None:
    statuses = [101, 101, 199, 199, 600, 600, 999, 999]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {statuses.pop()} Odd\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        await writer.drain()
        writer.close()

    async with chatting() as (relay, _), await asyncio.start_server(answer, "127.0.0.1", 0) as odd:
        session = await open_session(relay.http)
        address = "{}:{}".format(*odd.sockets[0].getsockname())
        relay.backend.servers.all[0].transport._base = URL(f"http://{address}")
        relay.backend.servers.lost = lambda server, why: None  # type: ignore[method-assign]  # it is not probed
        while statuses:
            for refused in (
                await relay.http.post(chat_path(session), json=said("Hi")),
                await relay.http.get(f"/sessions/{session}/v1/models"),
            ):
                assert refused.status_code == 502, refused.text
                assert error_of(refused)["code"] in ("upstream_invalid", "upstream_unreachable")
                assert address not in refused.text
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 0


async def test_an_upstream_that_is_gone_is_told_without_its_address() -> None:
    async with chatting(upstream_wait_s=0.0) as (relay, _):
        session = await open_session(relay.http)
        relay.backend.servers.all[0].transport._base = URL("http://127.0.0.1:1")
        gone = await relay.http.post(chat_path(session), json=said("Hi"))
        assert (gone.status_code, error_of(gone)["code"]) == (503, "upstream_unavailable")
        assert "127.0.0.1" not in gone.text


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5000])
async def test_a_number_that_nobody_can_read_is_refused_before_anything_is_recorded(number: bytes) -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        good = (await relay.http.post(chat_path(session), json=said("Hi"))).content
        streamed = json.dumps(said("Hi", stream=True, metadata={"a": "MARK"})).encode()
        asked = await relay.http.post(chat_path(session), content=streamed.replace(b'"MARK"', number))
        assert (asked.status_code, error_of(asked)["param"]) == (400, "metadata.a")
        for _ in range(2):
            upstream.faults.append(Fault(body=good.replace(b"{", b'{"unread": ' + number + b", ", 1)))
            told = await relay.http.post(chat_path(session), content=streamed, headers={"idempotency-key": "k"})
            assert (told.status_code, error_of(told)["code"]) == (502, "upstream_invalid")
        assert (await relay.http.get(f"/sessions/{session}?branches=all")).json()["turns"] == 1


async def test_a_stream_spells_every_value_as_the_upstream_did() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        good = (await relay.http.post(chat_path(session), json=said("Hi"))).content
        odd = b'"unread": [1.50, 1E5, 123456789012345678901234567890]'
        upstream.faults.append(Fault(body=good.replace(b"{", b"{" + odd + b", ", 1)))
        reply = await relay.http.post(chat_path(session), json=said("Hi", stream=True))
        assert reply.status_code == 200
        assert b'"unread":[1.50, 1E5, 123456789012345678901234567890]' in reply.content


async def test_calls_in_a_stream_are_numbered_where_the_upstream_leaves_their_index_null() -> None:
    calls = [
        {"id": name, "index": None, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"
    ]
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(edit=lambda reply: reply["choices"][0]["message"].update(tool_calls=calls)))
        reply = await relay.http.post(chat_path(session), json=said("Hi", stream=True))
        delta = as_events_text(reply.text)[0]["choices"][0]["delta"]
        assert [call["index"] for call in delta["tool_calls"]] == [0, 1]


STEERING = {
    "bootstrap_host": "evil.example",
    "bootstrap_port": 1,
    "bootstrap_room": 2,
    "cache_salt": "x",
    "chat_template": "{{ x }}",
    "continue_final_message": True,
    "custom_logit_processor": "x",
    "custom_params": {},
    "data_parallel_rank": 1,
    "functions": [{"name": "f"}],
    "kv_transfer_params": {"do_remote_decode": True},
    "lora_path": "/etc",
    "priority": -1,
    "request_id": "x",
    "return_hidden_states": True,
    "rid": "x",
    "session_params": {"id": "x"},
    "truncate_prompt_tokens": 1,
    "vllm_xargs": {"a": 1},
    "colour": "red",
}
HARMLESS = {
    "user": "ann",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "reasoning_effort": "low",
    "verbosity": "low",
    "stream_options": {"include_usage": True},
    "priority": None,
}


def is_decisive(name: str) -> bool:
    return name in DECISIVE and bool(STEERING[name])


@pytest.mark.parametrize("setting", ["ignore", "reject"])
async def test_a_field_that_steers_the_upstream_is_refused_by_name(setting: str) -> None:
    async with chatting(unknown_fields=setting) as (relay, upstream):
        session = await open_session(relay.http)
        for name, value in STEERING.items():
            if setting == "reject" or is_decisive(name):
                refused = await relay.http.post(chat_path(session), json=said("Hi") | {name: value})
                assert (refused.status_code, error_of(refused)["param"]) == (400, name)
                assert "--forward-fields" in refused.text
        assert not upstream.requests


async def test_an_unknown_field_that_changes_no_reply_never_reaches_the_upstream() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        noise = {name: value for name, value in STEERING.items() if not is_decisive(name)}
        assert noise.keys() >= {"priority", "cache_salt", "bootstrap_host", "rid", "colour"}
        body = said("Hi", temperature=0.5, **noise)
        body["messages"][0]["cache_control"] = {}
        reply = await relay.http.post(chat_path(session), json=body)
        assert reply.status_code == 200
        named = {*noise, "messages[0].cache_control"}
        assert set(reply.headers["holdfast-ignored-fields"].split(",")) == named
        (sent,) = chats_of(upstream)
        assert sent["messages"] == said("Hi")["messages"]
        assert sent["temperature"] == 0.5
        assert not noise.keys() & sent.keys() - {"kv_transfer_params"}
        (turn,) = (await relay.http.get(f"/sessions/{session}")).json()["records"]
        assert not noise.keys() & turn["request"].keys()


async def test_fields_that_openai_clients_send_are_accepted_and_an_operator_may_allow_more() -> None:
    async with chatting(
        forward_fields="priority, lora_path", upstream_extra='{"rid": "ours"}', unknown_fields="reject"
    ) as (relay, upstream):
        session = await open_session(relay.http)
        body = said("Hi", **HARMLESS)
        assert (await relay.http.post(chat_path(session), json=body)).status_code == 200
        assert (await relay.http.post(chat_path(session), json=body | {"priority": 3})).status_code == 200
        refused = await relay.http.post(chat_path(session), json=body | {"rid": "mine"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "rid")
        first, second = chats_of(upstream)
        assert not (HARMLESS.keys() - {"reasoning_effort", "priority"}) & first.keys()
        assert (first["reasoning_effort"], first["rid"], second["priority"]) == ("low", "ours", 3)


async def test_samples_are_never_spoiled_by_a_payload_that_does_not_fit() -> None:
    async with chatting(routed_experts=flat_rows, routing_replay="additional") as (relay, upstream):
        session = await open_session(relay.http)
        said_so_far = ["Hi"]
        one_too_many, wider = lambda num: flat_rows(num + 1), lambda num: flat_rows(num, 7)
        for bad in (None, "????", [[1, 2]], one_too_many, wider):
            for payload, status in ((bad, 502), (flat_rows, 200)):
                upstream.routed_experts = payload
                answer = await relay.http.post(chat_path(session), json=said(*said_so_far))
                assert answer.status_code == status, (bad, answer.text)
            said_so_far += [answer.json()["choices"][0]["message"]["content"], "More"]
        samples = await relay.http.post(f"/sessions/{session}/samples", json={"format": "json"})
        assert samples.status_code == 200, samples.text
        [sample] = samples.json()["samples"]
        num_rows, width = sample["rollout_routed_experts"]["shape"]
        assert (num_rows, width) == (len(sample["tokens"]) - 1, 6)


async def test_routed_experts_have_layers_and_experts_per_token_where_a_setting_tells_them() -> None:
    options = {"routed_experts": flat_rows, "routing_replay": "full"}
    async with chatting(**options, routed_experts_shape="3,2") as (relay, _):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi"))
        (sample,) = decode((await relay.http.post(f"/sessions/{session}/samples")).content).samples
    rows = sample.rollout_routed_experts
    assert rows is not None
    assert rows.tolist() == np.arange((len(sample.tokens) - 1) * 6).reshape(-1, 3, 2).tolist()
    for shape in ("4,2", "2,2"):
        with pytest.raises(UpstreamInvalid, match=r"has \[6\] values for each token.*set --routed-experts-shape"):
            async with chatting(**options, routed_experts_shape=shape):
                pass
    with pytest.raises(ConfigError, match="must be LAYERS,TOPK"):
        async with chatting(**options, routed_experts_shape="48x8"):
            pass


@pytest.mark.parametrize(
    ("row", "known", "found"),
    [
        ((6,), {}, (6,)),
        ((3, 2), {}, (3, 2)),
        ((6,), {"shape": (3, 2)}, (3, 2)),
        ((3, 2), {"shape": (3, 2)}, (3, 2)),
        ((3, 2), {"shape": (2, 3)}, None),
        ((6,), {"routing": (3, 2, 3)}, (3, 2)),
        ((6,), {"routing": (2, 2, 3)}, (3, 2)),  # the server counts a layer that does not route, too
        ((6,), {"routing": (4, 2, 4)}, None),
        ((6,), {"routing": (2, 2, 4)}, None),
        ((7,), {"routing": (3, 2, 3)}, None),
        ((3, 2), {"routing": (3, 4, 3)}, None),
    ],
)
def test_rows_of_routed_experts_fit_the_model_or_are_refused(row: Any, known: Any, found: Any) -> None:
    if found is None:
        with pytest.raises(ValueError, match="values for each token"):
            expert_rows(row, **known)
    else:
        assert expert_rows(row, **known) == found


async def test_samples_tell_the_driver_of_miles_what_it_reads() -> None:
    counters = {"cached_tokens": 3, "spec_verify_ct": 2, "spec_draft_token_num": 8, "spec_accept_token_num": 5}
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(edit=lambda reply: reply["choices"][0]["meta_info"].update(counters)))
        first = (await relay.http.post(chat_path(session), json=said("Hi"))).json()
        answer = first["choices"][0]["message"]["content"]
        upstream.faults.append(
            Fault(edit=lambda reply: reply["choices"][0]["meta_info"].update(cached_tokens="x", weight_version="8"))
        )
        await relay.http.post(chat_path(session), json=said("Hi", answer, "More"))
        reply = await relay.http.post(f"/sessions/{session}/samples", json={"metadata": {"task": 1}})
        spans = await relay.http.post(f"/sessions/{session}/samples", json={"weight_versions": "spans"})
        records = (await relay.http.get(f"/sessions/{session}")).json()["records"]
    tensors = safetensors.numpy.load(reply.content)
    meta = json.loads(tensors["_samples_meta"].tobytes())
    [sample] = meta["samples"]
    assert sample["weight_versions"] == ["7", "8"]
    assert (min(map(int, sample["weight_versions"])), len(set(sample["weight_versions"]))) == (7, 2)
    num_sampled = first["usage"]["completion_tokens"]
    assert sample["prefix_cache_info"] == {
        "cached_tokens": 3,
        "total_prompt_tokens": first["usage"]["prompt_tokens"],  # the second turn does not tell what was cached
    }
    assert sample["spec_info"] == {
        "spec_accept_token_num": 5,
        "spec_draft_token_num": 8,
        "spec_verify_ct": 2,
        "completion_token_num": num_sampled,
    }
    told = meta["session_metadata"]
    assert told["accumulated_token_ids"] == tensors["tokens.0"].tolist()
    assert told["max_trim_tokens"] == 0
    assert isinstance(told["tito_session_mismatch"], list)
    one, other = [turn["effort"] for turn in sample["turns"]]
    assert {"prompt_tokens", "cached_tokens", "spec_steps", "queue_s", "total_s"} <= one.keys()
    assert (one["spec_drafted"], one["spec_accepted"], one["cached_tokens"]) == (8, 5, 3)
    assert "cached_tokens" not in other
    assert [record["effort"] for record in records] == [one, other]
    effort = sample["metadata"]["holdfast"]["effort"]
    assert effort["prompt_tokens"] == one["prompt_tokens"] + other["prompt_tokens"]
    assert sample["metadata"]["task"] == 1
    [told_spans] = json.loads(safetensors.numpy.load(spans.content)["_samples_meta"].tobytes())["samples"]
    start = first["usage"]["prompt_tokens"]
    assert told_spans["weight_versions"][0] == [{"version": "7", "abs_start": start, "abs_end": start + num_sampled}]


async def test_an_upstream_that_lacks_what_routing_replay_needs_fails_the_start() -> None:
    with pytest.raises(UpstreamInvalid, match="did not return routed_experts"):
        async with chatting(routing_replay="full"):
            pass


@pytest.mark.parametrize("moment", ["waiting", "answered"])
async def test_a_client_that_leaves_before_the_commit_leaves_nothing(moment: str) -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi", max_tokens=1))
        before = (await relay.http.get(f"/sessions/{session}")).json()
        reply = before["messages"][-1]["content"]
        upstream.requests.clear()
        complete, answered, ended = relay.backend.complete, asyncio.Event(), asyncio.Event()

        async def complete_and_stay(*args: Any, **options: Any) -> UpstreamReply:
            try:
                reply = await complete(*args, **options)
                answered.set()
                await asyncio.Event().wait()
                return reply
            finally:
                ended.set()

        body = said("Hi", reply, "Go on")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relay.backend, "complete", complete_and_stay)
            if moment == "waiting":
                upstream.may_answer.clear()
            async with httpx.AsyncClient(base_url=relay.http.base_url) as leaving:
                turn = asyncio.ensure_future(leaving.post(chat_path(session), json=body))
                await until(answered.is_set if moment == "answered" else lambda: bool(upstream.requests))
                turn.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await turn
            await until(ended.is_set)
        assert answered.is_set() == (moment == "answered")
        await until(lambda: upstream.num_running == 0)
        upstream.may_answer.set()
        again = await eventually(
            lambda: relay.http.post(chat_path(session), json=body), lambda answer: answer.status_code != 409
        )
        assert again.status_code == 200
        assert "holdfast-branched" not in again.headers
        assert (await relay.http.get(f"/sessions/{session}")).json()["turns"] == 2


async def test_deleting_during_a_turn_still_gives_its_client_the_bytes_unrecorded() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.may_answer.clear()
        turn = asyncio.ensure_future(relay.http.post(chat_path(session), json=said("Hi")))
        await until(lambda: bool(upstream.requests))
        assert (await relay.http.delete(f"/sessions/{session}")).status_code == 204
        assert (await relay.http.post(chat_path(session), json=said("Hi"))).status_code == 404
        upstream.may_answer.set()
        reply = await turn
        assert reply.status_code == 200
        assert reply.headers["holdfast-recorded"] == "false"
        assert reply.json()["choices"]


async def test_a_stream_is_the_reply_as_one_chunk() -> None:
    async with chatting() as (relay, _):
        session = await open_session(relay.http)
        reply = await relay.http.post(chat_path(session), json=said("Hi", stream=True))
        assert reply.headers["content-type"].startswith("text/event-stream")
        chunk, done = as_events_text(reply.text)
        assert done == "[DONE]"
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["choices"][0]["delta"]["role"] == "assistant"
        assert chunk["usage"]["completion_tokens"] > 0
        (record,) = (await relay.http.get(f"/sessions/{session}")).json()["records"]
        assert "stream" not in record["request"]


async def test_only_open_paths_of_the_upstream_are_reached_and_no_key_goes_there() -> None:
    async with chatting(passthrough="GET:v1/odd") as (relay, upstream):
        session = await open_session(relay.http)
        headers = {"authorization": "Bearer secret", "cookie": "a=b", "x-smg-routing-key": "mine", "x-mine": "yes"}
        await relay.http.post(chat_path(session), json=said("Hi"), headers=headers)
        models = await relay.http.get(f"/sessions/{session}/v1/models?a=1", headers=headers)
        assert models.status_code == 200
        assert models.json()["data"][0]["id"] == "fake-model"
        for seen in upstream.requests:
            assert "authorization" not in {name.lower() for name in seen.headers}
            assert "cookie" not in {name.lower() for name in seen.headers}
            assert {name.lower(): value for name, value in seen.headers.items()}["x-smg-routing-key"] == session
        upstream.requests.clear()
        for method, path in (
            ("POST", "update_weights_from_disk"),
            ("POST", "v1/../pause"),
            ("GET", "v1%2Fmodels"),
            ("GET", "v1//models"),
            ("GET", "%2e%2e/health"),
            ("POST", "v1/models"),
            ("GET", "flush_cache"),
        ):
            request = httpx.Request(method, f"{relay.http.base_url}/sessions/{session}/{path}")
            assert (await relay.http.send(request)).status_code in (404, 405), path
        assert upstream.requests == []


async def test_the_gRPC_door_sees_the_same_history_and_what_was_sampled() -> None:
    async with chatting() as (relay, _):
        session = await open_session(relay.http)
        first = (await relay.http.post(chat_path(session), json=said("Hi"))).json()
        entries = first["choices"][0]["meta_info"]["output_token_logprobs"]
        chunks = [chunk async for chunk in relay.stub.GetHistory(pb.GetHistoryRequest(session_id=session))]
        assert [pb.SpanKind.Name(chunk.kind) for chunk in chunks] == ["SPAN_KIND_GIVEN", "SPAN_KIND_SAMPLED"]
        assert list(chunks[1].token_ids) == [entry[1] for entry in entries]
        assert list(chunks[1].logprobs) == pytest.approx([entry[0] for entry in entries])


async def test_thousands_of_mangled_replies_give_only_valid_answers_or_refusals() -> None:
    source = random.Random(4)
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        good = (await relay.http.post(chat_path(session), json=said("Hi", max_tokens=2))).content
        seen: dict[int, int] = {}
        for _ in range(examples(200)):
            upstream.faults.append(Fault(body=_mangled(good, source)))
            reply = await relay.http.post(chat_path(session), json=said("Hi", max_tokens=2))
            seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
            if reply.status_code == 200:
                entries = reply.json()["choices"][0]["meta_info"]["output_token_logprobs"]
                assert len(entries) == reply.json()["choices"][0]["meta_info"]["completion_tokens"]
        assert set(seen) <= {200, 502, 503}, seen
        assert seen.get(502, 0) > 10
        info = (await relay.http.get(f"/sessions/{session}?branches=all")).json()
        assert len(info["records"]) == 1 + seen.get(200, 0)


def _mangled(good: bytes, source: random.Random) -> bytes:
    """A valid reply with a few bytes cut, doubled, changed, or a JSON value put elsewhere."""
    body = bytearray(good)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(body))
        kind = source.randrange(4)
        if kind == 0:
            del body[at : at + source.randint(1, 20)]
        elif kind == 1:
            body[at:at] = source.choice([b"NaN", b"null", b"-1", b"1e999", b"\xff", b'"x"', b"[", b"}", b"true"])
        elif kind == 2:
            body[at] = source.randrange(256)
        else:
            old, new = source.choice(
                [
                    (b"-", b""),
                    (b'"assistant"', b'"user"'),
                    (b"0.", b"NaN0."),
                    (b'"stop"', b"null"),
                    (b"choices", b"choice"),
                ]
            )
            body = bytearray(bytes(body).replace(old, new, 1))
    return bytes(body) or b" "


async def test_headers_that_HTTP_cannot_carry_do_not_break_a_recorded_turn() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        upstream.faults.append(Fault(headers={"x-odd": "\u4f60\u597d", "x-plain": "yes"}))
        reply = await relay.http.post(chat_path(session), json=said("Hi"))
        assert reply.status_code == 200
        assert reply.headers["x-plain"] == "yes"


async def test_stateless_requests_reach_the_upstream_within_its_context_and_refuse_what_it_cannot_do() -> None:
    async with chatting(context=60) as (relay, _):
        body = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}
        assert (await relay.http.post("/v1/chat/completions", json=body)).status_code == 200
        refused = await relay.http.post(
            "/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}, "max_tokens": 4}
        )
        assert (refused.status_code, error_of(refused)["param"]) == (400, "response_format")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_beyond_the_context_is_lowered_to_what_the_prompt_leaves(name: str) -> None:
    async with chatting(context=60) as (relay, upstream):
        session, body = await open_session(relay.http), {"messages": said("Hi")["messages"], "seed": 1}
        for asked in (32_000, 5):
            upstream.requests.clear()
            assert (await relay.http.post(chat_path(session), json=body | {name: asked})).status_code == 200
            (sent,) = chats_of(upstream)
            assert sent[name] == min(asked, 60 - len(sent["input_ids"]))
        asked_for = {"format": "json", "branch": "all"}
        samples = (await relay.http.post(f"/sessions/{session}/samples", json=asked_for)).json()["samples"]
        assert samples[0]["turns"][0]["sampling"][name] == 60 - len(sent["input_ids"])
        stateless = await relay.http.post("/v1/chat/completions", json=body | {name: 32_000})
        assert stateless.status_code == 200
        assert stateless.json()["usage"]["total_tokens"] <= 60


async def test_whatever_the_client_calls_the_model_the_upstream_hears_its_own_name() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        assert (await relay.http.post(chat_path(session), json=said("Hi", model="gpt-9"))).status_code == 200
        assert chats_of(upstream)[0]["model"] == "fake-model"


async def test_upstream_requests_are_counted() -> None:
    async with chatting() as (relay, upstream):
        session = await open_session(relay.http)
        await relay.http.post(chat_path(session), json=said("Hi"))
        upstream.faults.append(Fault(body=b"{}"))
        await relay.http.post(chat_path(session), json=said("Hi"))
        metrics = (await relay.http.get("/metrics")).text
        assert 'holdfast_upstream_requests_total{outcome="upstream_invalid",upstream="0"} 1.0' in metrics
