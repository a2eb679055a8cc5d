"""GET /sessions/{id}/tokens: the exact tokens of a session, page by page."""

import random
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from holdfast.chats.tokens import checked_range, path_page, span_page, spelled
from holdfast.chats.tree import Node, Tree
from holdfast.errors import InvalidArgument
from holdfast.generation import Sampled
from holdfast.sessions.history import History
from holdfast.sessions.record import Recalled, TurnFacts, View
from tests.serving import Server, default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, open_session, refusal_of, said
from tests.test_budget import BUDGET, Talk, spoken
from tests.test_grpc import create, events_of, generate
from tests.test_relay import chatting

COLUMNS = ("ids", "texts", "kinds", "logprobs", "sampling_logprobs", "top", "weight_versions")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(wordy_engine(forward_s=0), default_chat(), weight_version="w1", max_parked=8) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


async def page_of(client: httpx.AsyncClient, session: str, **query: Any) -> dict[str, Any]:
    response = await client.get(f"/sessions/{session}/tokens", params=query)
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    assert {len(page[name]) for name in COLUMNS if page[name] is not None} <= {len(page["ids"])}
    return page


async def chat(client: httpx.AsyncClient, session: str, *texts: str, **options: Any) -> dict[str, Any]:
    response = await client.post(chat_path(session), json=said(*texts, **options))
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def test_pages_of_a_chat_are_its_recorded_tokens_with_their_kinds_and_logprobs(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    first = (await chat(client, session, "hi"))["choices"][0]["message"]["content"]
    await chat(client, session, "hi", first, "and?")
    shown = (await client.get(f"/sessions/{session}")).json()
    whole = await page_of(client, session)
    assert whole["ids"] == shown["metadata"]["accumulated_token_ids"]
    assert (whole["turn"], whole["total"], whole["start"]) == (2, len(whole["ids"]), 0)
    assert whole["window"] == {"sink": shown["window"]["sink"], "recent": 256, "dropped_range": None}
    one, two = whole["turns"]
    assert (one["turn"], one["parent"], one["start"], two["parent"]) == (1, 0, 0, 1)
    assert (one["end"], two["end"]) == (two["start"], whole["total"])
    for turn in whole["turns"]:
        assert whole["kinds"][turn["start"] : turn["sampled_start"]] == ["given"] * (
            turn["sampled_start"] - turn["start"]
        )
        assert whole["kinds"][turn["sampled_start"] : turn["end"]] == ["sampled"] * 4
    for kind, logprob, sampling, version in zip(
        whole["kinds"], whole["logprobs"], whole["sampling_logprobs"], whole["weight_versions"], strict=True
    ):
        assert (logprob is None) is (sampling is None) is (kind == "given")
        assert version == ("w1" if kind == "sampled" else None)
    assert whole["top"] is None
    assert "".join(whole["texts"]).startswith("<|im_start|>")
    pages = [await page_of(client, session, start=start, limit=7) for start in range(0, whole["total"], 7)]
    for name in ("ids", "texts", "kinds"):
        assert [value for page in pages for value in page[name]] == whole[name]
    assert [turn["turn"] for turn in pages[0]["turns"]] == [1]
    given = await page_of(client, session, limit=3)
    assert [given[name] for name in ("logprobs", "sampling_logprobs", "weight_versions")] == [None] * 3
    assert (await page_of(client, session, start=whole["total"]))["ids"] == []


async def test_a_page_is_of_the_path_to_the_turn_that_is_asked_for(client: httpx.AsyncClient) -> None:
    session = await open_session(client, history="forest")
    await chat(client, session, "hi", seed=1)
    await chat(client, session, "hi", seed=2)
    await chat(client, session, "other")
    records = (await client.get(f"/sessions/{session}?branches=all")).json()["records"]
    for number, record in enumerate(records, start=1):
        page = await page_of(client, session, turn=number)
        assert [turn["turn"] for turn in page["turns"]] == [number]
        assert page["ids"][:-4] == record["request"]["input_ids"]
    assert (await page_of(client, session))["turn"] == 3


async def test_top_alternatives_are_those_that_the_recorded_reply_has(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    reply = await chat(client, session, "hi", logprobs=True, top_logprobs=2)
    page = await page_of(client, session)
    told = reply["choices"][0]["logprobs"]["content"]
    assert page["top"][:-4] == [None] * (page["total"] - 4)
    for at, place in enumerate(told):
        want = [(spelled(bytes(one["bytes"])), one["logprob"]) for one in place["top_logprobs"]]
        assert [(one["text"], one["logprob"]) for one in page["top"][at - 4]] == want


async def test_pages_of_a_token_session_have_the_same_columns_and_no_turns(
    server: Server, client: httpx.AsyncClient
) -> None:
    session = await create(server, [5, 6, 7])
    events = await events_of(generate(server, session, max_tokens=300))
    page = await page_of(client, session)
    assert (page["turn"], page["turns"], page["total"]) == (None, [], 303)
    assert page["ids"] == [5, 6, 7, *(event.token.token_id for event in events if event.HasField("token"))]
    assert page["kinds"] == ["given"] * 3 + ["sampled"] * 300
    assert page["window"] == {"sink": 4, "recent": 256, "dropped_range": [4, 47]}
    part = await page_of(client, session, start=2, limit=2)
    assert (part["ids"], part["kinds"]) == (page["ids"][2:4], ["given", "sampled"])
    assert part["logprobs"] == page["logprobs"][2:4]
    assert "no turns" in error_of(await client.get(f"/sessions/{session}/tokens?turn=1"))["message"]


async def test_hostile_parameters_are_refused_with_a_sentence(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    assert (await page_of(client, session))["total"] == 0
    for query in (
        *("turn=1", "turn=0", "turn=-1", "turn=x", "turn=" + "9" * 400, "start=1", "start=-1", "start=1e3"),
        *("limit=0", "limit=10001", "limit=", "limit=%00", "start=²", "limit=true", "turn=1.0"),
    ):
        response = await client.get(f"/sessions/{session}/tokens?{query}")
        assert refusal_of(response) == (400, "invalid_argument"), query
        assert error_of(response)["param"] == query.partition("=")[0]
    assert (await client.post(f"/sessions/{session}/tokens")).status_code == 405


async def test_other_owners_sessions_are_unknown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-a\nbob:secret-b\n")
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), keys_file=str(keys)) as server,
        client_of(server, "secret-a") as ann,
        client_of(server, "secret-b") as bob,
    ):
        session = await open_session(ann)
        assert (await ann.get(f"/sessions/{session}/tokens")).status_code == 200
        assert refusal_of(await bob.get(f"/sessions/{session}/tokens")) == (404, "session_not_found")


