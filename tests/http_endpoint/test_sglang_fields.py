"""SGLang's fields of a chat, and offsets of a completion's tokens."""

import math

import httpx
import pytest

from tests.http_endpoint.shared import CHAT
from tests.serving import default_chat
from tests.talking import chat_path, events_of, open_session, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_input_ids_are_taken_instead_of_the_messages(client: httpx.AsyncClient) -> None:
    messages = said("hi")["messages"]
    ids = default_chat().model.continuation.first(messages).ids
    rendered = (await client.post(CHAT, json=said("hi", return_meta_info=True))).json()
    given = (await client.post(CHAT, json=said("something else", input_ids=ids, return_meta_info=True))).json()
    assert given["usage"]["prompt_tokens"] == len(ids) == rendered["usage"]["prompt_tokens"]
    assert given["choices"][0]["message"] == rendered["choices"][0]["message"]


async def test_meta_info_has_every_token_with_its_sampling_logprob(client: httpx.AsyncClient) -> None:
    tokenizer = default_chat().model.tokenizer
    session = await open_session(client)
    for path in (CHAT, chat_path(session)):
        body = (await client.post(path, json=said("hi", return_meta_info=True, logprobs=True, temperature=0.5))).json()
        (choice,) = body["choices"]
        meta = choice["meta_info"]
        entries = meta["output_token_logprobs"]
        assert len(entries) == meta["completion_tokens"] == 4
        assert all(logprob <= 0 and math.isfinite(logprob) for logprob, _, _ in entries)
        assert tokenizer.decode([token for _, token, _ in entries]) == choice["message"]["content"]
        assert meta["finish_reason"]["type"] == "length"
        raw = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert raw != [logprob for logprob, _, _ in entries]
    async with client.stream("POST", CHAT, json=said("hi", return_meta_info=True, stream=True)) as response:
        events = [event async for event in events_of(response)]
    assert len(events[-2]["choices"][0]["meta_info"]["output_token_logprobs"]) == 4
    assert "meta_info" not in (await client.post(CHAT, json=said("hi"))).json()["choices"][0]


async def test_text_offsets_go_on_from_chunk_to_chunk(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 6, "seed": 1, "logprobs": 1}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        events = [event async for event in events_of(response)]
    parts = [event["choices"][0]["logprobs"] for event in events[:-2]]
    assert [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"]
    assert whole["text_offset"][0] == 0
    assert whole["text_offset"][-1] == sum(map(len, whole["tokens"][:-1]))
