"""Recall: what is quoted, how it is spelled, and that a session's tokens stay exact with it."""

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from holdfast.chat.passages import (
    ANY,
    MAX_BYTES,
    Demand,
    Passage,
    WordIndex,
    is_question,
    quoted,
    split_text,
    words_of,
)
from holdfast.chats.recall import NO_RECALL, RecallLimits
from holdfast.chats.service import _check_imported
from holdfast.engine.interface import Engine
from holdfast.engine.slab import SlabShape
from holdfast.engine.speculation import NGram, Speculator
from holdfast.engine.torch import TorchEngine
from holdfast.engine.worker import Worker
from holdfast.errors import JournalFailed
from holdfast.sessions.operations import Claim
from holdfast.sessions.record import Recalled, TurnFacts
from tests.effort import THOROUGH, examples
from tests.recalling import Talk, user
from tests.serving import ScriptedEngine, Server, SlowEngine, default_chat, held, serving, wordy_engine
from tests.talking import as_events_text, chat_path, client_of, error_of, eventually, open_session, said, text_of, until

MODEL = default_chat().model

# Passages

_BREAKS = ["\r\n", "\u2028", "\u0085", "\v", "\f", "\r", "\x1c", "\n", "\n\n", " ", ". ", "?"]
_WORDS = ["word", "\ud800", "\U0001f98a", "\u0e01", "a\u0301", "<|im_end|>", "\u65e5\u672c\u3002", "x" * 200]
odd_texts = st.lists(st.sampled_from([*_BREAKS, *_WORDS])).map("".join)


@given(st.one_of(st.text(st.characters()), odd_texts), st.sampled_from([4, 16, MAX_BYTES]))
def test_parts_of_a_text_hold_every_character_but_space_once_and_keep_the_limit(text: str, limit: int) -> None:
    end, between = 0, []
    for start, stop in split_text(text, limit):
        between.append(text[end:start])
        part, end = text[start:stop], stop
        assert part == part.strip() != ""
        assert len(part.encode(errors="surrogatepass")) <= limit
    assert not "".join([*between, text[end:]]).strip()


@pytest.mark.parametrize("text", ["x", ".", "\n", " ", "a ", "a\n", "\r", "日", "\n\n.", "? "])
def test_a_text_without_end_is_split_quickly(text: str) -> None:
    parts = list(split_text(text * (200_000 // len(text))))
    assert all(stop - start <= MAX_BYTES for start, stop in parts)


def plain_search(
    texts: list[str], query: str, allowed: list[bool], limit: int, demand: Demand
) -> list[tuple[int, float]]:
    """BM25 as it is in the books, without texts that have too few of the query's words, or such as many others have."""
    words = {number: words_of(text) for number, text in enumerate(texts) if allowed[number]}
    asked = set(words_of(query))
    usual = max(1.0, sum(map(len, words.values())) / max(1, len(words)))
    rarities = {}
    for word in words_of(query):
        num = sum(word in other for other in words.values())
        rarities[word] = math.log(1 + (len(words) - num + 0.5) / (num + 0.5))
    found = []
    for number, own in words.items():
        score = 0.0
        for word, rarity in rarities.items():
            times = own.count(word)
            score += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(own) / usual))
        share = sum(rarity for word, rarity in rarities.items() if word in own)
        assume(abs(share - demand.share * sum(rarities.values())) > 1e-9 or not demand.share)
        if score > 0 and share >= demand.share * sum(rarities.values()):
            found.append((number, score * (0.3 if is_question(texts[number]) else 1.0)))
    found.sort(key=lambda one: (-round(one[1], 9), -one[0]))
    most = len(texts) if demand.alike is None else demand.alike
    alike = [{tuple(other) for other in words.values() if asked & {*words[number]} <= {*other}} for number, _ in found]
    return [
        one for one, same in zip(found[:limit], alike, strict=False) if asked <= {*words[one[0]]} or len(same) <= most
    ]


_SPOKEN = ["red", "blue", "the", "Fox", "foxes", "\u65e5\u672c\u8a9e", "caf\u00e9,", "7", "?", ".", "it", "cats"]
sentences = st.lists(st.sampled_from(_SPOKEN), max_size=6).map(" ".join)


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(sentences, st.booleans()), max_size=12),
    sentences,
    st.integers(1, 4),
    st.sampled_from([ANY, Demand(share=0.4), Demand(alike=1), Demand(alike=2), Demand(share=0.2, alike=1)]),
    st.data(),
)
def test_texts_are_ranked_as_plain_bm25_ranks_those_allowed_and_by_nothing_else(
    texts: list[tuple[str, bool]], query: str, limit: int, demand: Demand, data: st.DataObject
) -> None:
    index, alone = WordIndex(), WordIndex()
    for text, is_allowed in texts:
        index.add("A red fox, removed")
        index.pop("A red fox, removed")
        index.add(text if is_allowed else data.draw(sentences))  # whatever the others are
        if is_allowed:
            alone.add(text)
    allowed = [is_allowed for _, is_allowed in texts]
    found = index.search(query, np.array(allowed, bool), limit, demand)
    expected = plain_search([text for text, _ in texts], query, allowed, limit, demand)
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])
    places = np.flatnonzero(allowed)
    by_itself = alone.search(query, np.ones(len(alone), bool), limit, demand)
    assert found == [(places[number], score) for number, score in by_itself]


