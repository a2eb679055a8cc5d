"""Data directories and session files that an earlier version wrote are read, continued and written as they were.

The fixtures in tests/golden were written by tests/golden/make.py. This test reads them through the two endpoints and
the SDK only, so that it stays as it is while the code behind them changes.
"""

import dataclasses
import hashlib
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from holdfast_sdk import AsyncClient

from holdfast.models import open_model
from holdfast.testing.fake_upstream import flat_rows
from tests import serving as servers
from tests.relaying import Relay
from tests.serving import ScriptedEngine, Server, default_chat, serving, wordy_engine
from tests.talking import as_events_text, chat_path, client_of, error_of, said, text_of
from tests.test_relay import chatting

GOLDEN = Path(__file__).parent / "golden"
DATA, UPSTREAM_DATA = GOLDEN / "data-v2", GOLDEN / "data-v2-upstream"
OWNERS = ("alice", "bob")
KEY = {"idempotency-key": "golden"}
LONG = 145  # tokens of a reply that, with its logprobs, is kept in a segment file

# Seeds whose tokens are given; every other seed draws them.
EOS, TOOL_CALL, LONG_REPLY = 71, 72, 73
EOS_TOKEN = 7
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'

RELAY = {"routing_replay": "full", "retain_days": 0, "weight_version": "w2"}
VOLATILE = {"state", "idle_seconds", "kv_live_bytes", "kv_reserved_bytes", "recomputed_tokens", "rewind_count"}
LATER = {"kind", "last_used_at"}  # fields that the version which wrote the data did not have
WHOLE, MANY = 4096, 48  # longer texts and lists of numbers are compared by length and digest


def engine() -> ScriptedEngine:
    tokenizer = default_chat().model.tokenizer
    (rule,) = tokenizer.encode("#" * 80)
    call = tokenizer.encode(CALL)
    scripts = {EOS: [11, 12, EOS_TOKEN], TOOL_CALL: call, LONG_REPLY: [rule] * LONG}
    plain = wordy_engine()
    return ScriptedEngine(scripts, num_slabs=12, shape=plain.shape, vocab_size=plain.info.vocab_size, forward_s=0.0)


@asynccontextmanager
async def golden_server(directory: Path) -> AsyncIterator[Server]:
    """The server that wrote the fixtures: a fake engine behind the default model's real tokenizer and template."""
    source, model_of = open_model(), servers.model_of
    identity = {"tokenizer_hash": source.tokenizer_hash, "chat_template_hash": source.chat_template_hash}
    keys = directory.parent / "keys"
    keys.write_text("".join(f"{owner}:{owner}-key\n" for owner in OWNERS))
    options = {"data_dir": str(directory), "max_parked": 100, "keys_file": str(keys), "retain_days": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "model_of", lambda of: dataclasses.replace(model_of(of), **identity))
        async with serving(engine(), default_chat(), weight_version="w1", **options) as server:
            yield server


@asynccontextmanager
async def golden_relay(directory: Path) -> AsyncIterator[Relay]:
    """The same in front of a fake SGLang."""
    async with chatting(**RELAY, routed_experts=flat_rows, data_dir=str(directory)) as (relay, _):
        yield relay


def sdk_of(server: Server, owner: str) -> AsyncClient:
    return AsyncClient(server.address, api_key=f"{owner}-key")


def http_of(server: Server, owner: str) -> httpx.AsyncClient:
    return client_of(server, f"{owner}-key")


def plain(value: Any) -> Any:
    """Plain JSON values, long texts and lists of numbers as length and digest."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > MANY and all(type(item) in (int, float) for item in value):
            return {"items": len(value)} | digest(json.dumps(value).encode())
        return [plain(item) for item in value]
    if isinstance(value, str) and len(value) > WHOLE:
        return digest(value.encode())
    return value


def digest(data: bytes) -> dict[str, Any]:
    return {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def differences(found: Any, wanted: Any, at: str = "") -> list[str]:
    """Where two values differ, innermost first; nothing where they are equal."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        return [line for key in wanted for line in differences(found[key], wanted[key], f"{at}.{key}")]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [line for i, one in enumerate(wanted) for line in differences(found[i], one, f"{at}[{i}]")]
    return [] if found == wanted else [f"{at}: {found!r} instead of {wanted!r}"]


