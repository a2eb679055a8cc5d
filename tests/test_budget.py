"""Chats in front of an upstream with --context-budget: what it gets of a long path, and the samples of what it got."""

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chats.samples.assembly import Options, assemble
from holdfast.chats.samples.certificate import problems
from holdfast.chats.samples.formats import Format, decode, encode
from holdfast.chats.samples.sample import Export, Sample
from holdfast.chats.samples.trainers import to_trl
from holdfast.chats.tree import Tree
from holdfast.config import ServeConfig, UpstreamConfig, check_upstream
from holdfast.errors import ConfigError
from holdfast.sessions.record import View
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import flat_rows
from tests.effort import examples
from tests.relaying import Relay, relaying
from tests.serving import default_chat
from tests.talking import chat_path, open_session, refusal_of
from tests.test_relay import chats_of, chatting, fake_upstream
from tests.test_samples import SESSION, attach, trees

BUDGET = 120
SYSTEM = {"role": "system", "content": "Answer in few words."}
END = 2  # of a turn, in the default model's vocabulary


@contextlib.asynccontextmanager
async def before(upstream: FakeSGLang, **options: Any) -> AsyncIterator[Relay]:
    options = {"context_budget": BUDGET} | options
    async with relaying(upstream.url, default_chat(), upstream.model.vocab_size, **options) as relay:
        yield relay


class Talk:
    """A conversation as its client has it."""

    def __init__(self, relay: Relay, upstream: FakeSGLang, session: str, messages: Sequence[Any] = (SYSTEM,)) -> None:
        self.relay, self.upstream, self.session, self.messages = relay, upstream, session, [*messages]

    async def say(self, text: str, reply: Sequence[int] = (), **fields: Any) -> httpx.Response:
        if reply:
            self.upstream.model.scripted.append([*reply])
        body = {"messages": [*self.messages, {"role": "user", "content": text}], "max_tokens": 9, **fields}
        response = await self.relay.http.post(chat_path(self.session), json=body)
        if response.status_code == 200:
            answer = response.json()["choices"][0]["message"]
            kept = {name: answer[name] for name in ("role", "content") if name in answer}
            self.messages += [body["messages"][-1], kept]
        self.upstream.model.scripted.clear()
        return response

    def forget(self) -> None:
        """The last turn."""
        del self.messages[-2:]

    async def records(self) -> list[dict[str, Any]]:
        return list((await self.relay.http.get(f"/sessions/{self.session}")).json()["records"])


def spoken(rng: random.Random) -> tuple[str, list[int]]:
    """What is said, and the reply's tokens, which may lack an end."""
    words = " ".join(rng.choice(["file", "tree", "seven", "blue", "wind"]) for _ in range(rng.randint(1, 12)))
    return words, [*(rng.randint(100, 2000) for _ in range(rng.randint(1, 7))), *([END] if rng.random() < 0.7 else [])]


def expected_prompts(turns: Sequence[tuple[list[int], list[int]]], pinned: int, budget: int) -> Iterator[list[int]]:
    """What each turn's prompt must be, worked out from the tokens of the path alone."""
    path: list[int] = []
    starts: list[int] = []  # where each turn begins, after the token that closes the reply before it
    first = pinned
    for given_tokens, sampled in turns:
        new = [*path, *given_tokens]
        begin = len(path) + (given_tokens[0] == END)
        if pinned + len(new) - first > budget:
            fits = [
                start
                for start in starts[1:]
                if start > first and len(path) - start <= budget // 2 and pinned + len(new) - start <= budget
            ]
            first = min(fits, default=begin)
        starts.append(begin)
        yield new[:pinned] + new[first:]
        path = new + sampled


def pinned_tokens() -> int:
    return len(default_chat().model.continuation.opening([SYSTEM]).ids)


async def check_path(talk: Talk, received: Sequence[list[int]]) -> int:
    """Every prompt on the path is the one that follows from it, and the upstream got it. Returns how many views."""
    records = await talk.records()
    state = (await talk.relay.http.get(f"/sessions/{talk.session}")).json()
    ids, tree = state["metadata"]["accumulated_token_ids"], {one["turn"]: one for one in state["metadata"]["tree"]}
    turns, at = [], 0
    for record in records:
        one = tree[record["turn"]]
        middle = at + one["given_tokens"]
        turns.append((ids[at:middle], ids[middle : middle + one["sampled_tokens"]]))
        at = middle + one["sampled_tokens"]
    prompts = list(expected_prompts(turns, pinned_tokens(), BUDGET))
    assert [record["request"]["input_ids"] for record in records] == prompts
    assert max(map(len, prompts)) <= BUDGET
    assert all(prompt in received for prompt in prompts)
    return len({tuple(prompt[: pinned_tokens() + 8]) for prompt in prompts})


