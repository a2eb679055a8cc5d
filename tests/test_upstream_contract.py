"""What every upstream backend promises, to the chat turn and to sessions by token ids."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.backends.probe import probe
from holdfast.errors import InvalidArgument, SessionBusy, SessionNotFound
from holdfast.generation import Done, Event, Sampled, SamplingParams, StopReason
from holdfast.sessions.ports import LogprobKind
from tests import upstream_cases
from tests.upstream_cases import Case, greedy


@pytest.fixture(params=upstream_cases.NAMES)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    async with upstream_cases.opened(request.param) as opened:
        yield opened


async def test_a_chat_tells_each_sampled_token_with_its_logprob(case: Case) -> None:
    reply = await case.chat()
    assert reply.status == 200
    assert reply.body == reply.received
    assert reply.headers["content-type"].startswith("application/json")
    done = reply.completion
    assert 1 <= len(done.token_ids) == len(done.logprobs) == done.completion_tokens <= 8
    assert done.prompt_tokens == len(case.prompt)
    assert done.message["role"] == "assistant"
    assert isinstance(done.message["content"], str)
    assert done.finish_reason in ("length", "stop")


async def test_chat_and_tokens_sample_alike_from_the_same_prompt(case: Case) -> None:
    chat = (await case.chat()).completion
    handle = await case.backend.open(sink=0)
    plain = await case.generated(handle, greedy(eos_token_ids=frozenset({2})), case.prompt)
    assert plain.tokens == list(chat.token_ids)
    assert [e.logprob for e in plain.sampled] == pytest.approx(list(chat.logprobs), abs=0.02)


async def test_an_agent_cannot_override_what_we_rely_on(case: Case) -> None:
    wanted = (await case.chat()).completion
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": False,
        "input_ids": [1],
        "return_meta_info": False,
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "return_token_ids": False,
        "return_tokens_as_token_ids": False,
    }
    assert (await case.chat(**fields)).completion.token_ids == wanted.token_ids


async def test_an_upstreams_refusal_passes_through_without_a_completion(case: Case) -> None:
    reply = await case.chat(model="no-such-model")
    assert reply.status in (400, 404)
    assert reply.completion is None
    assert b"model" in reply.body


async def test_the_probe_finds_model_and_logprob_kind(case: Case) -> None:
    report = await probe(case.backend)
    expected = LogprobKind.SAMPLING if case.backend.default_kind is LogprobKind.SAMPLING else LogprobKind.RAW
    assert report.logprob_kind is case.backend.logprob_kind is expected
    assert report.model
    assert report.context
    assert (await case.chat(model="ours")).status == 200  # our name for the model becomes the upstream's


async def test_what_was_given_and_sampled_is_the_history(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    appended = await case.backend.append(handle, case.prompt)
    assert appended.history_length == len(case.prompt)
    first = await case.generated(handle, greedy(4))
    assert len(first.tokens) == 4
    assert first.done.stop_reason is StopReason.MAX_TOKENS
    assert first.done.history_length == len(case.prompt) + 4
    view = case.backend.view(handle)
    assert view.history_length == len(case.prompt) + 4
    assert view.kv_live_bytes is None
    assert view.kv_reserved_bytes is None


async def test_a_turn_in_two_calls_equals_one(case: Case) -> None:
    split, whole = [await case.backend.open(sink=0) for _ in range(2)]
    await case.backend.append(split, case.prompt)
    first = await case.generated(split, greedy(3))
    second = await case.generated(split, greedy(3))
    assert first.tokens + second.tokens == (await case.generated(whole, greedy(6), case.prompt)).tokens


async def test_forks_and_rewinds_go_on_from_their_own_past(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    first = await case.generated(handle, greedy(3), case.prompt)
    fork = await case.backend.fork(handle)
    assert await case.backend.rewind(handle, len(case.prompt)) == 0
    assert (await case.generated(handle, greedy(3))).tokens == first.tokens
    again = await case.generated(fork, greedy(3))
    assert case.backend.view(fork).history_length == len(case.prompt) + 6
    assert (await case.generated(handle, greedy(3))).tokens == again.tokens


async def test_a_seed_fixes_what_is_drawn(case: Case) -> None:
    params = SamplingParams(seed=2**64 - 5, max_tokens=6, temperature=1.0)
    one, two = [await case.backend.open(sink=0) for _ in range(2)]
    drawn = await case.generated(one, params, case.prompt)
    assert drawn.tokens == (await case.generated(two, params, case.prompt)).tokens
    assert drawn.done.seed == 2**64 - 5


@pytest.mark.parametrize("reason", [StopReason.EOS, StopReason.STOP_TOKEN])
async def test_the_sessions_own_tokens_end_a_generation(case: Case, reason: StopReason) -> None:
    plain, ended = [await case.backend.open(sink=0) for _ in range(2)]
    tokens = (await case.generated(plain, greedy(6), case.prompt)).tokens
    last = tokens[2]
    name = "eos_token_ids" if reason is StopReason.EOS else "stop_token_ids"
    generated = await case.generated(ended, greedy(6, **{name: frozenset({last})}), case.prompt)
    assert generated.tokens == tokens[: tokens.index(last) + 1]
    assert generated.done.stop_reason is reason


async def test_top_logprobs_are_the_likeliest_tokens(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    for event in (await case.generated(handle, greedy(3, top_logprobs=3), case.prompt)).sampled:
        logprobs = [logprob for _, logprob in event.top]
        assert len(logprobs) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        assert event.top[0] == (event.token, pytest.approx(event.logprob))


async def test_leaving_a_stream_keeps_what_was_streamed(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    events: list[Event] = []
    stream = case.backend.generate(handle, greedy(500), case.prompt)
    async with stream:
        async for batch in stream:
            events += batch
            break
    events += stream.rest()
    sampled = [event for event in events if isinstance(event, Sampled)]
    assert isinstance(events[-1], Done)
    assert events[-1].stop_reason is StopReason.CANCELLED
    assert case.backend.view(handle).history_length == len(case.prompt) + len(sampled)
    assert len((await case.generated(handle, greedy(2))).tokens) == 2
    await upstream_is_idle(case)


async def test_closing_ends_what_runs(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    stream = case.backend.generate(handle, greedy(500), case.prompt)
    async with stream:
        with pytest.raises(SessionBusy):
            await case.backend.append(handle, [1])
        reading = asyncio.ensure_future(_last(stream))
        async with asyncio.timeout(5):
            while case.backend.view(handle).history_length < len(case.prompt) + 3:
                await asyncio.sleep(0.001)
        assert not reading.done()
        assert await case.backend.close(handle) > len(case.prompt)
        last = await reading
    assert isinstance(last, Done)
    assert last.stop_reason is StopReason.CANCELLED
    with pytest.raises(SessionNotFound):
        case.backend.view(handle)
    await upstream_is_idle(case)


async def test_a_prompt_that_is_too_long_is_refused_and_not_kept(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    await case.backend.append(handle, case.prompt)
    stream = case.backend.generate(handle, greedy(2), case.too_long)
    with pytest.raises(InvalidArgument, match="upstream rejected"):
        await stream.__aenter__()
    await stream.__aexit__(None, None, None)
    assert case.backend.view(handle).history_length == len(case.prompt)
    assert stream.rest() == []


async def test_ids_outside_the_vocabulary_never_leave(case: Case) -> None:
    handle = await case.backend.open(sink=0)
    for tokens in ([-1], [case.backend.model.vocab_size], [True]):
        with pytest.raises(InvalidArgument):
            await case.backend.append(handle, tokens)
        with pytest.raises(InvalidArgument):
            case.backend.generate(handle, greedy(), tokens)
    with pytest.raises(InvalidArgument, match="empty history"):
        case.backend.generate(handle, greedy())


async def _last(stream: AsyncIterator[list[Event]]) -> Event:
    events: list[Event] = []
    async for batch in stream:
        events += batch
    return events[-1]


async def upstream_is_idle(case: Case) -> None:
    if case.fake is not None:
        async with asyncio.timeout(5):
            while case.fake.num_running:
                await asyncio.sleep(0.001)
