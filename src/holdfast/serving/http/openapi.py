"""The OpenAPI document of the HTTP endpoint, generated from the request types."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast import __version__
from holdfast.chats.search import MAX_RESULTS
from holdfast.chats.tokens import MAX_PAGE_TOKENS, PAGE_TOKENS
from holdfast.serving.http.descriptions import describe
from holdfast.serving.http.schema import (
    ChatCompletion,
    Completion,
    Fork,
    NewSession,
    Purge,
    Reward,
    SamplesRequest,
    WeightsAtPath,
    WeightVersion,
)
from holdfast.sessions.view import MAX_PAGE, SessionState


def _parameter(name: str, about: str, where: str = "query", **schema: Any) -> dict[str, Any]:
    is_path = where == "path"
    return {"name": name, "in": where, "required": is_path, "description": about, "schema": {"type": "string"} | schema}


_SESSION = _parameter("session_id", "Id of the session", "path")
_MODEL = _parameter("model", "Name of the model", "path")
_RESPONSE = _parameter("response_id", "Id of the response", "path")
_ITEMS = [
    _parameter("order", "`desc` (default): the latest first; `asc`: the first", enum=["asc", "desc"]),
    _parameter("after", "Items after the one with this id"),
    _parameter("limit", "Items in one page; default: 20", type="integer", minimum=1, maximum=100),
]
_ANTHROPIC = "Anthropic's Messages API"
_RESPONSES = "OpenAI's Responses API"
_NEW_CONVERSATION = {"content": {"application/json": {"schema": {"type": "object"}}}}
_SNAPSHOT = _parameter("snapshot", "Whether the file contains the session's cache", type="boolean", default=True)
_LISTED = [
    _parameter("q", "Only sessions with this text in their id, label or group, in whatever case"),
    _parameter("label", "Only sessions with this label"),
    _parameter("state", "Only sessions in this state", enum=list(SessionState)),
    _parameter("page_size", "Sessions in one page; default: all", type="integer", minimum=1, maximum=MAX_PAGE),
    _parameter("page_token", "The `next_page_token` of the page before"),
]
_SHOWN = [
    _parameter("branches", "`all`: turns of every branch; default: of the latest one"),
    _parameter("payloads", "`false`: leave out routed experts and other large payloads"),
    _parameter("records", "`false`: only the shape of the tree; `messages`: also what was said in each turn"),
]
_SEARCHED = [
    _parameter("query", "What to look for", minLength=1) | {"required": True},
    _parameter("limit", "Most passages in the answer; default: 8", type="integer", minimum=1, maximum=MAX_RESULTS),
    _parameter("in_view", "`true`: also passages that the model sees anyway", type="boolean", default=False),
]
_TOKENS = [
    _parameter("turn", "The path ends at this turn; default: the latest", type="integer", minimum=1),
    _parameter("start", "Position of the first token; default: 0", type="integer", minimum=0),
    _parameter(
        "limit",
        f"Tokens in one page; default: {PAGE_TOKENS}",
        type="integer",
        minimum=1,
        maximum=MAX_PAGE_TOKENS,
    ),
]
_PAUSED = [_parameter("mode", "Running turns may end (`wait`), or not (`abort`)", enum=["wait", "abort"])]
_NEW_WEIGHTS = [
    _parameter("version", "Version of the weights, where the body is a safetensors file"),
    _parameter("caches", "What becomes of caches, where the body is a file", enum=["recompute", "keep"]),
]
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TYPES = (ChatCompletion, Completion, NewSession, Fork, Purge, Reward, SamplesRequest, WeightVersion, WeightsAtPath)


def _operation(about: str, *, body: type | None = None, status: int = 200, optional: bool = False) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {str(status): {"description": "success"}, "default": {"description": "OpenAI's error envelope"}},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": not optional, "content": {"application/json": {"schema": schema}}}
    return operation


def _translated(about: str, api: str, *required: str) -> dict[str, Any]:
    """An operation whose body is that of another API, which is not described here again."""
    described = f"As in {api}. What becomes of each field: docs/openai.md. Unknown fields are ignored and named."
    schema = {"type": "object", "required": list(required), "description": described}
    envelope = {"default": {"description": f"an error in the envelope of {api}"}}
    operation = _operation(about)
    operation["responses"] |= envelope
    return operation | {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _translated_paths(base: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    """The paths of Messages and Responses, without a session or below one."""
    shared: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    one = {"parameters": [*parameters, _RESPONSE]}
    about = "on the session: only new messages are computed" if parameters else "stateless"
    return {
        f"{base}/v1/messages": shared | {"post": _translated(f"A message, {about}", _ANTHROPIC, "messages")},
        f"{base}/v1/messages/count_tokens": shared
        | {"post": _translated("How many tokens the messages are, rendered as a whole", _ANTHROPIC, "messages")},
        f"{base}/v1/responses": shared | {"post": _translated(f"A response, {about}", _RESPONSES)},
        f"{base}/v1/responses/{{response_id}}": one
        | {
            "get": _operation("A response that was kept, or a turn on record"),
            "delete": _operation("Forget a response; not on a session, which keeps its turns"),
        },
        f"{base}/v1/responses/{{response_id}}/input_items": one
        | {"get": _operation("The input of a response, with all messages before it") | {"parameters": _ITEMS}},
        f"{base}/v1/conversations": shared
        | {"post": _operation("A new conversation, which responses can name") | {"requestBody": _NEW_CONVERSATION}},
    }


def _upload(about: str) -> dict[str, Any]:
    return _operation(about) | {"requestBody": {"required": True, "content": _FILE}}


def _weights() -> dict[str, Any]:
    operation = _operation("Replace weights of the model while it is served (admin)", body=WeightsAtPath)
    operation["requestBody"]["content"] |= _FILE
    return operation | {"parameters": _NEW_WEIGHTS}


def _download(about: str) -> dict[str, Any]:
    operation = _operation(about)
    operation["responses"]["200"]["content"] = _FILE
    return operation | {"parameters": [_SNAPSHOT]}


def _stream(about: str) -> dict[str, Any]:
    operation = _operation(about)
    operation["responses"]["200"]["content"] = _EVENTS
    return operation


def build() -> dict[str, Any]:
    (_, components) = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    describe(components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": __version__},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
        "paths": _paths()
        | _translated_paths("")
        | _session_paths()
        | _translated_paths("/sessions/{session_id}", _SESSION),
    }


def _paths() -> dict[str, Any]:
    return {
        "/health": {"get": _operation("Liveness check")},
        "/healthz": {"get": _operation("Liveness check")},
        "/readyz": {"get": _operation("Readiness check: 503 while draining or while the journal cannot be written")},
        "/metrics": {"get": _operation("Prometheus metrics")},
        "/": {"get": _operation("Name and version of the server, and where its endpoints are")},
        "/v1/models": {"get": _operation("List of models: the one that is served")},
        "/v1/models/{model}": {"parameters": [_MODEL], "get": _operation("The served model")},
        "/v1/chat/completions": {
            "post": _operation("Chat completion, stateless: the whole conversation is the prompt", body=ChatCompletion)
        },
        "/v1/conversations/{conversation_id}": {
            "parameters": [_parameter("conversation_id", "Id of the conversation", "path")],
            "get": _operation("The conversation"),
            "delete": _operation("Forget the conversation"),
        },
        "/v1/completions": {"post": _operation("Text completion, stateless", body=Completion)},
        "/cluster": {"get": _operation("The members that share a journal: state, lease, addresses, room for sessions")},
        "/control/pause": {"post": _operation("Pause: no new generation begins (admin)") | {"parameters": _PAUSED}},
        "/control/resume": {"post": _operation("Resume (admin)")},
        "/control/weights": {"post": _weights()},
        "/control/weight_version": {
            "put": _operation("Set the weight version that is in use (admin)", body=WeightVersion)
        },
    }


def _session_paths() -> dict[str, Any]:
    one = {"parameters": [_SESSION]}
    return {
        "/sessions": {
            "get": _operation("List your sessions, all or by pages") | {"parameters": _LISTED},
            "post": _operation("Open a chat session", body=NewSession, optional=True),
        },
        "/sessions/import": {"post": _upload("Import a session file as a new session")},
        "/sessions/purge": {"post": _operation("Delete closed sessions from the journal", body=Purge, optional=True)},
        "/sessions/{session_id}/export": one | {"get": _download("Export the session as a file")},
        "/sessions/{session_id}": one
        | {
            "get": _operation("State, messages and recorded turns of the session") | {"parameters": _SHOWN},
            "delete": _operation("Close the session", status=204),
        },
        "/sessions/{session_id}/fork": one
        | {"post": _operation("Fork: a new session with the same history", body=Fork, optional=True)},
        "/sessions/{session_id}/v1/chat/completions": one
        | {"post": _operation("Chat completion on the session: only new messages are computed", body=ChatCompletion)},
        "/sessions/{session_id}/reward": one
        | {"post": _operation("Set the reward of the session or of one turn", body=Reward)},
        "/sessions/{session_id}/samples": one
        | {"post": _operation("Samples for training", body=SamplesRequest, optional=True)},
        "/sessions/{session_id}/search": one
        | {"get": _operation("Passages that a text is about, the best first") | {"parameters": _SEARCHED}},
        "/sessions/{session_id}/tokens": one
        | {"get": _operation("The exact tokens of the session, page by page") | {"parameters": _TOKENS}},
        "/sessions/{session_id}/events": one
        | {"get": _stream("What goes on in the session, token by token, as server-sent events")},
        "/events": {"get": _stream("What goes on in all of the caller's sessions, as server-sent events")},
        "/samples/verify": {"post": _upload("Check the certificates of a samples file")},
        "/sessions/{session_id}/v1/models": one | {"get": _operation("List of models: the one that is served")},
        "/sessions/{session_id}/v1/models/{model}": {
            "parameters": [_SESSION, _MODEL],
            "get": _operation("The served model"),
        },
    }


async def document(request: Request) -> Response:
    return JSONResponse(build())


async def index(request: Request) -> Response:
    """For whoever opens the server's address: what it is, and where to go on."""
    places = {"console": "/console", "openai": "/v1", "sessions": "/sessions", "openapi": "/openapi.json"}
    places |= {"health": "/health", "ready": "/readyz", "metrics": "/metrics"}
    return JSONResponse({"name": "holdfast", "version": __version__, "endpoints": places})