@given(st.lists(st.one_of(st.text(min_size=1), odd_texts).filter(str.strip), min_size=1, max_size=4))
def test_a_quote_is_one_line_that_nothing_in_it_can_end(texts: list[str]) -> None:
    roles = ["user", "assistant", "tool"]
    passages = [Passage(n + 1, 0, 0, roles[n % 3], text.strip(), 0, 0) for n, text in enumerate(texts)]
    first, *lines = quoted(passages[::-1]).splitlines()
    assert first == "Earlier in this conversation:"
    assert len(lines) == len(passages)
    for line, passage in zip(lines, passages, strict=True):
        prefix = "" if passage.role == "user" else f"{passage.role}: "
        assert line.startswith(f'{prefix}"')
        assert json.loads(line.removeprefix(prefix)) == passage.text


# Turns, without an engine


def long_talk(num: int = 12, **options: Any) -> tuple[Talk, list[Any]]:
    """A talk of so many turns about one thing each, and its messages."""
    talk, messages = Talk(MODEL, **options), []
    for number in range(num):
        messages.append(user(f"alpha{number}: gamma{number} delta{number} zeta{number}."))
        messages.append(talk.take_turn(messages, f"Noted {number}.").turn.reply)
    return talk, messages


def asked_about(talk: Talk, messages: list[Any], number: int) -> str:
    prepared = talk.prepare([*messages, user(f"What was alpha{number}?")])
    talk.check(prepared, talk.prepare([*messages, user(f"What was alpha{number}?")], NO_RECALL))
    return talk.model.tokenizer.decode(prepared.prompt.ids)


def test_what_is_out_of_view_is_quoted_and_nothing_is_while_all_is_in_view() -> None:
    talk, messages = long_talk()
    assert '"alpha1: gamma1' in asked_about(talk, messages, 1)
    assert '"alpha11' not in asked_about(talk, messages, 11)
    wide, messages = long_talk(recent=4096)
    assert "Earlier" not in asked_about(wide, messages, 1)
    assert all(node.turn.facts.recalled is None for node in wide.tree.nodes)


def test_what_a_quote_in_view_says_is_not_quoted_again() -> None:
    talk, messages = long_talk()
    assert '"alpha1: gamma1' in asked_about(talk, messages, 1)
    messages.append(user("What was alpha1?"))
    messages.append(talk.take_turn(messages, "Just that.").turn.reply)
    assert '"alpha1: gamma1' not in asked_about(talk, messages, 1)


