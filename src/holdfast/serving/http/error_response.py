"""The error table of the HTTP endpoint, and OpenAI's error envelope."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from holdfast.errors import HoldfastError, InvalidArgument, SessionBusy
from holdfast.serving.http.dialects import CHAT
from holdfast.serving.http.dialects.base import Dialect, upstream_message

logger = logging.getLogger(__name__)

STATUS = {
    "session_not_found": 404,
    "model_not_found": 404,
    "response_not_found": 404,
    "session_busy": 409,
    "history_conflict": 409,
    "weights_busy": 409,
    "message_mismatch": 400,
    "invalid_argument": 400,
    "context_length_exceeded": 400,
    "template_error": 400,
    "constraint_failed": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "capacity_exhausted": 429,
    "queue_timeout": 429,
    "quota_exceeded": 429,
    "stream_stalled": 408,
    "session_failed": 500,
    "tokenization_mismatch": 500,
    "upstream_invalid": 502,
    "upstream_unreachable": 502,
    "upstream_timeout": 504,
    "upstream_aborted": 503,
    "upstream_unavailable": 503,
    "idempotency_mismatch": 422,
    "samples_unusable": 422,
    "paused": 503,
    "journal_failed": 503,
    "fenced": 503,
    "session_elsewhere": 421,
    "storage_unavailable": 503,
    "recompute_too_long": 409,
    "payload_too_large": 413,
    "request_timeout": 408,
    "unimplemented": 501,
    "draining": 503,
}
_RETRY_AFTER_S = {
    "capacity_exhausted": 1,
    "queue_timeout": 5,
    "quota_exceeded": 5,
    "session_busy": 1,
    "weights_busy": 5,
    "draining": 5,
    "paused": 5,
    "journal_failed": 1,
    "fenced": 1,
}
_MAX_TOLD = 1000  # characters
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def status_of(error: HoldfastError) -> int:
    return STATUS.get(error.code, 500)


def envelope(message: str, *, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"error": {"message": _told(message), "type": kind, "code": code, "param": param and _told(param)}}


def _told(text: str) -> str:
    """What a client wrote may be in it, so it is cut to a sane length and to what UTF-8 can spell."""
    text = text if len(text) <= _MAX_TOLD else f"{text[:_MAX_TOLD]}..."
    return text.encode(errors="replace").decode()


def body_of(error: HoldfastError) -> dict[str, Any]:
    param = error.param if isinstance(error, InvalidArgument) else None
    body = envelope(str(error), status=status_of(error), code=error.code, param=param)
    facts = {key: value for key, value in error.details.items() if key != "param"}
    return {"error": body["error"] | facts}


class RefusedByUpstream(Exception):
    """An upstream's own error: its body and its status."""

    def __init__(self, body: bytes, status: int) -> None:
        super().__init__(f"the upstream returned status {status}")
        self.body = body
        self.status = status


def told(error: Exception) -> tuple[dict[str, Any], int]:
    """Any error in OpenAI's envelope, and its status; an unexpected one is logged."""
    if isinstance(error, HoldfastError):
        return body_of(error), status_of(error)
    if isinstance(error, RefusedByUpstream):
        return envelope(upstream_message(error.body), status=error.status, code="upstream_error"), error.status
    logger.error("a stream failed", exc_info=error)
    return envelope("internal error; see the server log", status=500, code="internal"), 500


def response_for(
    error: Exception, dialect: Dialect = CHAT, *, is_plain: bool = False, request_id: str = ""
) -> Response:
    """The response to whatever was raised; an unexpected error is a 500 that names the request id for the server log.

    `is_plain`: the error is its message alone, as miles' session server has it.
    """
    response = _enveloped(error, request_id)
    if not is_plain and dialect is CHAT:
        return response
    kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    said = msgspec.json.decode(response.body)
    if dialect is CHAT:
        return JSONResponse({"error": said["error"]["message"]}, response.status_code, kept)
    return JSONResponse(dialect.error(said, response.status_code, request_id), response.status_code, kept)


def _enveloped(error: Exception, request_id: str) -> JSONResponse:
    if isinstance(error, HoldfastError):
        headers: dict[str, str] = {}
        if (seconds := error.details.get("retry_after_s", _RETRY_AFTER_S.get(error.code))) is not None:
            headers["retry-after"] = str(seconds)
        if isinstance(error, SessionBusy):
            headers["x-should-retry"] = "false"  # OpenAI's clients would try again by themselves
        if status_of(error) == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(body_of(error), status_of(error), headers)
    if isinstance(error, HTTPException):
        body = envelope(_said(error), status=error.status_code, code=_CODES.get(error.status_code))
        return JSONResponse(body, error.status_code, headers=_plain(error.headers))
    message = f"internal error; see the server log for request id {request_id}"
    return JSONResponse(envelope(message, status=500, code="internal"), 500)


_CODES = {404: "not_found", 405: "method_not_allowed"}


def _said(error: HTTPException) -> str:
    return {404: "no such path", 405: "this path does not allow the method"}.get(error.status_code, error.detail)


def _plain(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    return dict(headers) if headers else None