def check_samples(export: Export, upstream: FakeSGLang, prompts: dict[int, list[int]]) -> None:
    """Each turn is trained once, after just the prompt that it was sampled from, with the logprobs of that prompt: the
    fake's distribution is a hash of all that it is given."""
    assert problems(export) == []
    trained: list[int] = []
    for sample in export.samples:
        for turn in sample.turns:
            assert sample.tokens[: turn.sampled_start].tolist() == prompts[turn.number]
            if not turn.num_trained:
                continue
            trained.append(turn.number)
            for at in range(turn.sampled_start, turn.end):
                history, token = sample.tokens[:at].tolist(), int(sample.tokens[at])
                (drawn,) = [upstream.model._draw(history, {}, token)]
                assert sample.rollout_log_probs[at - sample.response_start] == pytest.approx(drawn.logprob, abs=1e-9)
    assert sorted(trained) == sorted(prompts)
    form = decode(encode(export, Format.JSON))
    assert [one.turns for one in form.samples] == [one.turns for one in export.samples]
    told = to_trl(export.samples)
    for prompt, completion, sample in zip(told["prompt_ids"], told["completion_ids"], export.samples, strict=True):
        assert prompt + completion == sample.tokens.tolist()


async def export_of(talk: Talk, **fields: Any) -> Export:
    response = await talk.relay.http.post(f"/sessions/{talk.session}/samples", json=fields)
    assert response.status_code == 200, response.text
    return decode(response.content)


def received_by(upstream: FakeSGLang) -> list[list[int]]:
    paths = ("/v1/chat/completions", "/generate")
    return [seen.json["input_ids"] for seen in upstream.requests if seen.path in paths]


@pytest.mark.parametrize(("api", "history"), [("chat", "strict"), ("generate", "forest")])
async def test_prompts_follow_from_the_path_alone_through_forks_retries_and_a_restart(
    tmp_path: Path, api: str, history: str
) -> None:
    rng = random.Random(f"{api} {history}")
    async with fake_upstream() as upstream:
        options = {"upstream_api": api, "data_dir": str(tmp_path)}
        async with before(upstream, **options) as relay:
            talk = Talk(relay, upstream, await open_session(relay.http, history=history))
            for index in range(14):
                if index % 7 == 6:
                    talk.forget()
                answer = await talk.say(*spoken(rng))
                assert answer.status_code == 200, answer.text
            state = (await relay.http.get(f"/sessions/{talk.session}")).json()
            hidden = int(answer.headers["holdfast-dropped-tokens"])
            assert state["dropped_tokens"] == hidden
            assert state["dropped_range"] == [pinned_tokens(), pinned_tokens() + hidden]
            assert hidden == len(await whole_prompt(talk)) - len(received_by(upstream)[-1]) > 0
            forked = (await relay.http.post(f"/sessions/{talk.session}/fork")).json()["session_id"]
        async with before(upstream, **options) as relay:
            talk.relay = relay
            fork = Talk(relay, upstream, forked, talk.messages)
            words, reply = spoken(rng)
            for one in (talk, fork):  # both get the same prompt
                assert (await one.say(words, reply)).status_code == 200
                for _ in range(3):
                    assert (await one.say(*spoken(rng))).status_code == 200
            for one in (talk, fork):
                assert await check_path(one, received_by(upstream)) > 2
            tree = (await relay.http.get(f"/sessions/{talk.session}")).json()["metadata"]["tree"]
            export = await export_of(talk, branch="all", format="json")
    assert [turn.number for turn in export.samples[0].turns][:1] == [1]
    assert len({turn.number for sample in export.samples for turn in sample.turns}) == len(tree)


async def whole_prompt(talk: Talk) -> list[int]:
    state = (await talk.relay.http.get(f"/sessions/{talk.session}")).json()
    last = state["metadata"]["tree"][-1]["sampled_tokens"]
    ids: list[int] = state["metadata"]["accumulated_token_ids"]
    return ids[: len(ids) - last]


