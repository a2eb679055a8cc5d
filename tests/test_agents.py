"""Recorded runs of real agents, replayed: nothing is refused, and every turn is on record token by token.

`python -m tests.agents --record FILE AGENT SCENARIO` makes a recording.
"""

import asyncio
import collections
import itertools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import ChatConfig
from holdfast.serving.lifecycle import Chat
from tests.agents.__main__ import AGENTS
from tests.agents.model import ScriptedModel
from tests.agents.recording import read_recording
from tests.qwen3 import VOCABULARY, qwen3
from tests.relaying import relaying
from tests.talking import open_session

_REPLY_ID = re.compile(r'"id": ?"((?:resp|msg)_\w+)"')
_PREVIOUS = re.compile(r'("previous_(?:response|message)_id": ")[^"]+')
RECORDINGS = sorted((Path(__file__).parent / "agents/recordings").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
async def test_a_recorded_run_is_on_record_token_by_token(path: Path) -> None:
    recording = read_recording(path)
    turns: list[dict[str, Any]] = recording["turns"]
    async with (
        ScriptedModel(AGENTS[recording["agent"]].script) as model,
        relaying(model.url, Chat(qwen3(), ChatConfig()), VOCABULARY) as relay,
    ):
        session = await open_session(relay.http, history="forest")
        one, last = f"/sessions/{session}", ""
        for _, group in itertools.groupby(turns, lambda turn: turn["group"]):
            replies = await asyncio.gather(*(_send(relay.http, one, turn, last) for turn in group))
            assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies]
            assert all(_is_whole(reply) for reply in replies), [reply.text[-300:] for reply in replies]
            last = (_REPLY_ID.findall(replies[-1].text) or [""])[0]
        state = (await relay.http.get(one, params={"branches": "all"})).json()
    tree = state["metadata"]["tree"]
    assert len(tree) == len(turns) == recording["requests"]
    assert sum(not turn["parent"] for turn in tree) == recording["roots"]
    assert len({turn["turn"] for turn in tree} - {turn["parent"] for turn in tree}) == recording["leaves"]
    assert sum(turn["edited"] for turn in tree) == recording["edited"]
    recorded = collections.Counter(
        (
            tuple(record["request"]["input_ids"]),
            tuple(e[1] for e in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]),
        )
        for record in state["records"]
    )
    assert recorded == collections.Counter((tuple(x["input_ids"]), tuple(x["output_ids"])) for x in model.exchanges)


def _is_whole(reply: httpx.Response) -> bool:
    """A stream ends with the last event of its API, and not with an error."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return "error" not in reply.json() or reply.json()["error"] is None
    return (
        reply.text.rstrip()
        .rpartition("\n\n")[2]
        .startswith(("data: [DONE]", "event: message_stop", "event: response.completed"))
    )


async def _send(http: httpx.AsyncClient, session: str, turn: dict[str, Any], last: str) -> httpx.Response:
    """`last`: the id of the reply before, which a turn that sends only what is new continues."""
    body = _PREVIOUS.sub(rf"\g<1>{last}", json.dumps(turn["body"]))
    return await http.post(session + turn["path"], content=body, headers=turn["headers"])
