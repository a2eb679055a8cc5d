"""Which host names and web pages the HTTP endpoint answers."""

from pathlib import Path

import httpx
import pytest

from holdfast.errors import ConfigError
from tests.http_endpoint.shared import CHAT, DEPRECATION, guarded
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, refusal_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "["]
)
async def test_without_keys_a_name_that_is_not_ours_is_403(client: httpx.AsyncClient, host: str) -> None:
    for method, path in (("GET", "/sessions"), ("POST", "/control/pause"), ("GET", "/metrics"), ("GET", "/")):
        assert refusal_of(await client.request(method, path, headers={"host": host})) == (403, "forbidden")
    assert not (await client.post(CHAT, json=said("hi"))).is_error  # nothing was paused


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "app.localhost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.7:80"]
)
async def test_without_keys_localhost_and_addresses_are_answered(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", ""])
async def test_without_keys_a_page_that_is_not_allowed_is_403(client: httpx.AsyncClient, origin: str) -> None:
    for method, path in (("GET", "/sessions"), ("POST", "/control/pause"), ("POST", CHAT), ("OPTIONS", CHAT)):
        answer = await client.request(method, path, headers={"origin": origin})
        assert refusal_of(answer) == (403, "forbidden")
        assert "access-control-allow-origin" not in answer.headers


async def test_names_can_be_allowed_and_with_keys_or_insecure_all_are(tmp_path: Path) -> None:
    named = {"host": "llm.example:80"}
    for options in ({"allowed_hosts": "a.example, LLM.example"}, {"insecure": True}):
        async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
            assert (await client.get("/v1/models", headers=named)).status_code == 200
    async with guarded(tmp_path) as server, client_of(server, "key-a") as client:
        headers = named | {"origin": "https://evil.example"}
        answer = await client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_an_allowed_origin_may_ask_read_and_stream() -> None:
    origin = "http://localhost:3000"
    options = {"cors_origin": f"https://a.example, {origin}", "max_body_mb": 1}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked |= {"access-control-request-headers": "authorization,content-type,idempotency-key"}
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "idempotency-key" in preflight.headers["access-control-allow-headers"]
        session = await open_session(client)
        for path, body in (
            (CHAT, said("hi")),
            (CHAT, said("hi", stream=True)),
            (chat_path(session), said("hi")),
            (CHAT, []),
            ("/nothing", {}),
            (CHAT, said("x" * 2_000_000)),
        ):
            answer = await client.post(path, json=body, headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            ours = [
                name for name in answer.headers if name.startswith(("holdfast-", "x-", "retry-")) or name in DEPRECATION
            ]
            assert set(ours) - {"x-accel-buffering"} <= set(exposed)
        other = await client.options(CHAT, headers=asked | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert refusal_of(await client.post(CHAT, json=[], headers={"origin": "https://evil.example"}))[0] == 403


async def test_any_origin_may_be_allowed_only_with_keys(tmp_path: Path) -> None:
    for wrong, says in (("*", "needs --keys-file"), ("example.org", "is not an origin"), ("https://a/b", "is not an")):
        with pytest.raises(ConfigError, match=says):
            await serving(wordy_engine(), default_chat(), cors_origin=wrong).__aenter__()
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\n")
    options = {"keys_file": str(keys), "cors_origin": "*"}
    async with serving(wordy_engine(), default_chat(), **options) as server, client_of(server) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://a.example"})
        assert refusal_of(answer) == (401, "unauthenticated")
        assert answer.headers["access-control-allow-origin"] == "*"
