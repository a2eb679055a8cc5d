"""One chat by hand, before anything is timed: does the server keep exactly what the upstream said?"""

import json
import urllib.request
from typing import Any

from holdfast.bench.canned_upstream import Script
from holdfast.bench.load import body_of
from holdfast.bench.processes import ProcessFailed

_TIMEOUT_S = 30.0


def check_record(address: str, script: Script) -> str:
    """Empty where the record of one turn is the upstream's reply, payload included; otherwise what is wrong with it."""
    session = _ask("POST", address, "/sessions")["session_id"]
    try:
        _ask("POST", address, f"/sessions/{session}/v1/chat/completions", body_of(0))
        shown = _ask("GET", address, f"/sessions/{session}")
        return problem(shown["records"], shown["metadata"]["accumulated_token_ids"], script)
    finally:
        _ask("DELETE", address, f"/sessions/{session}")


def problem(records: list[dict[str, Any]], token_ids: list[int], script: Script) -> str:
    if len(records) != 1:
        return f"there are {len(records)} records of one turn"
    if records[0]["response"] != json.loads(script.reply()):
        return "the record is not what the upstream sent"
    if token_ids[-script.num_tokens :] != script.token_ids:
        return "the token ids on record are not those that were sampled"
    return ""


def _ask(method: str, address: str, path: str, body: bytes = b"") -> Any:
    headers = {"content-type": "application/json"} if body else {}
    request = urllib.request.Request(f"http://{address}{path}", data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read()
    except OSError as exc:
        raise ProcessFailed(f"{method} {path} at {address} failed: {exc}") from exc
    return json.loads(content) if content else None
