"""Reading a generation to its end, good or bad."""

from typing import Any

import grpc
import pytest

from both import every, settled
from conftest import Connect
from fake_sampling import PAIRED
from fake_server import FakeServer
from faults import Fault
from holdfast_sdk import StopReason, Token, errors

ENDLESS = 10**6
NO_EOS = {2: -100.0}


async def test_tokens_come_one_by_one_and_then_the_end(session: Any) -> None:
    generation = await settled(session.generate(max_tokens=3, seed=9, top_logprobs=2, logit_bias=NO_EOS))
    tokens = await every(generation)
    assert all(type(token) is Token and len(token.top) == 2 for token in tokens)
    assert [token.id for token in tokens] == generation.tokens
    assert generation.is_done
    done = generation.done
    assert (done.stop_reason, done.generated_token_count, done.seed) == (StopReason.MAX_TOKENS, 3, 9)
    assert done.history_length == session.history_length == 6
    assert generation.truncated == []
    assert await every(generation) == []


async def test_tokens_that_come_together_are_read_one_by_one(session: Any) -> None:
    generation = await settled(session.generate(max_tokens=6, seed=PAIRED, logit_bias=NO_EOS))
    tokens = await every(generation)
    assert [token.id for token in tokens] == generation.tokens
    assert len(tokens) == generation.done.generated_token_count == 6


async def test_what_left_the_window_is_kept_as_ranges(session: Any) -> None:
    generation = await settled(session.turn(range(97), max_tokens=2))
    await every(generation)
    assert generation.truncated == [range(4, 36)]


async def test_all_options_arrive(session: Any, server: FakeServer) -> None:
    options = {
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {5: 1.5, 6: -2.0},
        "stop_token_ids": [8, 9],
        "top_logprobs": 3,
        "speculation": False,
    }
    await every(await settled(session.generate(max_tokens=1, expected_history_length=3, **options)))
    request = server.faults.requests[-1]
    assert (request.max_tokens, request.expected_history_length) == (1, 3)
    sent = {field.name: value for field, value in request.sampling.ListFields()}
    assert {**sent, "logit_bias": dict(sent["logit_bias"]), "stop_token_ids": [8, 9]} == options


async def test_what_is_left_out_is_not_sent(session: Any, server: FakeServer) -> None:
    await every(await settled(session.generate(max_tokens=1, temperature=None, speculation=None)))
    request = server.faults.requests[-1]
    assert request.sampling.ListFields() == []
    assert not request.HasField("expected_history_length")


async def test_a_misspelt_option_is_named(session: Any) -> None:
    with pytest.raises(TypeError, match="did you mean temperature"):
        await settled(session.generate(max_tokens=1, temprature=0.5))


async def test_there_is_no_done_before_the_end(session: Any) -> None:
    generation = await settled(session.generate(max_tokens=ENDLESS))
    with pytest.raises(RuntimeError, match="still running"):
        _ = generation.done
    generation.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        _ = generation.done


async def test_a_failure_in_mid_stream_is_told(session: Any, server: FakeServer) -> None:
    fault = Fault(status=grpc.StatusCode.FAILED_PRECONDITION, code="session_failed", num_events=2)
    server.faults.plan("Generate", fault)
    generation = await settled(session.generate(max_tokens=9))
    with pytest.raises(errors.SessionFailed):
        await every(generation)
    assert len(generation.tokens) == 2
    assert not generation.is_done


async def test_a_stream_that_just_ends_is_an_error(session: Any, server: FakeServer) -> None:
    server.faults.plan("Generate", Fault(ends=True, num_events=2))
    with pytest.raises(errors.ConnectionFailed, match="without saying how"):
        await every(await settled(session.generate(max_tokens=9)))


async def test_a_generation_has_a_deadline_of_its_own(session: Any, server: FakeServer) -> None:
    server.faults.plan("Generate", Fault(stalls=True, num_events=1))
    generation = await settled(session.generate(max_tokens=9, timeout_s=0.1))
    with pytest.raises(errors.DeadlineExceeded):
        await every(generation)


async def test_the_clients_deadline_holds_where_no_other_is_given(connect: Connect, server: FakeServer) -> None:
    server.faults.plan("AppendTokens", Fault(stalls=True))
    session = connect(timeout_s=0.5).session("any")
    with pytest.raises(errors.DeadlineExceeded):
        await settled(session.append([1], expected_history_length=0))