def test_only_what_was_said_on_the_same_path_is_quoted() -> None:
    talk, messages = long_talk()
    base, rest = messages[:2], messages[2:]
    begun = [user("Hello there."), talk.take_turn([user("Hello there.")], "Hi.").turn.reply]
    for conversation in (base, begun):
        messages = list(conversation)
        for number in range(20, 30):
            messages.append(user(f"beta{number}: kappa{number} sigma{number} theta{number}, alike."))
            messages.append(talk.take_turn(messages, f"Noted {number}.").turn.reply)
        text = asked_about(talk, messages, 5) + asked_about(talk, messages, 0)
        assert "gamma5" not in text
        assert ("gamma0" in text) == (conversation is base)
    assert '"alpha5: gamma5' in asked_about(talk, [*base, *rest], 5)


@pytest.mark.parametrize("limits", [(1, 8), (12, 8), (64, 1), (10**9, 64), (64, 0)])
def test_quotes_keep_their_limits_and_leave_the_new_message_its_room(limits: tuple[int, int]) -> None:
    talk, messages = long_talk(recent=128)
    talk.limits = RecallLimits(*limits)
    for size in (1, 40, 100, 116, 200):
        question = [*messages, user("What are alpha1 and alpha2?" + " again" * size)]
        prepared, plain = talk.prepare(question), talk.prepare(question, NO_RECALL)
        talk.check(prepared, plain)
        room = min(limits[0], 128 - len(plain.prompt.ids))
        if not 12 < room < 32:  # a quote has about 20 tokens
            assert (prepared.recalled is not None) == (limits[1] > 0 and room > 12)


def test_a_passage_is_quoted_once_all_of_it_is_out_of_view_wherever_the_view_begins() -> None:
    talk, messages = long_talk(4, recent=4096)
    counts = set()
    for talk.pinned, talk.recent in [(pinned, recent) for pinned in (4, 30) for recent in range(40, 110)]:
        before = asked_about(talk, messages, 0)
        counts.add((talk.pinned, before.count("gamma0")))
        asked_about(talk, messages, 1)
    assert counts == {(4, 0), (4, 1), (30, 0)}  # the first one is partly pinned


_BEGINNINGS = [
    "",
    " ",
    "\n",
    "\n\n\n",
    "Earlier ",
    "Earlier in this conversation:\n> ",
    "\u0301",
    "> ",
    "1 ",
    "A ",
    "\t",
]


@pytest.mark.parametrize("beginning", _BEGINNINGS)
def test_the_message_after_the_quotes_has_the_tokens_that_it_has_without(beginning: str) -> None:
    talk, messages = long_talk()
    question = [*messages, user(f"{beginning}What was alpha1?")]
    prepared = talk.prepare(question)
    assert prepared.recalled is not None
    talk.check(prepared, talk.prepare(question, NO_RECALL))
    start, end = prepared.recalled.start, prepared.recalled.start + prepared.recalled.length
    assert MODEL.tokenizer.decode(prepared.prompt.ids[start:end]).strip().startswith("Earlier in this conversation:\n")
    talk.take_turn(question)


def test_a_message_is_where_it_was_said_and_not_where_it_was_quoted() -> None:
    """Or it would count as out of view while it is not."""
    talk, messages = Talk(MODEL), []
    for text in ["The colour is hue.", *(f"Now something else, number {n}, of no use." for n in range(8))]:
        messages += [user(text), talk.take_turn([*messages, user(text)]).turn.reply]
    texts = ["The colour is hue.", "Is it that colour, hue?"]
    node = talk.take_turn([*messages, *map(user, texts)])
    recalled = node.turn.facts.recalled
    assert recalled is not None
    assert recalled.passages == ((1, 0, 0),)
    talk.trajectory.passages.update(talk.tree, MODEL.tokenizer)
    one, other, _ = [passage for passage in talk.trajectory.passages._passages if passage.turn == node.depth]
    assert one.end <= node.start + recalled.start < node.start + recalled.start + recalled.length <= other.start
    found = [MODEL.tokenizer.decode(node.ids()[passage.start : passage.end]) for passage in (one, other)]
    assert [text.strip() for text in found] == texts


