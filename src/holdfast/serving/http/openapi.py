"""The OpenAPI document of this door, made from the types that it decodes."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast import __version__
from holdfast.serving.http.schema import (
    ChatCompletion,
    Completion,
    Fork,
    NewSession,
    Purge,
    Reward,
    SamplesRequest,
    WeightVersion,
)
from holdfast.sessions.page import MAX_PAGE
from holdfast.sessions.view import SessionState

_SESSION = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
_SNAPSHOT = {"name": "snapshot", "in": "query", "schema": {"type": "boolean", "default": True}}
_LISTED = [
    {"name": "label", "in": "query", "schema": {"type": "string"}},
    {"name": "state", "in": "query", "schema": {"type": "string", "enum": list(SessionState)}},
    {"name": "page_size", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
    {"name": "page_token", "in": "query", "schema": {"type": "string"}},
]
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TYPES = (ChatCompletion, Completion, NewSession, Fork, Purge, Reward, SamplesRequest, WeightVersion)


def _operation(about: str, *, body: type | None = None, status: int = 200, optional: bool = False) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {str(status): {"description": "as asked"}, "default": {"description": "OpenAI's error envelope"}},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": not optional, "content": {"application/json": {"schema": schema}}}
    return operation


def _upload(about: str) -> dict[str, Any]:
    return _operation(about) | {"requestBody": {"required": True, "content": _FILE}}


def _download(about: str) -> dict[str, Any]:
    operation = _operation(about)
    operation["responses"]["200"]["content"] = _FILE
    return operation | {"parameters": [_SNAPSHOT]}


def build() -> dict[str, Any]:
    (_, components) = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    one = {"parameters": [_SESSION]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": __version__},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
        "paths": {
            "/health": {"get": _operation("alive?")},
            "/healthz": {"get": _operation("alive?")},
            "/readyz": {"get": _operation("loaded and not draining?")},
            "/metrics": {"get": _operation("Prometheus metrics")},
            "/v1/models": {"get": _operation("the model that is served")},
            "/v1/chat/completions": {"post": _operation("one chat turn, whole prompt", body=ChatCompletion)},
            "/v1/completions": {"post": _operation("one text completion", body=Completion)},
            "/sessions": {
                "get": _operation("your sessions, all or by pages") | {"parameters": _LISTED},
                "post": _operation("open a session", body=NewSession, optional=True),
            },
            "/sessions/import": {"post": _upload("a new session from a session file")},
            "/sessions/purge": {"post": _operation("forget closed sessions for good", body=Purge, optional=True)},
            "/sessions/{session_id}/export": one | {"get": _download("the session as a file")},
            "/sessions/{session_id}": one
            | {"get": _operation("how it stands"), "delete": _operation("close it", status=204)},
            "/sessions/{session_id}/fork": one
            | {"post": _operation("a second session with the same past", body=Fork, optional=True)},
            "/sessions/{session_id}/v1/chat/completions": one
            | {"post": _operation("the session's next turn: only what is new is computed", body=ChatCompletion)},
            "/sessions/{session_id}/reward": one | {"post": _operation("what it was worth", body=Reward)},
            "/sessions/{session_id}/samples": one
            | {"post": _operation("what a trainer reads", body=SamplesRequest, optional=True)},
            "/control/pause": {"post": _operation("let no new turn begin (admin)")},
            "/control/resume": {"post": _operation("let turns begin again (admin)")},
            "/control/weight_version": {"put": _operation("which weights are in use (admin)", body=WeightVersion)},
            "/sessions/{session_id}/v1/models": one | {"get": _operation("the model that is served")},
        },
    }


async def document(request: Request) -> Response:
    return JSONResponse(build())