async def contents(server: Server) -> dict[str, Any]:
    """All that both endpoints tell of every open session, by owner."""
    found: dict[str, Any] = {}
    for owner in OWNERS:
        async with sdk_of(server, owner) as sdk, http_of(server, owner) as http:
            found[owner] = [await session_of(sdk, http, one["session_id"]) for one in await listed(http)]
    return found


async def listed(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    response = await http.get("/sessions")
    assert response.status_code == 200, response.text
    data: list[dict[str, Any]] = response.json()["data"]
    return data


async def session_of(sdk: AsyncClient, http: httpx.AsyncClient, session_id: str) -> Any:
    session = sdk.session(session_id)
    info = dataclasses.asdict(await session.info())
    found = {
        "info": {name: value for name, value in info.items() if name not in VOLATILE},
        "history": [dataclasses.asdict(chunk) async for chunk in session.history()],
        "samples": await samples_of(http, session_id),
        "chat": await chat_of(http, session_id),
    }
    return plain(found)


async def samples_of(http: httpx.AsyncClient, session_id: str) -> dict[str, Any] | str:
    """Digests of the export for trainers, with and without what follows from the session's id; or an error's code."""
    response = await http.post(f"/sessions/{session_id}/samples", json={"format": "json", "branch": "all"})
    if response.status_code != 200:
        return str(error_of(response)["code"])
    samples = as_version_1(response.json())
    texts = [json.dumps(of, sort_keys=True) for of in (samples, without_identity(samples))]
    return {"num_samples": len(samples["samples"])} | dict(
        zip(("whole", "without_identity"), (digest(text.encode()) for text in texts), strict=True)
    )


def as_version_1(samples: dict[str, Any]) -> dict[str, Any]:
    """Samples as the version that wrote the fixtures told them: nothing but the layout has changed since."""
    assert samples.pop("format_version") == 2
    for name in ("accumulated_token_ids", "max_trim_tokens", "tito_session_mismatch"):
        samples["session_metadata"].pop(name, None)
    for sample in samples["samples"]:
        names = [name for turn in sample["turns"] for name in dict.fromkeys(turn["weight_versions"]) if name]
        assert sample["weight_versions"] == names
        sample["weight_versions"] = [
            [{"version": turn["weight_versions"][0], "abs_start": turn["sampled_start"], "abs_end": turn["end"]}]
            if turn["weight_versions"][0]
            else []
            for turn in sample["turns"]
        ]
        for turn in sample["turns"]:
            assert (turn.pop("weight_spans"), turn.pop("effort"), turn.pop("recalled")) == ([], {}, [])
    return samples


async def chat_of(http: httpx.AsyncClient, session_id: str) -> dict[str, Any] | str:
    """What is told of a chat, with the exact bytes of every response; of a session of tokens, the error's code."""
    response = await http.get(f"/sessions/{session_id}", params={"branches": "all"})
    if response.status_code != 200:
        return str(error_of(response)["code"])
    told = response.json()
    raw = msgspec.json.decode(response.content, type=dict[str, msgspec.Raw])
    for record, inner in zip(
        told["records"], msgspec.json.decode(raw["records"], type=list[dict[str, msgspec.Raw]]), strict=True
    ):
        record["response"] = bytes(inner["response"]).decode()
    return {name: value for name, value in told.items() if name not in VOLATILE | LATER}


def without_identity(session: dict[str, Any]) -> dict[str, Any]:
    """Less what an import changes: the session's id and what follows from it."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            names = value.keys() - {"session_id", "certificate", "whole"}
            return {name: strip(value[name]) for name in names}
        return [strip(item) for item in value] if isinstance(value, list) else value

    stripped: dict[str, Any] = strip(session)
    return stripped


async def further_turns(server: Server, wanted: dict[str, Any]) -> dict[str, Any]:
    """One more turn on a session of tokens and one on a chat, and how many caches came from snapshots."""
    owner = OWNERS[0]
    async with sdk_of(server, owner) as sdk, http_of(server, owner) as http:
        tokens = await sdk.session(wanted["tokens"]).turn([21, 22, 23], max_tokens=8, seed=5, temperature=0.8)
        sampled = [token.id async for token in tokens]
        told = (await http.get(f"/sessions/{wanted['chat']}")).json()["messages"]
        messages = [*told, {"role": "user", "content": "And then?"}]
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 8, "seed": 6}
        response = await http.post(chat_path(wanted["chat"]), json=body)
        assert response.status_code == 200, response.text
        metrics = (await http.get("/metrics")).text
    reply = response.json()
    assert reply["usage"]["holdfast"].pop("recalled_tokens") == 0
    return {
        "sampled": sampled,
        "text": reply["choices"][0]["message"]["content"],
        "usage": reply["usage"],
        "woken": [
            line for line in metrics.splitlines() if "session_woken_total{" in line and not line.endswith(" 0.0")
        ],
    }


ADDED = {
    "summary": "BLOB",
    "rested_at": "REAL",
    "name": "TEXT",
    "member": "TEXT",
}  # columns of sessions that came after version 2


def rows(database: Path) -> dict[str, list[dict[str, Any]]]:
    """The journal's own rows in plain values. Sums, and numbers that only link rows, are left out."""
    kinds = {"given": "i", "sampled": "i", "tokens": "i", "logprobs": "d", "sampling_logprobs": "d"}

    def value(name: str, item: Any) -> Any:
        if not isinstance(item, bytes):
            return item
        if name in kinds:
            return list(memoryview(item).cast(kinds[name]))
        return digest(item) if name == "content" else item.hex() if name == "body_hash" else item.decode()

    found = {}
    with closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        for table, order in (("sessions", "number"), ("spans", "step"), ("turns", "rowid"), ("bodies", "id")):
            found[table] = [
                {
                    name: plain(value(name, row[name]))
                    for name in row.keys()  # noqa: SIM118
                    if name not in {"checksum", *ADDED}
                }
                for row in connection.execute(f"SELECT * FROM {table} ORDER BY {order}")
            ]
    return found


def schema(database: Path) -> set[str]:
    """How tables and indexes are made, without the columns that were added."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    added = "".join(f", {name} {kind}" for name, kind in ADDED.items())
    return {" ".join(sql.replace(added, "").split()) for (sql,) in found}


@pytest.fixture(scope="module")
def expected() -> Any:
    return json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "data"))


async def test_all_sessions_of_a_data_directory_come_back(data: Path, expected: Any) -> None:
    async with golden_server(data) as server, http_of(server, "bob") as http:
        found = await contents(server)
        closed = await http.post("/sessions/purge", json={"dry_run": True, "older_than_s": 0})
        file = await http.get(f"/sessions/{expected['closed'][0]['session_id']}/export")
    assert differences(plain(found), expected["sessions"]) == []
    assert closed.json()["sessions"] == expected["closed"]
    assert digest(file.content) == expected["closed_file"]


async def test_the_rows_of_the_journal_are_what_they_were_before_and_after_it_was_read(
    data: Path, expected: Any
) -> None:
    assert differences(rows(data / "journal.db"), expected["rows"]) == []
    async with golden_server(data):
        pass
    assert differences(rows(data / "journal.db"), expected["rows"]) == []
    assert (data / "model.json").read_bytes() == (DATA / "model.json").read_bytes()


async def test_sessions_go_on_from_their_snapshots_with_the_tokens_they_would_have_had(
    data: Path, expected: Any
) -> None:
    async with golden_server(data) as server:
        further = await further_turns(server, expected["names"])
    assert further == expected["further"]


async def test_the_last_turn_with_a_key_is_replayed(data: Path, expected: Any) -> None:
    async with golden_server(data) as server, http_of(server, OWNERS[0]) as http:
        last = expected["keyed"]
        again = await http.post(chat_path(expected["names"]["chat"]), content=last["request"].encode(), headers=KEY)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.text == last["response"]


@pytest.mark.parametrize("name", ["tokens", "chat"])
async def test_an_export_has_the_bytes_of_the_session_file(data: Path, expected: Any, name: str) -> None:
    async with golden_server(data) as server, http_of(server, OWNERS[0]) as http:
        file = await http.get(f"/sessions/{expected['names'][name]}/export")
    assert file.content == (GOLDEN / f"{name}.holdfast").read_bytes()


async def test_session_files_are_imported_with_all_they_had_and_go_on(tmp_path: Path, expected: Any) -> None:
    names, counts = {}, {}
    async with golden_server(tmp_path / "fresh") as server:
        async with http_of(server, OWNERS[0]) as http:
            for name in ("tokens", "chat"):
                response = await http.post("/sessions/import", content=(GOLDEN / f"{name}.holdfast").read_bytes())
                counts[name] = response.json()
                names[name] = counts[name].pop("session_id")
        found = (await contents(server))[OWNERS[0]]
        further = await further_turns(server, names)
    assert counts == expected["imported"]
    originals = {session["info"]["session_id"]: session for session in expected["sessions"][OWNERS[0]]}
    for name, session in zip(("tokens", "chat"), found, strict=True):
        original = originals[expected["names"][name]]
        assert differences(without_identity(plain(session)), without_identity(original)) == []
    assert (further["sampled"], further["text"]) == (expected["further"]["sampled"], expected["further"]["text"])


async def test_an_import_writes_the_rows_that_an_earlier_version_wrote(tmp_path: Path, expected: Any) -> None:
    fresh = tmp_path / "fresh"
    async with golden_server(fresh) as server, http_of(server, OWNERS[0]) as http:
        response = await http.post("/sessions/import", content=(GOLDEN / "chat.holdfast").read_bytes())
        session_id = response.json()["session_id"]
    assert schema(fresh / "journal.db") > set(expected["schema"][1:])
    numbering = {"session", "request", "response", "step", "ticket_key", "body_hash", "num_control"}

    def turns(of: dict[str, Any], session: str) -> list[dict[str, Any]]:
        bodies = {row["id"]: row["content"] for row in of["bodies"]}
        return [
            {name: value for name, value in row.items() if name not in numbering}
            | {"bodies": (bodies[row["request"]], bodies[row["response"]])}
            for row in of["turns"]
            if row["session"] == session
        ]

    written = rows(fresh / "journal.db")
    assert turns(written, session_id) == turns(expected["rows"], expected["names"]["chat"])


async def test_chats_behind_an_upstream_come_back(tmp_path: Path, expected: Any) -> None:
    data, last = Path(shutil.copytree(UPSTREAM_DATA, tmp_path / "data")), expected["upstream"]["keyed"]
    assert differences(rows(data / "journal.db"), expected["upstream"]["rows"]) == []
    async with golden_relay(data) as relay:
        found = await relayed_contents(relay.http)
        again = await relay.http.post(chat_path(last["session_id"]), content=last["request"].encode(), headers=KEY)
        told = (await relay.http.get(f"/sessions/{last['session_id']}")).json()["messages"]
        body = {"messages": [*told, {"role": "user", "content": "More"}], "max_tokens": 4, "seed": 9}
        more = await relay.http.post(chat_path(last["session_id"]), json=body)
    assert differences(found, expected["upstream"]["sessions"]) == []
    assert again.headers["idempotent-replayed"] == "true"
    assert plain(again.text) == last["response"]
    assert more.status_code == 200, more.text


async def relayed_contents(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    found = []
    for one in await listed(http):
        session_id = one["session_id"]
        found.append(plain({"chat": await chat_of(http, session_id), "samples": await samples_of(http, session_id)}))
    return found


def streamed_text(response: httpx.Response) -> str:
    return text_of(as_events_text(response.text))


def chat_body(*texts: str, **options: Any) -> bytes:
    return json.dumps(said(*texts, **options)).encode()
