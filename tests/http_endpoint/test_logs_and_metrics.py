"""What the HTTP endpoint logs and counts, and what never gets into the log."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_endpoint.shared import CHAT, guarded
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "holdfast.access"]


async def test_access_lines_tell_everything_but_the_prompt(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = await open_session(client)
    await client.post(CHAT, json=said("my secret"), headers={"x-request-id": "one"})
    await client.post(chat_path(session), json=said("my secret"))
    await client.post(CHAT, json=said("my secret", top_p=3))
    await client.get("/my%20path")
    _, first, second, third, fourth = access_lines(caplog)
    assert "secret" not in caplog.text
    assert first | {"duration_ms": 0} == {
        "request_id": "one",
        "method": "POST",
        "path": CHAT,
        "route": "chat_completions",
        "status": 200,
        "duration_ms": 0,
        "owner": "local",
        "client": "127.0.0.1",
    }
    assert first["duration_ms"] > 0
    assert (second["route"], second["status"]) == ("session_chat", 200)
    assert (third["route"], third["status"]) == ("chat_completions", 400)
    assert (fourth["route"], fourth["status"], fourth["path"]) == ("none", 404, "/my path")


async def test_prompts_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast.access")
    async with (
        serving(wordy_engine(forward_s=0), default_chat(), log_prompts=True) as server,
        client_of(server) as client,
    ):
        await client.post(CHAT, json=said("my secret"))
        await client.post(CHAT, content=b"\xff")
    assert json.loads(access_lines(caplog)[0]["body"])["messages"][0]["content"] == "my secret"
    assert access_lines(caplog)[1]["body"] == "\ufffd"


async def test_keys_are_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-c") as other:
        assert (await alice.get("/sessions")).status_code == 200
        assert (await other.get("/sessions")).status_code == 401
    assert "key-a" not in caplog.text
    assert "key-c" not in caplog.text
    assert [(line["owner"], line["status"]) for line in access_lines(caplog)] == [("alice", 200), (None, 401)]


async def test_metrics_count_requests_admissions_and_prefilled_tokens() -> None:
    async with serving(wordy_engine(forward_s=0), default_chat()) as server, client_of(server) as client:
        usage = (await client.post(CHAT, json=said("hi"))).json()["usage"]
        await client.post(CHAT, json=[])
        text = (await client.get("/metrics")).text
        value = server.metrics.registry.get_sample_value
        route = {"route": "chat_completions"}
        assert value("holdfast_http_requests_total", route | {"status": "200"}) == 1
        assert value("holdfast_http_requests_total", route | {"status": "400"}) == 1
        assert value("holdfast_admission_total", {"outcome": "admitted"}) == 1
        assert value("holdfast_generate_prefill_tokens_sum") == usage["prompt_tokens"]
        assert value("holdfast_generated_tokens_total") == usage["completion_tokens"] == 4
        assert value("holdfast_queue_depth") == 0
        assert value("holdfast_session_active") == 0
    for name in ("http_request_duration_seconds", "time_to_first_token_seconds", "event_loop_lag_seconds"):
        assert f"holdfast_{name}_bucket" in text
