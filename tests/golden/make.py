"""Wrote the fixtures of tests/test_golden.py: `PYTHONPATH=src:. python -m tests.golden.make DIRECTORY`.

The fixtures are what the code of their day put on disk. They are never written again: a fixture that is made anew says
nothing about the data directories and session files that people have. When a format changes, add another directory
(data-v3) beside the old ones and keep both tests. This script is kept to show what is in the fixtures, and as
something to start from; it refuses to write into a directory that exists.

Session ids, reply ids and times are drawn by the server and differ from run to run; tokens and logprobs do not.
"""

import asyncio
import base64
import json
import re
import shutil
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from starlette.background import BackgroundTask
from tests import test_golden as golden
from tests.talking import chat_path, open_session
from tests.test_golden import EOS, EOS_TOKEN, KEY, LONG, LONG_REPLY, TOOL, TOOL_CALL, chat_body, streamed_text
from tests.test_relay import chatting

from holdfast.testing.fake_upstream import Fault

ALICE, BOB = golden.OWNERS


async def write_tokens(server: Any) -> dict[str, str]:
    """A session of tokens with every kind of span, a rewind in its past, and a fork of it."""
    async with golden.sdk_of(server, ALICE) as sdk:
        session = await sdk.create_session(
            label="raw tokens",
            token_ids=range(100, 120),
            pin_tokens=8,
            eos_token_ids=[EOS_TOKEN],
            metadata={"task": "ünïcode", "n": "1"},
        )
        await drained(await session.generate(max_tokens=6, seed=1, temperature=0.7, top_p=0.9))
        await session.append(range(1000, 1300))  # more than the window keeps
        await session.append([31, 32, 33])
        await session.append([34])
        await drained(await session.turn([41, 42], max_tokens=20, seed=2))
        await session.rewind((session.history_length or 0) - 9)
        await drained(await session.turn([51], max_tokens=20, seed=EOS))
        await drained(await session.turn([61, 62], max_tokens=5, seed=3, temperature=0.0))
        fork = await session.fork(at_position=(session.history_length or 0) - 5, label="fork")
        await drained(await fork.turn([71], max_tokens=4, seed=4))
        return {"tokens": session.id, "tokens_fork": fork.id}


async def drained(generation: Any) -> None:
    async for _ in generation:
        pass


