"""Routes of the HTTP endpoint: paths, methods, the OpenAPI document, models by name."""

import httpx
import pytest

from holdfast import __version__
from holdfast.serving.http.descriptions import DESCRIPTIONS
from holdfast.serving.http.openapi import build
from tests.http_endpoint.shared import CHAT
from tests.talking import error_of, open_session, refusal_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/sessions/", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/sessions/unknown", 404, "session_not_found"),
        ("GET", "/sessions/%00%ff%2F", 404, None),
        ("DELETE", "/sessions/unknown", 404, "session_not_found"),
        ("POST", "/sessions/unknown/fork", 404, "session_not_found"),
        ("POST", "/sessions/unknown/v1/chat/completions", 404, "session_not_found"),
        ("GET", "/sessions/unknown/v1/models", 404, "session_not_found"),
        ("POST", "/sessions/unknown/update_weights", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/sessions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/sessions/unknown", 405, "method_not_allowed"),
        ("BREW", "/health", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_are_refused_in_the_envelope(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str | None
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert code is None or error_of(response)["code"] == code


async def test_a_wrong_method_is_told_all_right_ones(client: httpx.AsyncClient) -> None:
    for path, allowed in (("/sessions", {"GET", "HEAD", "POST"}), ("/sessions/x", {"GET", "HEAD", "DELETE"})):
        assert set((await client.put(path)).headers["allow"].split(", ")) == allowed


async def test_the_openapi_document_has_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    for path, methods in document["paths"].items():
        for method in methods.keys() & {"get", "post", "put", "delete"}:
            names = dict.fromkeys(("session_id", "model", "response_id", "conversation_id"), "x")
            response = await client.request("TRACE", path.format(**names))
            assert response.status_code == 405
            assert method.upper() in response.headers["allow"].split(", ")
    schema = document["components"]["schemas"]["ChatCompletion"]
    assert {"messages", "stop", "seed", "response_format"} <= schema["properties"].keys()


async def test_the_openapi_document_describes_every_field_and_parameter() -> None:
    document = build()
    schemas = document["components"]["schemas"]
    fields = {
        f"{name}.{field}": about for name, schema in schemas.items() for field, about in schema["properties"].items()
    }
    assert len(fields) > 80
    assert [name for name, about in fields.items() if not about.get("description")] == []
    for path, item in document["paths"].items():
        operations = [item[method] for method in item.keys() & {"get", "post", "put", "delete"}]
        assert all(operation["summary"] for operation in operations)
        for parameter in [*item.get("parameters", []), *(p for o in operations for p in o.get("parameters", []))]:
            assert parameter.get("description"), f"{path}: {parameter['name']}"
    known = {field for schema in schemas.values() for field in schema["properties"]}
    assert {name.rpartition(".")[2] for name in DESCRIPTIONS} == known


async def test_the_root_says_what_is_where(client: httpx.AsyncClient) -> None:
    told = (await client.get("/")).json()
    assert (told["name"], told["version"]) == ("holdfast", __version__)
    for path in told["endpoints"].values():
        assert (await client.get("/v1/models" if path == "/v1" else path)).status_code == 200


async def test_a_model_is_found_by_its_name_alone_and_on_sessions(client: httpx.AsyncClient) -> None:
    session = await open_session(client)
    for prefix in ("", f"/sessions/{session}"):
        assert (await client.get(f"{prefix}/v1/models/test")).json()["id"] == "test"
        answer = await client.get(f"{prefix}/v1/models/org/other")
        assert refusal_of(answer) == (404, "model_not_found")
        assert "'test'" in error_of(answer)["message"]
    assert refusal_of(await client.get("/sessions/x/v1/models/test")) == (404, "session_not_found")