async def test_each_turn_is_trained_once_after_the_prompt_that_it_was_sampled_from() -> None:
    rng = random.Random(1)
    async with chatting(context_budget=BUDGET) as (relay, upstream):
        talk = Talk(relay, upstream, await open_session(relay.http, history="forest"))
        prompts: dict[int, list[int]] = {}
        for index in range(16):
            if index in (7, 12):
                talk.forget()
                talk.forget()
            assert (await talk.say(*spoken(rng), temperature=1.0)).status_code == 200
            prompts[index + 1] = chats_of(upstream)[-1]["input_ids"]
        export = await export_of(talk, branch="all")
        check_samples(export, upstream, prompts)
        tip = await export_of(talk)
        limited = await export_of(talk, branch="all", max_seq_len=BUDGET)
    assert problems(tip) == []
    assert len(tip.samples) > 1
    views = [sample.metadata.get("holdfast", {}).get("view") for sample in tip.samples]
    assert views[0] is None
    assert all(view["pinned"] == pinned_tokens() < view["start"] for view in views[1:])
    assert problems(limited) == []
    assert max(len(sample.tokens) for sample in limited.samples) <= BUDGET


async def test_routed_experts_are_asked_for_anew_after_a_cut_and_fill_every_sample() -> None:
    rng = random.Random(2)
    async with chatting(context_budget=BUDGET, routed_experts=flat_rows, routing_replay="additional") as (
        relay,
        upstream,
    ):
        talk = Talk(relay, upstream, await open_session(relay.http))
        for _ in range(12):
            assert (await talk.say(*spoken(rng))).status_code == 200
        sent = chats_of(upstream)
        export = await export_of(talk)
    known, last = 0, list[int]()
    for request in sent:
        prompt = request["input_ids"]
        assert request["routed_experts_start_len"] == (known if prompt[: len(last)] == last else 0)
        last, known = prompt, len(prompt) + len(talk_reply(sent, request, export)) - 1
    assert len(export.samples) > 1
    for sample in export.samples:
        rows = sample.rollout_routed_experts
        assert rows is not None
        assert rows.shape == (len(sample.tokens) - 1, 6)


def talk_reply(sent: list[dict[str, Any]], request: dict[str, Any], export: Export) -> list[int]:
    number = sent.index(request) + 1
    sample, turn = next((one, turn) for one in export.samples for turn in one.turns if turn.number == number)
    return sample.tokens[turn.sampled_start : turn.end].tolist()


async def test_a_turn_beyond_the_budget_is_refused_and_leaves_the_session_as_it_was() -> None:
    async with chatting(context_budget=BUDGET) as (relay, upstream):
        talk = Talk(relay, upstream, await open_session(relay.http))
        for text in ("wind " * 200, "wind " * (BUDGET - 8)):
            for fields in ({}, {"truncation": "auto"}):
                assert refusal_of(await talk.say(text, **fields)) == (400, "context_length_exceeded")
        assert (await talk.say("Hello", [500, END])).status_code == 200
        assert refusal_of(await talk.say("wind " * (BUDGET - 8))) == (400, "context_length_exceeded")
        assert (await talk.say("wind " * (BUDGET - 40), [500, END])).status_code == 200
        assert len(chats_of(upstream)) == 2
        assert len(await talk.records()) == 2


async def test_what_a_view_leaves_out_is_quoted_where_it_is_asked_for_and_never_trained() -> None:
    secret = "The key of the archive is under the third flowerpot."
    asked = "Where is the key of the archive?"
    async with chatting(context_budget=400) as (relay, upstream):
        rng, talks = random.Random(3), []
        for fields in ({"recall": {"tokens": 96}}, {}):
            talk = Talk(relay, upstream, await open_session(relay.http, **fields))
            await talk.say(secret, [500, END])
            for _ in range(24):
                await talk.say(spoken(rng)[0], [500, END])
            answer = await talk.say(asked, [500, END])
            prompt = default_chat().model.tokenizer.decode(chats_of(upstream)[-1]["input_ids"])
            talks.append((answer.headers.get("holdfast-recalled-tokens"), "third flowerpot" in prompt))
            if fields:
                export = await export_of(talk)
                letters = [default_chat().model.tokenizer.encode_plain(letter)[0] for letter in "ast"]
                plain = (await relay.http.get(f"/sessions/{talk.session}")).json()["metadata"]
                await talk.say("Good.", [*letters, END])  # the tokenizer would make one token of them
                spelled = (await relay.http.get(f"/sessions/{talk.session}")).json()["metadata"]
        assert max(map(len, received_by(upstream))) <= 400
    (num_recalled, is_quoted), (none, is_there) = talks
    assert (is_quoted, is_there, none) == (True, False, None)
    sample = export.samples[-1]
    start, length = sample.turns[-1].recalled
    assert length == int(num_recalled or 0)
    assert "third flowerpot" in default_chat().model.tokenizer.decode(sample.tokens[start : start + length].tolist())
    assert [sample.turns[-1].number, start, length] in sample.metadata["holdfast"]["recalled"]
    assert sample.turns[-1].start <= start < start + length <= sample.turns[-1].sampled_start
    assert problems(export) == []
    assert (export.session_metadata["tito_session_mismatch"], plain["tito_session_mismatch"]) == ([], None)
    where, ids = spelled["tito_session_mismatch"]["position"], spelled["accumulated_token_ids"]
    assert ids[where:] == [*letters, END]