async def write_chats(server: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Chats with branches, tools, rewards, a key, a reply that was not delivered, forks; the last keyed exchange."""
    async with golden.http_of(server, ALICE) as http:
        fields: dict[str, Any] = {"group": "g", "label": "chat", "metadata": {"a": "ß"}}
        chat = await open_session(http, **fields)
        tools: dict[str, Any] = {"tools": [TOOL], "stop": ["never"], "top_p": 0.95}
        first = await posted(http, chat, "Hello", max_tokens=5, stream=True, **tools)
        text = streamed_text(first)
        second = await posted(http, chat, "Hello", text, "One", seed=2, temperature=0.5, logprobs=True, **tools)
        del second  # the retry below takes another branch
        reply = said_by(await posted(http, chat, "Hello", text, "Two <|im_end|>", seed=3, max_tokens=6, **tools))
        with mock.patch.object(BackgroundTask, "__call__", mock.AsyncMock()):  # as if the server had stopped here
            reply2 = said_by(await posted(http, chat, "Hello", text, "Two <|im_end|>", reply, "Three", seed=4, **tools))
        last = chat_body(
            "Hello", text, "Two <|im_end|>", reply, "Three", reply2, "Four", seed=5, return_meta_info=True, **tools
        )
        response = await http.post(chat_path(chat), content=last, headers=KEY)
        assert response.status_code == 200, response.text
        keyed = {"request": last.decode(), "response": response.text}
        for reward in ({"reward": -0.25, "turn": 2}, {"reward": 1.5, "turn": 5}, {"reward": 2.5}):
            assert (await http.post(f"/sessions/{chat}/reward", json=reward)).status_code == 200
        fork = (await http.post(f"/sessions/{chat}/fork", json={"label": "forked chat"})).json()["session_id"]

        large = await open_session(http, label="large reply", pin_tokens=4)
        whole = await posted(
            http, large, "Draw a line", max_tokens=LONG, seed=LONG_REPLY, temperature=0.0, logprobs=True
        )
        assert len(whole.content) > 64 * 1024
        calling = await open_session(http, label="calls a tool")
        call = await posted(http, calling, "Look", max_tokens=len_of_call(), seed=TOOL_CALL, tools=[TOOL])
        assert "#" not in call.text
        empty = await open_session(http, label="nothing said")
    async with golden.http_of(server, BOB) as http:
        closed = await open_session(http, label="closed", group="h")
        await posted(http, closed, "Bye")
        assert (await http.delete(f"/sessions/{closed}")).status_code == 204
        await posted(http, await open_session(http, label="bob's"), "Hi")
    return {"chat": chat, "chat_fork": fork, "large": large, "calling": calling, "empty": empty}, keyed


def len_of_call() -> int:
    return len(golden.default_chat().model.tokenizer.encode(golden.CALL))


async def posted(http: httpx.AsyncClient, session: str, *texts: str, **options: Any) -> httpx.Response:
    response = await http.post(chat_path(session), content=chat_body(*texts, **options))
    assert response.status_code == 200, response.text
    return response


def said_by(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


async def write_upstream(directory: Path) -> dict[str, Any]:
    """A chat that a fake SGLang sampled: weight versions, and routed experts that its client does not get."""
    async with chatting(**golden.RELAY, data_dir=str(directory)) as (relay, upstream):
        http = relay.http

        async def turn(*texts: str, **options: Any) -> str:
            upstream.faults.append(Fault(edit=with_routed_experts))
            return said_by(await posted(http, chat, *texts, **options))

        chat = await open_session(http, label="relayed", group="g", metadata={"a": "b"})
        first = await turn("Hi")
        await turn("Hi", first, "More", seed=2)
        reply = await turn("Hi", first, "Another", seed=3)
        await http.post(f"/sessions/{chat}/reward", json={"reward": 0.5, "turn": 3})
        last = chat_body("Hi", first, "Another", reply, "Last", seed=4, temperature=0.5)
        upstream.faults.append(Fault(edit=with_routed_experts))
        response = await http.post(chat_path(chat), content=last, headers=KEY)
        assert response.status_code == 200, response.text
        sessions = await golden.relayed_contents(http)
    tidy(directory)
    keyed = {"session_id": chat, "request": last.decode(), "response": golden.plain(response.text)}
    return {"sessions": sessions, "keyed": keyed, "rows": golden.rows(directory / "journal.db")}


def with_routed_experts(reply: dict[str, Any]) -> None:
    num_rows = reply["usage"]["total_tokens"] - 1
    experts = base64.b64encode(array("i", range(num_rows * 2)).tobytes()).decode()
    reply["choices"][0]["meta_info"]["routed_experts"] = experts


def tidy(directory: Path) -> None:
    """The last one to close took everything over from the write-ahead log."""
    (directory / "lock").unlink()
    assert not [path for path in directory.iterdir() if path.name.endswith(("-wal", "-shm"))]


async def main(target: Path) -> None:
    data = target / golden.DATA.name
    async with golden.golden_server(data) as server:
        names = await write_tokens(server)
        chats, keyed = await write_chats(server)
        names |= chats
        sessions = golden.plain(await golden.contents(server))
    tidy(data)
    (target / "keys").unlink()
    expected: dict[str, Any] = {"names": names, "keyed": keyed, "sessions": sessions}
    tables = sorted(golden.schema(data / "journal.db"))
    expected |= {"rows": golden.rows(data / "journal.db"), "schema": ["version", *tables]}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(data, Path(folder) / "data"))
        async with golden.golden_server(copy) as server:
            async with golden.http_of(server, BOB) as http:
                closed = await http.post("/sessions/purge", json={"dry_run": True, "older_than_s": 0})
                expected["closed"] = closed.json()["sessions"]
                file = await http.get(f"/sessions/{expected['closed'][0]['session_id']}/export")
                expected["closed_file"] = golden.digest(file.content)
            async with golden.http_of(server, ALICE) as http:
                for name in ("tokens", "chat"):
                    file = await http.get(f"/sessions/{names[name]}/export")
                    (target / f"{name}.holdfast").write_bytes(file.content)
            expected["further"] = await golden.further_turns(server, names)
        expected["imported"] = {}
        async with golden.golden_server(Path(folder) / "fresh") as server, golden.http_of(server, ALICE) as http:
            for name in ("tokens", "chat"):
                content = (target / f"{name}.holdfast").read_bytes()
                counts = (await http.post("/sessions/import", content=content)).json()
                del counts["session_id"]
                expected["imported"][name] = counts
    expected["upstream"] = await write_upstream(target / golden.UPSTREAM_DATA.name)
    text = json.dumps(expected, ensure_ascii=False, sort_keys=True, indent=1)
    innermost = r"\[\n[^][{}]*\]|\{\n[^][{}]*\}"
    text = re.sub(innermost, lambda match: re.sub(r"\n\s*", "", match[0]), text)  # one line each
    (target / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir()
    asyncio.run(main(Path(sys.argv[1])))
