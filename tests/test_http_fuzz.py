"""Whatever is sent to the HTTP door: an answer in time, never a 5xx, errors always in the envelope."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.serving.http.openapi import build
from tests.effort import examples
from tests.fuzz import mutation
from tests.fuzz.requests import CHAT, HI, RICH, TOOL
from tests.fuzz.server import BriefEngine
from tests.serving import Server, default_chat, serving_aside
from tests.talking import error_of


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_aside(BriefEngine(), default_chat(), queue_max_wait_s=5) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A connection for each request, so that none suffers from what another one did."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=f"http://{server.http}", timeout=20, verify=False, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def session(client: httpx.Client) -> str:
    return str(client.post("/sessions").json()["session_id"])


def answered(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer, which must be a good one; a session that it opened is closed again."""
    with client.stream(method, path, **options) as response:
        if method == "GET" and path.endswith("/events") and response.status_code == 200:
            assert next(response.iter_lines()).startswith(("event: ", ": "))  # it goes on until the client leaves
            return response
        response.read()
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and method != "HEAD":
        error_of(response)
    if response.text.startswith('{"session_id":') and path.endswith(("/sessions", "/fork")):
        assert client.delete(f"/sessions/{response.json()['session_id']}").status_code == 204
    return response


def brief(body: Any) -> Any:
    """As it is, but never asking for so much that the test would not end."""
    if isinstance(body, dict):
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(field)) is int:
                body[field] = min(body[field], 4)
        body.setdefault("max_tokens", 4)
    return body


# By the document


def _takes_json(operation: dict[str, Any]) -> bool:
    """Whether there are bodies that the document forbids: any bytes may be a file."""
    return "application/json" in operation.get("requestBody", {}).get("content", {})


OPERATIONS = [
    (method.upper(), path, mode)
    for path, methods in build()["paths"].items()
    if not path.startswith("/control")  # that would stop the others
    for method in methods.keys() & {"get", "post", "put", "delete"}
    for mode in (("positive", "negative") if _takes_json(methods[method]) else ("positive",))
]


@pytest.mark.parametrize(("method", "path", "mode"), sorted(OPERATIONS))
def test_nothing_that_the_document_allows_or_forbids_is_a_5xx(
    client: httpx.Client, session: str, method: str, path: str, mode: str
) -> None:
    operation = schemathesis.openapi.from_dict(build())[path][method]
    names = {"session_id": session, "response_id": "resp_1", "conversation_id": "conv_1", "model": "test"}
    known = {name: value for name, value in names.items() if f"{{{name}}}" in path} if method != "DELETE" else None
    known = known or None
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode), path_parameters=known)

    @settings(max_examples=examples(40 if "completions" in path else 5))
    @given(case=cases, data=st.data())
    def ask(case: schemathesis.Case, data: st.DataObject) -> None:
        body = b"" if case.body is schemathesis.core.NOT_SET else case.body
        if isinstance(body, dict) and data.draw(st.booleans()):
            body["messages"] = HI  # the document does not say how to write any
        content = body if isinstance(body, bytes) else json.dumps(brief(body))
        answered(client, method, case.formatted_path, content=content)

    ask()


