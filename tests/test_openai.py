"""The official openai package against a real server with the real default model."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import load_engine
from holdfast.models import GGUFSource
from tests.serving import Server, default_chat, serving_aside

HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


class Pick(BaseModel):
    city: str
    visits: int


@pytest.fixture(scope="module")
def server(default_source: GGUFSource) -> Iterator[Server]:
    shape = SlabShape(recent=768, max_pin=256, prefill_chunk=128, rewind_tokens=256)
    engine = load_engine(default_source, num_slabs=4, shape=shape, device="cpu")
    with serving_aside(engine, default_chat(), max_concurrent=3, admission="reject") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.fixture
def session(server: Server, client: openai.OpenAI) -> Iterator[openai.OpenAI]:
    """The same client, only its base URL changed."""
    with httpx.Client(base_url=f"http://{server.http}") as plain:
        url = f"/sessions/{plain.post('/sessions').json()['session_id']}"
        yield client.with_options(base_url=f"http://{server.http}{url}/v1")
        plain.delete(url)


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(
        model="test", messages=messages, **{"max_tokens": 6, "temperature": 0, "seed": 1} | options
    )


# Stateless


def test_a_chat_completion_is_what_the_package_expects(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="test", messages=HELLO, max_completion_tokens=6, temperature=0, user="me", metadata={"a": "b"}
    )
    assert raw.headers["deprecation"] == "true"
    completion = raw.parse()
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content.startswith("Hello")
    assert (choice.finish_reason, completion.object) == ("length", "chat.completion")
    assert completion.usage.completion_tokens == 6
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 6
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert completion._request_id == raw.headers["x-request-id"]


async def test_the_async_client_gets_the_same(server: Server, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none") as other:
        completion = await other.chat.completions.create(model="test", messages=HELLO, max_tokens=6, temperature=0)
        stream = await other.chat.completions.create(
            model="test", messages=HELLO, max_tokens=6, temperature=0, stream=True
        )
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert completion.choices[0].message.content == ask(client).choices[0].message.content == "".join(streamed)


def test_a_stream_has_a_chunk_a_token_and_its_usage_at_the_end(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    assert all(chunk.usage is None for chunk in parts)
    assert sum(bool(chunk.choices[0].delta.content) for chunk in parts) >= 5
    assert parts[-1].choices[0].finish_reason == "length"
    assert not [chunk for chunk in ask(client, stream=True) if chunk.usage]


def test_the_same_seed_gives_the_same_text_and_another_one_another(client: openai.OpenAI) -> None:
    def drawn(seed: int) -> str:
        return str(ask(client, seed=seed, temperature=1.5, max_tokens=8).choices[0].message.content)

    assert drawn(5) == drawn(5) != drawn(6)


def test_several_choices_differ_and_share_their_prompt(client: openai.OpenAI) -> None:
    completion = ask(client, n=3, temperature=1.5)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) == 3
    assert completion.usage.completion_tokens == 18
    assert completion.usage.prompt_tokens == ask(client).usage.prompt_tokens
    texts = ["", "", ""]
    for chunk in ask(client, n=3, temperature=1.5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in completion.choices]


def test_a_stop_string_never_leaks(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=12).choices[0].message.content
    stop = whole[8:14]  # in the middle of words
    choice = ask(client, max_tokens=12, stop=[stop, "never said"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in ask(client, max_tokens=12, stop=stop, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].finish_reason == "stop"


def test_logprobs_come_with_the_best_alternatives(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 6
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert entry.token == entry.top_logprobs[0].token
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


# Tools


def test_a_forced_tool_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"tools": [WEATHER, TIME], "max_tokens": 60}
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, messages, tool_choice=named, **options).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    answer = ask(client, messages, tools=[WEATHER, TIME]).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_a_required_call_streams_as_one_that_parses(client: openai.OpenAI) -> None:
    stream = ask(
        client,
        [{"role": "user", "content": "What time is it?"}],
        tools=[TIME],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
        stream=True,
    )
    calls, reasons = [], []
    for chunk in stream:
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
    assert reasons[-1] == "tool_calls"
    assert {call.index for call in calls} == {0}
    assert calls[0].function.name == "get_time"
    assert json.loads("".join(call.function.arguments for call in calls)) == {}


# Formats


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    choice = ask(
        client,
        [{"role": "user", "content": 'Answer with {"ok": true}'}],
        response_format={"type": "json_object"},
        max_tokens=40,
    ).choices[0]
    if choice.finish_reason == "stop":  # a small model may go on for ever, but never astray
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


def test_the_parse_helper_gets_its_model_back(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="test",
        messages=[{"role": "user", "content": "Pick a city and a number of visits."}],
        response_format=Pick,
        max_tokens=80,
        temperature=0,
    )
    assert completion.choices[0].finish_reason == "stop"
    assert isinstance(completion.choices[0].message.parsed, Pick)


# Text completions and models


def test_text_and_token_ids_complete_alike(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    ids = default_chat().model.tokenizer.encode(prompt)
    options: Any = {"model": "test", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    text = client.completions.create(prompt=prompt, **options)
    tokens = client.completions.create(prompt=ids, **options)
    assert "Paris" in text.choices[0].text
    assert text.choices[0].text == tokens.choices[0].text
    assert text.usage.prompt_tokens == len(ids)
    assert "".join(text.choices[0].logprobs.tokens) == text.choices[0].text
    assert [len(top) for top in text.choices[0].logprobs.top_logprobs] == [2, 2, 2, 2]
    both = client.completions.create(prompt=[prompt, "One, two,"], model="test", max_tokens=2, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    streamed = client.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_the_model_is_listed_and_retrieved(client: openai.OpenAI, session: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    assert [model.id for model in session.models.list()] == ["test"]
    assert client.models.retrieve("test").owned_by == "holdfast"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# Sessions


def test_a_sessions_history_costs_nothing(client: openai.OpenAI, session: openai.OpenAI, server: Server) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    known = 0
    for turn, text in enumerate(("Say hello.", "And again?", "Once more.")):
        messages.append({"role": "user", "content": text})
        before = prefilled(server)
        completion = ask(session, messages)
        usage = completion.usage
        num_new = usage.prompt_tokens - known
        # the last sampled token of a turn is computed with the next one
        assert usage.prompt_tokens_details.cached_tokens == (known - 1 if turn else 0)
        assert prefilled(server) - before == num_new + bool(turn)
        assert num_new < 40
        known = usage.total_tokens
        messages.append(completion.choices[0].message)
    stateless = ask(client, messages[:-1])
    assert stateless.usage.prompt_tokens_details.cached_tokens == 0


def prefilled(server: Server) -> float:
    return server.metrics.registry.get_sample_value("holdfast_generate_prefill_tokens_sum") or 0.0


def test_a_session_says_what_the_stateless_chat_says_and_streams_it(
    client: openai.OpenAI, session: openai.OpenAI
) -> None:
    expected = ask(client).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(session, stream=True))
    assert streamed == expected
    messages = [*HELLO, {"role": "assistant", "content": streamed}, {"role": "user", "content": "Thanks."}]
    assert ask(session, messages).usage.prompt_tokens_details.cached_tokens > 0


def test_dropping_a_reply_retries_its_turn_on_a_branch(session: openai.OpenAI) -> None:
    first = ask(session)
    followed = [*HELLO, first.choices[0].message, {"role": "user", "content": "Thanks."}]
    straight = session.chat.completions.with_raw_response.create(model="test", messages=followed, max_tokens=4)
    assert "holdfast-branched" not in straight.headers
    for text in ("Thanks.", "No, thanks."):
        followed[-1] = {"role": "user", "content": text}
        retry = session.chat.completions.with_raw_response.create(model="test", messages=followed, max_tokens=4)
        assert retry.headers["holdfast-branched"] == "1"
        assert retry.parse().usage.prompt_tokens_details.cached_tokens > 0


def test_a_tool_call_goes_round_on_a_session(session: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    options = {"tools": [TIME], "parallel_tool_calls": False}
    choice = ask(session, messages, tool_choice="required", max_tokens=60, **options).choices[0]
    assert choice.finish_reason == "tool_calls"
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Noon."},
    ]
    answer = ask(session, messages, tool_choice="none", **options)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 100  # prompt, tools and call


def test_an_edited_reply_is_a_bad_request_that_says_where(session: openai.OpenAI) -> None:
    ask(session)
    edited = [*HELLO, {"role": "assistant", "content": "No!"}, {"role": "user", "content": "Why?"}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(session, edited)
    assert (caught.value.code, caught.value.param) == ("message_mismatch", "messages[1].content")
    assert "No!" in caught.value.message


# Errors


def test_errors_are_the_classes_that_the_package_has_for_them(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=-1)
    assert (bad.value.code, bad.value.param, bad.value.type) == (
        "invalid_argument",
        "temperature",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, [{"role": "user", "content": "word " * 1000}])
    assert long.value.code == "context_length_exceeded"
    unknown = client.with_options(base_url=f"http://{server.http}/sessions/unknown/v1")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(unknown)
    assert missing.value.code == "session_not_found"


def test_a_busy_session_is_a_conflict_that_the_package_does_not_retry(session: openai.OpenAI, server: Server) -> None:
    value = server.metrics.registry.get_sample_value
    busy = {"route": "session_chat", "status": "409"}
    assert session.max_retries > 0
    with ask(session, stream=True, max_tokens=10_000) as running:
        next(iter(running))
        with pytest.raises(openai.ConflictError) as caught:
            ask(session)
        assert caught.value.code == "session_busy"
        deadline = time.monotonic() + 60  # it is counted once the answer is out
        while value("holdfast_http_requests_total", busy) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert value("holdfast_http_requests_total", busy) == 1


def test_too_many_at_once_is_a_rate_limit_that_tells_when_to_come_back(client: openai.OpenAI) -> None:
    patient = client.with_options(max_retries=0)
    with ask(client, n=3, stream=True, max_tokens=10_000) as running:
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as caught:
            ask(patient)
    assert caught.value.code == "capacity_exhausted"
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_an_error_in_mid_stream_is_raised_by_the_package(session: openai.OpenAI, server: Server) -> None:
    with ask(session, stream=True, max_tokens=10_000) as running:
        events = iter(running)
        next(events)
        httpx.delete(str(session.base_url).removesuffix("/v1/"))
        with pytest.raises(openai.APIError, match="closed"):
            list(events)