async def test_pages_of_a_session_that_rests_have_its_alternatives_from_the_journal(tmp_path: Path) -> None:
    async with (
        serving(wordy_engine(forward_s=0, num_slabs=1), default_chat(), data_dir=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        session = await open_session(client)
        await chat(client, session, "hi", logprobs=True, top_logprobs=1)
        before = await page_of(client, session)
        await chat(client, await open_session(client), "hi")
        after = await page_of(client, session)
        assert before["top"][-1]
        assert after == before


async def test_in_front_of_an_upstream_the_window_is_the_turns_view() -> None:
    rng = random.Random(1)
    async with chatting(context_budget=BUDGET) as (relay, upstream):
        session = await open_session(relay.http)
        talk = Talk(relay, upstream, session)
        for _ in range(12):
            await talk.say(*spoken(rng))
        shown = (await relay.http.get(f"/sessions/{session}")).json()
        assert shown["dropped_range"]
        page = await page_of(relay.http, session)
        assert page["window"]["dropped_range"] == shown["dropped_range"]
        assert page["window"]["sink"] == shown["dropped_range"][0]
        assert page["ids"] == shown["metadata"]["accumulated_token_ids"]
        first = await page_of(relay.http, session, turn=1)
        assert first["window"]["dropped_range"] is None


# The pages themselves


def attached(tree: Tree, parent: Node, given: list[int], sampled: list[int], **facts: Any) -> Node:
    tokens = [Sampled(token=token, logprob=-1.0, sampling_logprob=-0.5) for token in sampled]
    return tree.attach(
        parent,
        messages=[],
        reply={"role": "assistant", "content": ""},
        given=given,
        sampled=tokens,
        facts=TurnFacts(**facts),
    )


async def test_quotes_and_trimmed_ends_and_changes_of_weights_are_told_apart() -> None:
    tree, tokenizer = Tree(), default_chat().model.tokenizer
    one = attached(tree, tree.root, [1, 2], [3, 4], num_trimmed=1)
    two = attached(
        tree,
        one,
        [5, 6, 7, 8],
        [9, 10, 11],
        recalled=Recalled(start=1, length=2),
        weight_spans=(("a", 1), ("b", 2)),
    )
    page = path_page(two, range(0, two.end), View(0, 0), lambda node: b"{}", tokenizer)
    assert page.columns.ids == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    kinds = ["given", "given", "sampled", "given", "recalled", "recalled", "given", "sampled", "sampled", "sampled"]
    assert page.columns.kinds == kinds
    assert page.columns.weight_versions == [None] * 7 + ["a", "b", "b"]
    for start in range(two.end + 1):
        for stop in range(start, two.end + 1):
            part = path_page(two, range(start, stop), View(0, 0), lambda node: b"{}", tokenizer)
            for name in ("ids", "kinds", "logprobs", "weight_versions"):
                assert getattr(part.columns, name) == getattr(page.columns, name)[start:stop]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (b'{"choices":[{"meta_info":{"output_top_logprobs":[[[-0.5,3,null],[-1.5,4,null]]]}}]}', [3, 4]),
        (b'{"choices":[{"logprobs":{"content":[{"top_logprobs":[{"token":"token_id:5","logprob":-1}]}]}}]}', [5]),
        (b'{"choices":[{"logprobs":{"content":[{"top_logprobs":[{"token":"x","logprob":-1}]}]}}]}', [None]),
        (b'{"choices":[{"logprobs":{"content":[{"top_logprobs":[{"token":"x","logprob":-1}]},{}]}}]}', None),
        (b'{"choices":[{"logprobs":{"top_logprobs":7}}]}', None),
        (b'{"choices":[{"meta_info":{"output_top_logprobs":[[[1]]]}}]}', None),
        (b'{"top_logprobs":', None),
        (b'{"choices":[],"top_logprobs":[]}', None),
    ],
)
async def test_alternatives_are_read_in_every_format_and_only_where_there_is_one_for_each_token(
    response: bytes, found: list[int | None] | None
) -> None:
    tree = Tree()
    node = attached(tree, tree.root, [], [3])
    tokenizer = default_chat().model.tokenizer
    (top,) = path_page(node, range(1), View(0, 0), lambda node: response, tokenizer).columns.top
    assert (top and [one.id for one in top]) == found


