"""`holdfast bench recovery`: what counts as lost or altered, gates that can fail, and a real server that is killed."""

import json
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.bench import recovery
from holdfast.bench.agents import (
    ChatAgent,
    ChatExchange,
    ServerGone,
    Token,
    TokenAgent,
    TokenTurn,
    UnexpectedResponse,
    compare_chat,
    compare_tokens,
    connected,
)
from holdfast.bench.gates import none_missing, under_load
from holdfast.bench.processes import RunningServer
from holdfast.bench.recovery import CheckResult, Crew, Life
from holdfast.bench.report import Report, Results
from holdfast.bench.upstreams import PromptedUpstream
from tests.effort import examples
from tests.serving import default_chat, serving, wordy_engine

# A chat: what the client got, and what the server has


def _reply(*ids: int) -> dict[str, Any]:
    choice = {
        "message": {"content": "".join(f"<{id}>" for id in ids)},
        "meta_info": {"output_token_logprobs": [[-id / 8, id, None] for id in ids]},
    }
    return {"choices": [choice]}


REPLIES = [_reply(5, 6), _reply(7)]
TURNS = [ChatExchange(f"q{number}", json.dumps(reply).encode()) for number, reply in enumerate(REPLIES)]


def _on_record(*more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session and its samples, both turns and `more`: each has a prompt of two tokens."""
    replies = [*REPLIES, *more]
    messages, ids, mask, logprobs, tree = [], [], [], [], []
    for number, reply in enumerate(replies):
        content = reply["choices"][0]["message"]["content"]
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": content}]
        sampled = reply["choices"][0]["meta_info"]["output_token_logprobs"]
        ids += [1, 2, *(entry[1] for entry in sampled)]
        mask += [0, 0, *(1 for _ in sampled)]
        logprobs += [0.0, 0.0, *(entry[0] for entry in sampled)]
        tree.append({"is_current": True, "given_tokens": 2, "sampled_tokens": len(sampled)})
    shown = {
        "messages": messages,
        "records": [{"response": reply} for reply in replies],
        "metadata": {"accumulated_token_ids": ids, "tree": tree},
    }
    sample = {"tokens": ids, "loss_mask": mask[2:], "rollout_log_probs": logprobs[2:]}
    return json.loads(json.dumps(shown)), {"samples": [sample]}


def test_a_chat_that_is_all_there_is_neither_lost_nor_altered() -> None:
    found = compare_chat(TURNS, None, *_on_record())
    assert (found.num_turns, found.num_lost, found.num_altered, found.problem) == (2, 0, 0, "")
    assert not found.has_more


def test_the_turn_in_flight_may_be_on_record_or_not() -> None:
    assert not compare_chat(TURNS, ChatExchange("q2"), *_on_record()).problem
    found = compare_chat(TURNS, ChatExchange("q2"), *_on_record(_reply(9)))
    assert (found.has_more, found.problem) == (True, "")


@pytest.mark.parametrize("in_flight", [None, ChatExchange("something else")])
def test_a_turn_that_nobody_asked_for_is_an_alteration(in_flight: ChatExchange | None) -> None:
    assert compare_chat(TURNS, in_flight, *_on_record(_reply(9))).num_altered == 1


def _lose_the_last(shown: dict[str, Any], samples: dict[str, Any]) -> None:
    shown["records"].pop()
    del shown["messages"][2:]


def test_an_acknowledged_chat_turn_that_is_not_there_is_lost() -> None:
    shown, samples = _on_record()
    _lose_the_last(shown, samples)
    found = compare_chat(TURNS, ChatExchange("q2"), shown, samples)
    assert (found.num_lost, found.num_altered) == (1, 0)
    assert "1 of 2" in found.problem


def _change(path: list[Any], value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(shown: dict[str, Any], samples: dict[str, Any]) -> None:
        target: Any = {"shown": shown, "samples": samples}
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = value

    return change


ALTERATIONS = {
    "a question": _change(["shown", "messages", 0, "content"], "q?"),
    "a reply's text": _change(["shown", "messages", 3, "content"], "<8>"),
    "the record": _change(["shown", "records", 1, "response", "usage"], {}),
    "a token": _change(["shown", "metadata", "accumulated_token_ids", 2], 8),
    "a logprob in the samples": _change(["samples", "samples", 0, "rollout_log_probs", 0], -0.5),
    "the samples' mask": _change(["samples", "samples", 0, "loss_mask", 1], 0),
}


@pytest.mark.parametrize("change", ALTERATIONS.values(), ids=ALTERATIONS)
def test_whatever_of_a_chat_turn_differs_is_an_alteration(change: Callable[..., None]) -> None:
    shown, samples = _on_record()
    change(shown, samples)
    found = compare_chat(TURNS, None, shown, samples)
    assert (found.num_lost, found.num_altered) == (0, 1)
    assert found.problem


# Raw tokens

GIVEN = TokenTurn((1, 2))
SAMPLED = TokenTurn((3,), (Token(4, -0.5, -0.25), Token(5, -1.0, -1.0)))
STORED = [*GIVEN.tokens, *SAMPLED.tokens]


def test_tokens_that_are_all_there_are_neither_lost_nor_altered() -> None:
    assert compare_tokens([GIVEN, SAMPLED], None, STORED).problem == ""


def test_tokens_that_are_missing_are_lost_turn_by_turn() -> None:
    found = compare_tokens([GIVEN, SAMPLED], None, STORED[:-1])
    assert (found.num_lost, found.num_altered) == (1, 0)
    assert compare_tokens([GIVEN, SAMPLED], None, []).num_lost == 2


@pytest.mark.parametrize("token", [Token(6, -0.5, -0.25), Token(4, -0.5000001, -0.25), Token(4, -0.5, -0.3), Token(4)])
def test_a_token_or_a_logprob_that_differs_is_an_alteration(token: Token) -> None:
    stored = STORED[:]
    stored[3] = token
    assert compare_tokens([GIVEN, SAMPLED], None, stored).num_altered == 1


def test_of_a_stream_that_broke_off_what_was_streamed_begins_what_is_on_record() -> None:
    streamed = TokenTurn((7,), (Token(8, -1.0, -1.0),))
    more = [Token(7), Token(8, -1.0, -1.0), Token(9, -2.0, -2.0)]
    found = compare_tokens([GIVEN], streamed, [*GIVEN.tokens, *more])
    assert (found.has_more, found.problem) == (True, "")
    assert compare_tokens([GIVEN], streamed, [*GIVEN.tokens, Token(7), Token(9, -2.0, -2.0)]).num_altered == 1
    assert compare_tokens([GIVEN], None, [*GIVEN.tokens, Token(7)]).num_altered == 1


# Agents


@pytest.mark.parametrize("kind", [ChatAgent, TokenAgent])
async def test_a_server_that_cannot_be_reached_is_gone(kind: type[ChatAgent | TokenAgent]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        async with connected(RunningServer(f"http://{address}", address, 0)) as clients:
            with pytest.raises(ServerGone):
                await kind(reply_tokens=1, seed=0).turn(clients)


@pytest.mark.parametrize("kind", [ChatAgent, TokenAgent])
async def test_an_error_of_the_server_is_an_unexpected_response(kind: type[ChatAgent | TokenAgent]) -> None:
    async with (
        serving(wordy_engine(), default_chat()) as server,
        connected(RunningServer(f"http://{server.http}", server.address, 0)) as clients,
    ):
        agent = kind(reply_tokens=1, seed=0)
        agent.session_id = "unknown"
        with pytest.raises(UnexpectedResponse, match="session_not_found"):
            await agent.turn(clients)


# Gates


def test_kills_without_a_turn_in_flight_do_not_count() -> None:
    assert under_load("g", [9.0, 1.0], 2).passed
    assert not under_load("g", [9.0, 0.0], 2).passed
    assert not under_load("g", [0.0] * 200, 2).passed
    assert not under_load("g", [], 0).passed


def test_some_missing_or_none_at_all_fails() -> None:
    assert none_missing("g", 3, 3).passed
    assert not none_missing("g", 2, 3).passed
    assert not none_missing("g", 4, 3).passed
    assert not none_missing("g", 0, 0).passed


def _measured(**changes: float) -> Report:
    results = Results("recovery", "", {"kills": 2, "embedded_kills": 0})
    found = {"compared": 10.0, "lost": 0.0, "altered": 0.0, "continued": 4.0, "stuck": 0.0, "refused": 0.0}
    found |= {"compared_at_the_end": 5.0, "acknowledged_at_the_end": 5.0, "exit_codes": 0.0, "in_flight": 3.0}
    for name, value in (found | changes).items():
        if name != "in_flight":
            results.extend(f"canned/{name}", "", [value])
    for _ in range(2):
        results.figure("canned/in_flight_at_kill", "", (found | changes)["in_flight"])
    return results.report


def _failed(report: Report) -> set[str]:
    return {gate.name.removeprefix("canned/") for gate in recovery.judge(report) if not gate.passed}


def test_recovery_is_judged_by_all_that_can_go_wrong() -> None:
    assert not _failed(_measured())
    assert _failed(_measured(lost=1.0)) == {"nothing_lost"}
    assert _failed(_measured(altered=1.0)) == {"nothing_altered"}
    assert _failed(_measured(stuck=1.0)) == _failed(_measured(refused=1.0)) == {"every_session_goes_on"}
    assert _failed(_measured(compared_at_the_end=4.0)) == {"all_compared_at_the_end"}
    assert _failed(_measured(in_flight=0.0)) == {"killed_under_load"}
    assert _failed(_measured(exit_codes=1.0)) == {"stops_cleanly_at_the_end"}
    nothing = Report(scenario="recovery", command="", started_at="", settings={"kills": 2, "embedded_kills": 0})
    assert len(_failed(nothing)) == 6


class _FakeCrew:
    """Lives as they are told; no server."""

    num_turns = 7

    def __init__(self, in_flight: list[int]) -> None:
        self.in_flight = in_flight
        self.num_interrupted = 0

    async def live(self, least_s: float, most_s: float) -> Life:
        checked = CheckResult(num_sessions=2, num_turns=3)
        return Life(start_s=1.0, num_turns=4, in_flight=self.in_flight.pop(0), check=checked, refused=())

    async def die_at_start(self, most_s: float) -> None:
        self.num_interrupted += 1

    async def check_all(self) -> tuple[CheckResult, int]:
        return CheckResult(num_sessions=2, num_turns=7), 0


async def _tried(in_flight: list[int], wanted: int) -> tuple[Report, _FakeCrew]:
    settings = recovery.RecoverySettings(kills=wanted, embedded_kills=0)
    results = Results("recovery", "", {"kills": wanted, "embedded_kills": 0})
    crew: Any = _FakeCrew(in_flight)
    await recovery.Trial("canned", settings, results, crew).run()
    return results.report, crew


async def test_a_kill_that_met_no_turn_is_tried_again_and_one_start_in_ten_is_killed_too() -> None:
    report, crew = await _tried([3] * 6 + [0] + [2] * 6, 12)
    assert not _failed(report)
    assert report.figures["canned/in_flight_at_kill"].values.count(0.0) == 1
    assert crew.num_interrupted == 1


async def test_a_run_without_turns_in_flight_ends_and_fails() -> None:
    report, _ = await _tried([0] * 6, 3)
    assert _failed(report) == {"killed_under_load"}


# The real thing: both doors, an upstream, kill -9


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    settings = recovery.RecoverySettings(chats=3, token_sessions=2)
    async with PromptedUpstream(delay_s=0.001) as upstream:
        crew = Crew(
            lambda number: recovery.make_agent(settings, number),
            size=5,
            max_turns=10,
            flags=["--backend", "sglang", "--upstream", upstream.url, "--data-dir", str(tmp_path)],
            seed=1,
        )
        for _ in range(examples(2)):
            life = await crew.live(0.3, 0.8)
            assert not life.refused
            assert life.in_flight > 0
            assert life.num_turns > 5
            assert not life.check.problems
        _forget_two_turns(tmp_path)
        checked, code = await crew.check_all()
        assert checked.num_lost in (1, 2)  # one of the two may have been in flight
        assert (checked.num_altered, checked.num_stuck, code) == (0, 0, 0), checked.problems
        assert checked.num_turns > 10


def _forget_two_turns(data: Path) -> None:
    """As if the last turns of a chat had never been recorded: the harness must find out."""
    connection = sqlite3.connect(data / "journal.db")
    with connection:
        longest = "(SELECT session FROM turns GROUP BY session ORDER BY count(*) DESC LIMIT 1)"
        steps = f"SELECT step FROM turns WHERE session = {longest} ORDER BY step DESC LIMIT 2"
        connection.execute(f"DELETE FROM turns WHERE step IN ({steps})")
    connection.close()