# By our own means


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CHATS: list[dict[str, Any]] = [
    RICH,
    {
        "messages": HI,
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    {
        "messages": HI,
        "max_tokens": 4,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    {"messages": HI, "max_tokens": 4, "n": 2, "stream": True, "input_ids": [1, 2, 3]},
    {"prompt": ["hi", "you"], "max_tokens": 4, "n": 2, "logprobs": 1, "echo": False, "suffix": "", "best_of": 1},
    {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "stop": "x"},
]
ODD = [*mutation.ODD, 10**400, {"type": "string", "pattern": "("}]


def with_change(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = with_change(value[path[0]], path[1:], new)
    return changed


PLACES = [(number, path) for number, body in enumerate(CHATS) for path in mutation.places(body)]


def path_for(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else CHAT


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_the_bodies_that_are_spoilt_below_are_good_ones(client: httpx.Client, number: int) -> None:
    assert client.post(path_for(CHATS[number]), json=CHATS[number]).status_code == 200


@settings(max_examples=examples(300))
@given(place=st.sampled_from(PLACES), new=st.sampled_from(ODD))
def test_a_wrong_value_at_any_field_is_refused_or_taken_but_never_a_5xx(
    client: httpx.Client, session: str, place: tuple[int, tuple[Any, ...]], new: Any
) -> None:
    number, path = place
    body = json.dumps(brief(with_change(CHATS[number], path, new)))
    answered(client, "POST", path_for(CHATS[number]), content=body)
    if "prompt" not in CHATS[number]:
        answered(client, "POST", f"/sessions/{session}{CHAT}", content=body)


@settings(max_examples=examples(60))
@given(
    place=st.sampled_from([(number, path) for number, path in PLACES if path]),
    depth=st.integers(50, 1100),
    shape=st.sampled_from([("[", "]"), ('{"a":', "}"), ('{"properties":{"a":', "}}"), ('{"items":', "}")]),
)
def test_deep_nesting_at_any_field_is_never_a_5xx(
    client: httpx.Client, session: str, place: tuple[int, tuple[Any, ...]], depth: int, shape: tuple[str, str]
) -> None:
    number, path = place
    deep = shape[0] * depth + "1" + shape[1] * depth
    body = json.dumps(brief(with_change(CHATS[number], path, "HERE"))).replace('"HERE"', deep)
    answered(client, "POST", path_for(CHATS[number]), content=body)
    if "prompt" not in CHATS[number]:
        answered(client, "POST", f"/sessions/{session}{CHAT}", content=body)


@settings(max_examples=examples(60))
@given(body=st.sampled_from(CHATS), cut=st.floats(0, 1), extra=st.binary(max_size=8))
def test_a_body_that_breaks_off_is_400(client: httpx.Client, body: dict[str, Any], cut: float, extra: bytes) -> None:
    whole = json.dumps(body).encode()
    broken = whole[: int(cut * (len(whole) - 1))] + b"\x00" + extra
    assert answered(client, "POST", path_for(body), content=broken).status_code == 400


BODY_PATHS = (CHAT, "/v1/completions", "/sessions", "/sessions/{}/fork", "/sessions/{}/v1/chat/completions")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
LISTS = st.lists(PLAIN, max_size=4)
JSON = PLAIN | LISTS | st.dictionaries(st.text(max_size=10), PLAIN | LISTS, max_size=4)


@settings(max_examples=examples(120))
@given(
    path=st.sampled_from(BODY_PATHS), body=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_answered(client: httpx.Client, session: str, path: str, body: bytes) -> None:
    answered(client, "POST", path.format(session), content=body)


@settings(max_examples=examples(120))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X"]),
    parts=st.lists(
        st.sampled_from(["v1", "sessions", "chat", "completions", "models", "fork", "..", ""]) | st.text(), max_size=5
    ),
    query=st.text(max_size=10),
)
def test_any_path_is_answered(client: httpx.Client, method: str, parts: list[str], query: str) -> None:
    path = "/".join(quote(part, safe="", errors="surrogatepass") for part in parts)
    answered(client, method, f"{client.base_url}/{path}", params={"q": query.encode(errors="replace")})


@settings(max_examples=examples(60))
@given(raw=st.binary(max_size=60))
def test_bytes_that_are_no_http_get_an_answer_or_a_closed_connection(server: Server, raw: bytes) -> None:
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1 << 16)
    assert not answer or answer.startswith(b"HTTP/1.1 4")


def test_the_server_is_well_after_all_that(server: Server, client: httpx.Client, session: str) -> None:
    (view,) = client.get("/sessions").json()["data"]
    assert (view["session_id"], view["state"]) == (session, "live")
    client.delete(f"/sessions/{session}")
    assert server.worker.num_free_slabs == 8
    assert client.post(CHAT, json={"messages": HI, "n": 8, "max_tokens": 2}).status_code == 200
    failed = {"status": "500"}
    samples = [sample for metric in server.metrics.registry.collect() for sample in metric.samples]
    assert not [sample for sample in samples if failed.items() <= sample.labels.items() and sample.value]