async def test_the_text_of_a_token_is_unambiguous() -> None:
    assert spelled(b"hi") == "hi"
    assert spelled("é".encode()[:1]) == "\\xc3"
    assert spelled(b" \xe2\x80") == "\\x20\\xe2\\x80"
    assert spelled(b"\\xc3") == "\\x5c\\x78\\x63\\x33"  # what spells an escape is escaped itself
    assert spelled(b"\\xC3 \\x") == "\\xC3 \\x"
    tokenizer = default_chat().model.tokenizer
    ids = tokenizer.encode("naïve 🤝 \\x41 <|im_end|>")
    spelt = [spelled(tokenizer.token_bytes(token)) for token in ids]
    assert "\\xf0\\x9f" in "".join(spelt)
    for token, text in zip(ids, spelt, strict=True):
        data = tokenizer.token_bytes(token)
        is_escaped = text.startswith("\\x") and text == "".join(f"\\x{byte:02x}" for byte in data)
        assert data == (bytes.fromhex(text.replace("\\x", "")) if is_escaped else text.encode())


async def test_a_page_out_of_a_hundred_thousand_tokens_is_quick() -> None:
    tree, tokenizer = Tree(), default_chat().model.tokenizer
    node = tree.root
    for _ in range(1000):
        node = attached(tree, node, list(range(50)), list(range(50)))
    history = History()
    for turn in node.path():
        history.repeat(turn.turn)
    for make in (
        lambda: path_page(node, checked_range(90_000, 2000, node.end), View(0, 0), lambda node: b"{}", tokenizer),
        lambda: span_page(
            list(history.pieces(90_000, 92_000, limit=4096)), range(90_000, 92_000), len(history), View(0, 0)
        ),
    ):
        started = time.process_time()
        page = make()
        assert time.process_time() - started < 0.02
        assert page.columns.ids == array("i", history.slice(90_000, 92_000)).tolist()
        assert len(page.texts(tokenizer)) == 2000


async def test_a_range_must_lie_within_the_tokens() -> None:
    assert checked_range(5, 10, 8) == range(5, 8)
    for start, limit in ((9, 1), (-1, 1), (0, 0), (0, 10_001)):
        with pytest.raises(InvalidArgument):
            checked_range(start, limit, 8)
