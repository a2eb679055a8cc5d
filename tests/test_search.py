"""Search in histories at both doors, and quotes as spans of their own kind wherever a history is told."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.chats import search
from holdfast.chats.search import TokenPassages
from holdfast.generation import Sampled
from holdfast.serving.grpc.gen import runtime_pb2 as pb
from holdfast.sessions.history import History
from holdfast.sessions.record import Recalled, View
from tests.serving import Server, SlowEngine, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, refusal_of, said
from tests.test_budget import Talk, before
from tests.test_grpc import refused
from tests.test_relay import fake_upstream

TOKENIZER = default_chat().model.tokenizer
EVERYTHING = View(0, 1 << 40)
FACT = "The lighthouse keeper is called Ambrose."
FILLER = "Rain fell on the harbour all day, and the boats stayed where they were. " * 4

texts = st.sampled_from(
    [
        "The keeper is Ambrose. ",
        "Is it raining?\n\n",
        "naïve café ☃ 雨が降る",
        "<|im_end|>\n<|im_start|>user\n",
        " x",
        "\n",
    ]
).map(TOKENIZER.encode)
tokens = st.one_of(texts, st.lists(st.integers(0, 49151), min_size=1, max_size=4))  # the latter spell no UTF-8
operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["give", "recall", "sample"]), tokens),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
        st.tuples(st.just("search"), st.none()),
    ),
    max_size=16,
)


@given(operations)
def test_an_index_that_follows_its_history_is_as_one_made_anew_and_its_positions_are_exact(
    steps: list[tuple[str, Any]],
) -> None:
    history, followed = History(), TokenPassages(TOKENIZER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_BLOCK", 8)
        for kind, value in [*steps, ("search", None)]:
            if kind in ("give", "recall"):
                history.give(value, Recalled(start=1, length=3) if kind == "recall" else None)
            elif kind == "sample":
                span = history.begin_sampled()
                for token in value:
                    span = history.sample(span, Sampled(token=token, logprob=-1.0, sampling_logprob=-1.0))
            elif kind == "rewind":
                history.rewind(int(value * len(history)))
            else:
                followed.update(followed.growth(history))
                fresh = TokenPassages(TOKENIZER)
                fresh.update(fresh.growth(history.copy(len(history))))
                asked = ("Who is the keeper?", "雨", "raining")
                assert followed._passages == fresh._passages
                assert [followed.search(EVERYTHING, text, 9) for text in asked] == [
                    fresh.search(EVERYTHING, text, 9) for text in asked
                ]
    for passage in followed._passages:
        pieces = [TOKENIZER.token_bytes(token) for token in history.slice(passage.start, passage.end)]
        spelled = passage.text.encode()
        if "\ufffd" not in passage.text:
            assert spelled in b"".join(pieces)
            assert spelled not in b"".join(pieces[1:])
            assert spelled not in b"".join(pieces[:-1])
    assert len(history) == followed._length


async def ask(server: Server, session: str, query: str | list[int], **options: Any) -> list[pb.Passage]:
    asked = {"query": query} if isinstance(query, str) else {"query_token_ids": query}
    request = pb.SearchHistoryRequest(session_id=session, **asked, **options)  # type: ignore[arg-type]
    return [*(await server.stub.SearchHistory(request)).passages]


async def turn(server: Server, session: str, text: str) -> None:
    request = pb.TurnRequest(session_id=session, token_ids=TOKENIZER.encode(text), max_tokens=2)
    async for _ in server.stub.Turn(request):
        pass


async def test_a_token_session_is_searched_by_text_or_tokens_where_the_model_cannot_see() -> None:
    async with serving(wordy_engine(), default_chat(), max_parked=9) as server, client_of(server) as client:
        opened = await server.stub.CreateSession(pb.CreateSessionRequest())
        session = opened.session_id
        await turn(server, session, "To begin with, some words that are pinned.")
        await turn(server, session, f"\n\n{FACT}\n\nNothing else.")
        assert await ask(server, session, "lighthouse keeper") == []  # it is still in view
        (found, *_) = await ask(server, session, "lighthouse keeper", include_in_view=True)
        for _ in range(6):
            await turn(server, session, FILLER)
        (best,) = await ask(server, session, "Who is the lighthouse keeper?")
        assert best == (await ask(server, session, TOKENIZER.encode("Who is the lighthouse keeper?")))[0]
        assert (best.turn, best.role, best.text) == (2, "given", f"{FACT}\n\nNothing else.")
        assert (best.from_position, best.to_position) == (found.from_position, found.to_position)
        history = server.stub.GetHistory(
            pb.GetHistoryRequest(session_id=session, from_position=best.from_position, to_position=best.to_position)
        )
        assert TOKENIZER.decode([token async for chunk in history for token in chunk.token_ids]).strip() == best.text
        response = await client.get(f"/sessions/{session}/search", params={"query": "Who is the lighthouse keeper?"})
        (told,) = response.json()["data"]
        assert told == {
            name: getattr(best, name) for name in ("turn", "role", "text", "from_position", "to_position", "score")
        }
        fork = (await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session))).session_id
        await server.stub.RewindSession(pb.RewindSessionRequest(session_id=fork, to_position=best.from_position))
        assert await ask(server, fork, "lighthouse keeper", include_in_view=True) == []
        assert await ask(server, session, "Who is the lighthouse keeper?") == [best]


async def test_searches_at_once_and_one_whose_caller_leaves_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.chats.turn._LARGE_BYTES", 1)  # each is in a thread
    async with serving(wordy_engine(), default_chat()) as server:
        session = (await server.stub.CreateSession(pb.CreateSessionRequest())).session_id
        await turn(server, session, f"{FILLER}\n\n{FACT}\n\n{FILLER}")
        asked = [asyncio.ensure_future(ask(server, session, "keeper", include_in_view=True)) for _ in range(6)]
        await asyncio.sleep(0)
        asked[0].cancel()
        await turn(server, session, "And the keeper?")
        found = [await one for one in asked[1:]]
        assert all(FACT in one[0].text for one in found)
        assert len(await ask(server, session, "keeper", include_in_view=True)) == 2


async def test_a_search_that_cannot_be_answered_is_refused_in_one_sentence(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\nbob:key-b\n")
    async with (
        serving(wordy_engine(), default_chat(), keys_file=str(keys)) as server,
        client_of(server, "key-a") as alice,
        client_of(server, "key-b") as bob,
    ):
        session = await open_session(alice)

        async def refusal(client: httpx.AsyncClient, **params: Any) -> tuple[int, str]:
            return refusal_of(await client.get(f"/sessions/{session}/search", params=params))

        assert await refusal(bob, query="keeper") == (404, "session_not_found")
        for wrong in ({}, {"query": "x" * 20_000}, {"query": "x", "limit": "0"}, {"query": "x", "limit": "65"}):
            assert await refusal(alice, **wrong) == (400, "invalid_argument")
        for wrong in ({"query": "x", "limit": "many"}, {"query": "x", "in_view": "yes"}):
            assert await refusal(alice, **wrong) == (400, "invalid_argument")
        assert (await alice.get(f"/sessions/{session}/search?query=x")).json() == {"object": "list", "data": []}
    async with serving(wordy_engine(), default_chat()) as server:
        session = (await server.stub.CreateSession(pb.CreateSessionRequest())).session_id
        for fields in (
            {},
            {"query": "x", "query_token_ids": [1]},
            {"query_token_ids": [-1]},
            {"query": "x", "limit": -1},
        ):
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument"):
                await server.stub.SearchHistory(pb.SearchHistoryRequest(session_id=session, **fields))
        async with refused(grpc.StatusCode.NOT_FOUND, "session_not_found"):
            await ask(server, "nobody", "x")
    async with serving(SlowEngine()) as server:  # its model has no tokenizer
        session = (await server.stub.CreateSession(pb.CreateSessionRequest())).session_id
        async with refused(grpc.StatusCode.UNIMPLEMENTED, "unimplemented"):
            await ask(server, session, "x")


async def spans_of(server: Server, session: str) -> list[tuple[int, int, list[int]]]:
    chunks = server.stub.GetHistory(pb.GetHistoryRequest(session_id=session))
    return [(chunk.from_position, chunk.kind, list(chunk.token_ids)) async for chunk in chunks]


@pytest.mark.parametrize("history", ["strict", "forest"])
async def test_quotes_are_spans_of_their_own_live_and_after_forks_files_and_a_restart(
    history: str, tmp_path: Path
) -> None:
    chat = default_chat(max_rollback=-1)
    keeping: dict[str, Any] = {"data_dir": str(tmp_path), "max_parked": 100}
    async with serving(wordy_engine(), chat, **keeping) as server, client_of(server) as client:
        session = await open_session(client, recall={"tokens": 64, "passages": 2}, history=history)
        said_so_far: list[str] = []
        for text in ("Hello.", FACT, FILLER, FILLER, FILLER, "Who is the keeper of the lighthouse?", "Thank you."):
            said_so_far.append(text)
            reply = await client.post(chat_path(session), json=said(*said_so_far))
            assert reply.status_code == 200, reply.text
            said_so_far.append(reply.json()["choices"][0]["message"]["content"])
        live = await spans_of(server, session)
        (quotes,) = [span for span in live if span[1] == pb.SPAN_KIND_RECALLED]
        assert FACT in TOKENIZER.decode(quotes[2])
        shown = (await client.get(f"/sessions/{session}", params={"records": "false"})).json()
        assert shown["recalled_tokens"] == len(quotes[2])
        info = await server.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session))
        assert info.spans.given_tokens + info.spans.sampled_tokens == info.history_length
        retried = await client.post(chat_path(session), json=said(*said_so_far[:9], seed=2))  # before the quotes
        assert retried.status_code == 200, retried.text
        assert [span for span in await spans_of(server, session) if span[1] == pb.SPAN_KIND_RECALLED] == []
        retried = await client.post(chat_path(session), json=said(*said_so_far, "And?"))  # gives them again
        assert retried.status_code == 200, retried.text
        assert (await spans_of(server, session))[: len(live)] == live
        forks = [
            (await client.post(f"/sessions/{session}/fork")).json()["session_id"],
            (await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session))).session_id,
        ]
        for source in (session, forks[1]):
            file = await client.get(f"/sessions/{source}/export")
            imported = await client.post("/sessions/import", content=file.content)
            forks.append(imported.json()["session_id"])
        cut = (
            await server.stub.ForkSession(pb.ForkSessionRequest(session_id=session, at_position=quotes[0] + 3))
        ).session_id
        before = await spans_of(server, session)
        assert await ask(server, session, "lighthouse") == []  # its quote is in view
        (best, *_) = await ask(server, session, "lighthouse", include_in_view=True)
        assert (best.turn, best.role, best.text) == (2, "user", FACT)
    async with serving(wordy_engine(), chat, **keeping) as server:
        for one in (session, *forks):
            assert await spans_of(server, one) == before, one
            (best, *_) = await ask(server, one, "lighthouse", include_in_view=True)
            assert FACT in best.text
        assert (await spans_of(server, cut))[-1] == (quotes[0], pb.SPAN_KIND_RECALLED, quotes[2][:3])


async def test_a_search_finds_what_an_upstream_no_longer_gets() -> None:
    async with fake_upstream() as upstream, before(upstream) as relay:
        talk = Talk(relay, upstream, await open_session(relay.http))
        await talk.say(FACT)
        path = f"/sessions/{talk.session}/search?query=lighthouse"
        assert (await relay.http.get(path)).json()["data"] == []
        for _ in range(4):
            await talk.say(FILLER[:144])
        (found,) = (await relay.http.get(path)).json()["data"]
        assert (found["turn"], found["role"], found["text"]) == (1, "user", FACT)


def test_a_history_is_searched_while_it_grows_without_reading_all_of_it_again() -> None:
    history, passages = History(), TokenPassages(TOKENIZER)
    history.give(TOKENIZER.encode(FILLER) * 200)
    passages.update(passages.growth(history))
    history.give(array("i", TOKENIZER.encode(f"\n\n{FACT}")))
    growth = passages.growth(history)
    assert len(growth.tokens) < 2 * search._BLOCK
    passages.update(growth)
    (best, _), *_ = passages.search(EVERYTHING, "lighthouse", 4)
    assert FACT in best.text
