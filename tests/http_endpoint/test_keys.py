"""API keys at the HTTP endpoint: who may call, and what an owner sees of sessions."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_endpoint.shared import CHAT, guarded
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, error_of, open_session, refusal_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_without_a_key_that_is_known_everything_but_health_is_401(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        for authorization in (b"", b"Bearer", b"Bearer wrong", b"Basic key-a", b"Bearer k\xe9y"):
            async with client_of(server) as client:
                client.headers = httpx.Headers([(b"authorization", authorization)])
                for path in ("/v1/models", "/sessions", "/nothing"):
                    response = await client.get(path)
                    assert refusal_of(response) == (401, "unauthenticated")
                    assert response.headers["www-authenticate"] == "Bearer"
                response = await client.post(CHAT, json=said("hi"))
                assert refusal_of(response) == (401, "unauthenticated")
                assert response.headers["deprecation"] == "true"
                for path in ("/health", "/healthz", "/readyz", "/metrics", "/openapi.json"):
                    assert (await client.get(path)).status_code == 200
        async with client_of(server, "key-a") as client:
            assert (await client.post(CHAT, json=said("hi"))).status_code == 200


async def test_several_authorization_headers_are_401(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server) as client:
        for keys in ((b"key-a", b"key-b"), (b"key-b", b"key-a"), (b"key-a", b"key-a")):
            headers = [(b"authorization", b"Bearer " + key) for key in keys]
            assert refusal_of(await client.get("/v1/models", headers=headers)) == (401, "unauthenticated")


async def test_sessions_are_listed_by_label_state_and_page() -> None:
    async with serving(wordy_engine(num_slabs=2), default_chat(), max_parked=9) as server, client_of(server) as client:
        opened = [await open_session(client, label=label) for label in ("a", "b", "a", "a", "")]

        async def listed(**query: Any) -> tuple[list[str], str]:
            answer = (await client.get("/sessions", params=query)).json()
            return [view["session_id"] for view in answer["data"]], answer["next_page_token"]

        assert await listed() == (opened, "")
        assert await listed(label="a") == ([opened[0], opened[2], opened[3]], "")
        assert await listed(label="") == (opened[4:], "")
        assert await listed(state="parked") == (opened[:3], "")
        first, token = await listed(label="a", page_size=2)
        assert first == [opened[0], opened[2]]
        assert await listed(label="a", page_size=2, page_token=token) == ([opened[3]], "")
        for query in (
            {"state": "asleep"},
            {"page_size": 0},
            {"page_size": "x"},
            {"page_size": 1001},
            {"page_token": "x"},
        ):
            answer = await client.get("/sessions", params=query)
            assert (answer.status_code, error_of(answer)["param"]) == (400, *query)


async def test_a_session_does_not_exist_for_another_owner(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-b") as bob:
        session = await open_session(alice)
        unknown = "0" * 32
        for method, path, body in (
            ("GET", "/sessions/{}", None),
            ("DELETE", "/sessions/{}", None),
            ("POST", "/sessions/{}/fork", {}),
            ("POST", chat_path("{}"), said("hi")),
            ("POST", chat_path("{}"), []),  # unknown beats malformed, so that it tells nothing
        ):
            theirs = await bob.request(method, path.format(session), json=body)
            nobodys = await bob.request(method, path.format(unknown), json=body)
            assert refusal_of(theirs) == (404, "session_not_found")
            assert theirs.json() == json.loads(nobodys.text.replace(unknown, session))
        assert (await bob.get("/sessions")).json()["data"] == []
        assert [view["session_id"] for view in (await alice.get("/sessions")).json()["data"]] == [session]
        assert (await alice.post(chat_path(session), json=said("hi"))).status_code == 200


async def test_models_of_a_session_are_listed_for_its_owner_only(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, client_of(server, "key-a") as alice, client_of(server, "key-b") as bob:
        session = await open_session(alice)
        assert (await alice.get(f"/sessions/{session}/v1/models")).json()["data"][0]["id"] == "test"
        assert refusal_of(await bob.get(f"/sessions/{session}/v1/models")) == (404, "session_not_found")