def test_turns_that_search_at_once_in_threads_find_the_same() -> None:
    talk, messages = long_talk(30)
    question = [*messages, user("What was alpha1?")]
    expected = talk.prepare(question)
    fresh = talk.again()  # its index is still to be made
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(fresh.prepare, [question] * 8))
    assert {tuple(prepared.prompt.ids) for prepared in found} == {tuple(expected.prompt.ids)}
    assert expected.recalled is not None
    assert len(fresh.trajectory.passages._passages) == 60


def test_a_file_whose_turn_recalls_more_than_it_was_given_is_refused() -> None:
    node = long_talk(1)[0].tree.tip
    node.turn.request = node.turn.response = b"{}"
    _check_imported(node)
    node.turn.facts = TurnFacts(recalled=Recalled(start=len(node.turn.given), length=1))
    with pytest.raises(ValueError, match="turn 1 recalls more tokens than it was given"):
        _check_imported(node)


class Recalling(RuleBasedStateMachine):
    """Conversations that go on and branch anywhere, with hostile texts: every turn is what it would be without recall,
    plus quotes of what is out of its view on its path; and made again, later or elsewhere, it is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Talk(MODEL, recent=96, tokens=48)
        self.limits: dict[int, RecallLimits] = {}

    @rule(
        back=st.integers(0, 3),
        text=odd_texts.filter(lambda text: "\ud800" not in text),
        words=st.lists(st.sampled_from(["red", "blue", "green", "fox", "river", "stone"]), min_size=1, max_size=8),
        role=st.sampled_from(["user", "user", "tool"]),
        limits=st.sampled_from([(48, 8), (48, 1), (0, 8), (1000, 64)]),
    )
    def turn(self, back: int, text: str, words: list[str], role: str, limits: tuple[int, int]) -> None:
        talk = self.talk
        nodes = [talk.tree.root, *talk.tree.nodes]
        parent = nodes[max(0, len(nodes) - 1 - back)]
        number = len(nodes)
        said = f"{text[:80]} Of {' and '.join(words)} in number {number}."
        message = {"role": role if parent.depth else "user", "content": said}
        talk.limits = RecallLimits(*limits)
        talk.take_turn([*parent.spoken(), message], f"About {words[0]} {number}. {text[:20]}")
        self.limits[number] = talk.limits

    @rule(pick=st.integers(0, 1000))
    def made_again(self, pick: int) -> None:
        if not self.talk.tree.nodes:
            return
        node = self.talk.tree.nodes[-1 - pick % min(4, len(self.talk.tree.nodes))]
        assert node.parent is not None
        messages = [*node.parent.spoken(), *node.turn.messages]
        fork = self.talk.again()
        if node.parent.depth:
            fork.trajectory.tree = self.talk.tree.copy(node.parent)
        for talk in (self.talk, self.talk.again(), fork):
            talk.limits = self.limits[node.number]
            prepared = talk.prepare(messages)
            assert prepared.prompt.ids == list(node.turn.given)
            assert prepared.recalled == node.turn.facts.recalled


TestRecalling = Recalling.TestCase
TestRecalling.settings = settings(max_examples=examples(8), stateful_step_count=30)


# Turns on an engine

TOLD = [f"alpha{number}: gamma{number} delta{number}." for number in range(7)]


def small_engine(**options: Any) -> SlowEngine:
    shape = SlabShape(recent=96, max_pin=32, prefill_chunk=64, rewind_tokens=64)
    return wordy_engine(**{"shape": shape, "forward_s": 0.0} | options)


@contextlib.asynccontextmanager
async def recalling(
    engine: Engine | None = None, tokens: int = 48, **options: Any
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    chat = default_chat(recall_tokens=tokens)
    served = serving(engine or small_engine(), chat, **{"max_parked": 100} | options)
    async with served as server, client_of(server) as client:
        yield server, client


async def say(client: httpx.AsyncClient, session: str, texts: list[str], text: str, **options: Any) -> httpx.Response:
    """One more turn of a conversation; `texts` grow by what was said and by the reply."""
    response = await client.post(chat_path(session), json=said(*texts, text, **options))
    assert response.status_code == 200, response.text
    texts += [text, response.json()["choices"][0]["message"]["content"]]
    return response


async def told(client: httpx.AsyncClient, **fields: Any) -> tuple[str, list[str]]:
    """A session that was told what is in TOLD."""
    session, texts = await open_session(client, **fields), []
    for text in TOLD:
        await say(client, session, texts, text)
    return session, texts


def num_recalled(response: httpx.Response) -> int:
    """Of a whole reply; header and usage agree."""
    assert response.status_code == 200, response.text
    num: int = response.json()["usage"]["holdfast"]["recalled_tokens"]
    assert response.headers.get("holdfast-recalled-tokens", "0") == str(num)
    return num


def is_with_quotes(given: list[int], plain: list[int], num: int) -> bool:
    """Whether the tokens are the plain ones with so many more in one place."""
    assert len(given) == len(plain) + num
    return any(given[:at] + given[at + num :] == plain for at in range(len(plain) + 1))


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_a_turn_computes_what_is_new_what_it_recalls_and_the_pending_token(history: str) -> None:
    """And its tokens are those of the plain rendering and the quotes, however long the session is."""
    source, texts, num_turns = random.Random(1), list[str](), examples(60)
    async with recalling() as (_, client):
        session, turns = await open_session(client, history=history, pin_tokens=8), []
        for number in range(num_turns):
            text = f"alpha{number}: gamma{number}." if number % 3 else f"What was alpha{source.randrange(number + 1)}?"
            turns.append((await say(client, session, texts, text, max_tokens=2)).json()["usage"])
        info = (await client.get(f"/sessions/{session}", params={"branches": "all"})).json()
    end, counts = 0, []
    for number, (usage, record) in enumerate(zip(turns, info["records"], strict=True)):
        ids, facts = record["request"]["input_ids"], usage["holdfast"]
        message = user(texts[2 * number])
        plain = MODEL.continuation.tail(ids[end - 1], [message]) if end else MODEL.continuation.first([message])
        counts.append(facts["recalled_tokens"])
        assert is_with_quotes(ids[end:], plain.ids, counts[-1])
        assert facts["prefilled_tokens"] == len(plain.ids) + counts[-1] + bool(end)
        assert facts["recomputed_tokens"] == 0
        assert usage["prompt_tokens"] == len(ids)
        end = len(ids) + usage["completion_tokens"]
        assert facts["dropped_tokens"] == max(0, end - 96 - 8)
    assert max(counts) <= 48
    assert sum(map(bool, counts)) > num_turns // 10
    assert info["history_length"] == end


async def test_a_turn_made_again_is_the_same_wherever_and_whenever(tmp_path: Path) -> None:
    """After branches, on a fork, from a file, after a restart, beside other sessions, as a stream."""
    async with recalling(tokens=0, data_dir=str(tmp_path)) as (_, client):
        session, texts = await told(client, recall={"tokens": 40, "passages": 2})
        body = said(*texts, "What were alpha1 and alpha2?", max_tokens=6)

        async def made(client: httpx.AsyncClient, session: str) -> tuple[Any, ...]:
            response = await client.post(chat_path(session), json=body)
            records = (await client.get(f"/sessions/{session}", params={"branches": "all"})).json()["records"]
            assert records[-1]["response"] == response.json()
            return (
                num_recalled(response),
                response.json()["choices"],
                records[-1]["request"]["input_ids"],
                response.json()["usage"]["prompt_tokens"],
            )

        fork = (await client.post(f"/sessions/{session}/fork")).json()["session_id"]
        file = (await client.get(f"/sessions/{session}/export")).content
        first = await made(client, session)
        assert 0 < first[0] <= 40
        await say(client, session, list(texts), "alpha1 is something else on this branch.")
        await told(client)
        streamed = await client.post(
            chat_path(fork), json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        events = as_events_text(streamed.text)
        assert text_of(events) == first[1][0]["message"]["content"]
        assert events[-2]["usage"]["holdfast"]["recalled_tokens"] == first[0]
        assert streamed.headers["holdfast-recalled-tokens"] == str(first[0])
        assert await made(client, session) == await made(client, fork) == first
        imported = (await client.post("/sessions/import", content=file)).json()["session_id"]
        assert await made(client, imported) == first
    async with recalling(tokens=0, data_dir=str(tmp_path)) as (_, client):
        for each in (session, fork, imported):
            assert await made(client, each) == first


async def test_another_member_makes_the_same_turn_from_the_record_in_postgresql(postgres: str) -> None:
    replies = []
    session = ""
    for _ in range(2):
        async with recalling(journal=postgres) as (_, client):
            if not session:
                session, texts = await told(client, recall={"tokens": 40})
            response = await client.post(chat_path(session), json=said(*texts, "What was alpha1?"))
            replies.append((num_recalled(response), response.json()["choices"]))
    assert replies[0] == replies[1]
    assert replies[0][0] > 0


async def test_a_request_decides_before_its_session_and_that_before_the_server() -> None:
    async with recalling() as (_, client):
        for of_session, of_request, expected in [
            ({}, {}, True),
            ({}, {"recall": False}, False),
            ({"recall": False}, {}, False),
            ({"recall": False}, {"recall": {"tokens": 40}}, True),
            ({"recall": {"tokens": 2**31 - 1, "passages": 64}}, {}, True),
            ({"recall": {"tokens": 40}}, {"recall": {"tokens": 0}}, False),
            ({"metadata": {"holdfast-recall": "0/8"}}, {}, False),
        ]:
            session, texts = await told(client, **of_session)
            response = await say(client, session, texts, "What was alpha1?", **of_request)
            assert (num_recalled(response) > 0) == expected, (of_session, of_request)


async def test_what_recall_cannot_be_is_refused_with_a_sentence() -> None:
    async with recalling() as (_, client):
        session = await open_session(client)
        bad = [True, 1, "all", [], {}, {"tokens": -1}, {"tokens": 2**31}, {"tokens": "5"}, {"tokens": True}]
        for value in (*bad, {"tokens": 5, "passages": 0}, {"tokens": 5, "passages": 65}):
            of_session = await client.post("/sessions", json={"recall": value})
            in_chat = await client.post(chat_path(session), json=said("Hi", recall=value))
            assert error_of(of_session)["param"] == error_of(in_chat)["param"]
            for path, body in [
                ("messages", {"model": "test", "max_tokens": 4, "messages": [user("Hi")]}),
                ("responses", {"model": "test", "input": "Hi"}),
            ]:
                refused = await client.post(f"/sessions/{session}/v1/{path}", json=body | {"recall": value})
                assert "recall" in error_of(refused)["message"]
        for text in ["", "5", "5/", "-5/8", "5/8/9", "\u0665/\u0668", "99999999999/8"]:
            refused = await client.post("/sessions", json={"metadata": {"holdfast-recall": text}})
            assert error_of(refused)["param"] == "metadata.holdfast-recall"
        full = {f"key{number}": "" for number in range(64)}
        refused = await client.post("/sessions", json={"metadata": full, "recall": {"tokens": 5}})
        assert error_of(refused)["param"] == "metadata"
        refused = await client.post("/v1/chat/completions", json=said("Hi", recall={"tokens": 5}))
        assert error_of(refused)["param"] == "recall"
        assert (await client.get(f"/sessions/{session}")).json()["turns"] == 0


async def test_all_three_apis_recall_the_same() -> None:
    async with recalling(tokens=0) as (_, client):
        session, texts = await told(client)
        question, recall = "What was alpha1?", {"tokens": 40}
        messages = said(*texts, question)["messages"]
        for path, body in [
            ("chat/completions", {"messages": messages, "max_tokens": 4}),
            ("messages", {"messages": messages, "max_tokens": 4}),
            ("responses", {"input": messages, "max_output_tokens": 4}),
        ]:
            sent = {"model": "test", "recall": recall} | body
            response = await client.post(f"/sessions/{session}/v1/{path}", json=sent)
            assert response.status_code == 200, response.text
            assert int(response.headers["holdfast-recalled-tokens"]) > 0
            assert "holdfast-ignored-fields" not in response.headers
        records = (await client.get(f"/sessions/{session}", params={"branches": "all"})).json()["records"]
        assert len({tuple(record["request"]["input_ids"]) for record in records[-3:]}) == 1


async def check_untouched(client: httpx.AsyncClient, session: str, texts: list[str], length: int) -> None:
    """The session is as long as it was, and its next turn is that of a session that nothing happened to."""
    info = await eventually(lambda: client.get(f"/sessions/{session}"), lambda info: not info.json()["is_busy"])
    assert info.json()["history_length"] == length
    other, same = await told(client)
    assert same == texts
    replies = [await say(client, each, list(texts), "What was alpha1?") for each in (session, other)]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
    assert num_recalled(replies[0]) == num_recalled(replies[1]) > 0
    lengths = [(await client.get(f"/sessions/{each}")).json()["history_length"] for each in (session, other)]
    assert lengths[0] == lengths[1]


async def test_a_cancelled_turn_leaves_no_quotes_behind() -> None:
    engine = small_engine()
    async with recalling(engine) as (server, client):
        session, texts = await told(client)
        before = (await client.get(f"/sessions/{session}")).json()["history_length"]
        num_forwards = engine.num_forwards
        with held(engine):
            turn = asyncio.ensure_future(client.post(chat_path(session), json=said(*texts, "What was alpha1?")))
            await until(lambda: engine.num_forwards > num_forwards)
            turn.cancel()
            await until(turn.done)
        left = server.metrics.http_requests.labels("session_chat", "499")
        await until(lambda: left._value.get() == 1)
        await check_untouched(client, session, texts, before)


async def test_a_turn_that_could_not_be_recorded_leaves_no_quotes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise JournalFailed("no room")

    async with recalling() as (_, client):
        session, texts = await told(client)
        before = (await client.get(f"/sessions/{session}")).json()["history_length"]
        with monkeypatch.context() as patched:
            patched.setattr(Claim, "record", fail)
            refused = await client.post(chat_path(session), json=said(*texts, "What was alpha1?"))
            assert error_of(refused)["message"] == "no room"
        await check_untouched(client, session, texts, before)


async def test_drafts_of_what_is_quoted_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    talks, accepted = [], []
    shape = SlabShape(recent=96, max_pin=32, prefill_chunk=64, rewind_tokens=64, draft_length=4)
    script = {7: MODEL.tokenizer.encode("alpha1: gamma1 delta1.")}
    vocab_size = small_engine().info.vocab_size
    for speculator in (None, Speculator(NGram(), draft_length=4, row_cost=0.0)):
        monkeypatch.setattr("tests.serving.Worker", partial(Worker, speculator=speculator))
        engine = ScriptedEngine(script, shape=shape, vocab_size=vocab_size, forward_s=0.0)
        async with recalling(engine) as (_, client):
            session, texts = await told(client)
            options = {"temperature": 0, "seed": 7, "max_tokens": len(script[7])}
            asked = [await say(client, session, texts, f"What was alpha{n}?", **options) for n in (1, 2, 1)]
            records = (await client.get(f"/sessions/{session}")).json()["records"]
        talks.append((texts, [*map(num_recalled, asked)], [record["request"]["input_ids"] for record in records]))
        accepted.append(sum(record["effort"].get("spec_accepted", 0) for record in records))
    assert talks[0] == talks[1]
    assert talks[0][1][0] > 0
    assert accepted[0] == 0 < accepted[1]


@pytest.mark.skipif(not THOROUGH, reason="the real model takes seconds")
async def test_the_real_model_says_the_same_of_the_same_quotes(default_engine: TorchEngine) -> None:
    async with recalling(default_engine) as (_, client):
        session, texts = await open_session(client), []
        for text in TOLD[:3]:
            await say(client, session, texts, text, max_tokens=1)
        forks = [(await client.post(f"/sessions/{session}/fork")).json()["session_id"] for _ in range(2)]
        replies = [await say(client, each, list(texts), "What was alpha0?", max_tokens=3) for each in forks]
        assert num_recalled(replies[0]) == num_recalled(replies[1]) > 0
        assert replies[0].json()["choices"] == replies[1].json()["choices"]