async def test_messages_beside_the_ids_are_those_in_view_and_what_they_answer() -> None:
    async with chatting(context_budget=BUDGET) as (relay, upstream):
        session = await open_session(relay.http)
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Look around."}]
        for index in range(10):
            upstream.model.scripted.append([500, END])
            reply = await relay.http.post(chat_path(session), json={"messages": messages, "max_tokens": 9})
            assert reply.status_code == 200, reply.text
            answer = reply.json()["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": f"{index} " * 9},
            ]
        sent = chats_of(upstream)[-1]
        record = (await relay.http.get(f"/sessions/{session}")).json()["records"][-1]
    assert record["request"] == sent
    roles = [message["role"] for message in sent["messages"]]
    assert roles[:3] == ["system", "user", "assistant"]
    assert len(roles) < len(messages) - 1
    assert sent["messages"][-2:] == messages[-4:-2]


@settings(max_examples=examples(60))
@given(trees(), st.data(), st.none() | st.integers(1, 20), st.sampled_from(["tip", "all"]))
def test_samples_of_any_views_hold_the_prompts_that_were_sent(
    tree: Tree, data: st.DataObject, limit: int | None, branch: str
) -> None:
    seen = Tree()
    for node in tree.nodes:
        parent = seen.nodes[node.turn.parent - 1] if node.turn.parent else seen.root
        inherited = st.just(parent.turn.facts.view)
        pinned = data.draw(st.integers(0, parent.end))
        views = st.builds(View, st.just(pinned), st.integers(pinned, parent.end))
        view = data.draw(inherited | views if parent.end else st.none())
        attach(seen, parent, list(node.turn.given), list(node.turn.sampled), view=view)
    export = assemble(seen, Options(branch=branch, max_seq_len=limit), SESSION)
    assert problems(export) == []
    trained: list[int] = []
    for sample in export.samples:
        trained += [turn.number for turn in sample.turns if turn.num_trained]
        assert limit is None or len(sample.tokens) <= limit
        for turn in sample.turns:
            check_turn(sample, turn.number, seen)
    nodes = seen.nodes if branch == "all" else seen.tip.path()
    if limit is None:
        assert sorted(trained) == [node.number for node in sorted(nodes, key=lambda n: n.number) if node.turn.sampled]


def check_turn(sample: Sample, number: int, tree: Tree) -> None:
    node = tree.nodes[number - 1]
    assert node.parent is not None
    turn = next(turn for turn in sample.turns if turn.number == number)
    view = node.turn.facts.view or View(0, 0)
    prompt = node.parent.ids() + list(node.turn.given)
    assert sample.tokens[: turn.sampled_start].tolist() == prompt[: view.pinned] + prompt[view.start :]
    assert sample.tokens[turn.sampled_start : turn.end].tolist() == list(node.turn.sampled)[: turn.num_sampled]
    mask = np.zeros(len(sample.tokens), np.uint8)
    mask[sample.response_start :] = sample.loss_mask
    assert mask[turn.sampled_start : turn.end].all() == (turn.num_trained > 0 or not turn.num_sampled)


def test_a_budget_needs_an_upstream() -> None:
    with pytest.raises(ConfigError, match="--context-budget needs an --upstream"):
        check_upstream(ServeConfig(), UpstreamConfig(context_budget=1000))
