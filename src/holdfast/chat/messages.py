"""OpenAI messages as clients send them, converted to one normal form. Knows JSON values, nothing of HTTP.

Normal form: `role`, `content` as a string and, unless empty, `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
A message of the role `function` becomes one of the role `tool`, and a call of a custom tool a function call whose one
argument is `input`.
"""

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from holdfast.errors import InvalidArgument

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
CUSTOM_INPUT = "input"  # the one argument of a custom tool, which takes any text
ANY_TEXT = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
MAX_IGNORED = 32  # paths that are collected of one request
_MAX_PATH = 200  # characters of one of them
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "index"}
_PART_FIELDS = {"type", "text"}
_CALL_FIELDS = {kind: {"id", "type", kind, "index"} for kind in ("function", "custom")}
_CALLED_FIELDS = {"function": {"name", "arguments"}, "custom": {"name", "input"}}
_SENT_BACK = ("refusal", "annotations", "audio", "function_call")  # clients send these back, empty
# Content that cannot be rendered
_CONTENT = {"refusal", "audio", "function_call", "image", "images", "image_url", "input_audio", "video", "file"}


class IgnoredFields:
    """The paths of fields that have no effect, the first ones of a request."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.num = 0  # also of those beyond the first ones

    def add(self, path: str) -> None:
        self.num += 1
        if len(self.paths) < MAX_IGNORED:
            self.paths.append(path[:_MAX_PATH])


def read_messages(
    raw: Sequence[Any], where: str = "messages", *, ignored: IgnoredFields | None = None
) -> list[Message]:
    """The normal form of a request's messages. InvalidArgument names the path of what cannot be understood.

    Unknown fields are added to `ignored`; without it they are refused.
    """
    if not raw:
        raise _invalid(where, "must contain at least one message")
    return [_plain(value) or _message(value, f"{where}[{index}]", ignored) for index, value in enumerate(raw)]


def for_template(message: Message, *, is_text: bool = False, reasoning_field: str = "reasoning_content") -> Message:
    """The message as templates expect it: a call's arguments as the object they spell, if they spell one.

    `is_text`: this template wants them as text. `reasoning_field` is the name under which it reads reasoning.
    """
    if reasoning_field != "reasoning_content" and "reasoning_content" in message:
        named = {reasoning_field: message["reasoning_content"]}
        message = {key: value for key, value in message.items() if key != "reasoning_content"} | named
    if is_text or "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _parsed(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _plain(raw: Any) -> Message | None:
    """The message if it has nothing but a role and a text, as nearly all messages of a long conversation do."""
    if type(raw) is dict and len(raw) == 2 and raw.get("role") in ROLES and type(raw.get("content")) is str:
        return {"role": raw["role"], "content": raw["content"]}
    return None


def _message(raw: Any, where: str, ignored: IgnoredFields | None) -> Message:
    if not isinstance(raw, Mapping):
        raise _invalid(where, "must be an object")
    role = "tool" if raw.get("role") == "function" else raw.get("role")
    if role not in ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r}")
    _check_fields(raw, _FIELDS, where, ignored)
    message: Message = {"role": role, "content": _content(raw.get("content"), f"{where}.content", ignored)}
    reasoning = _text(raw.get("reasoning_content") or raw.get("reasoning"), f"{where}.reasoning_content")
    calls = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls", ignored)
    if (reasoning or calls) and role != "assistant":
        field = "tool_calls" if calls else "reasoning_content"
        raise _invalid(f"{where}.{field}", "is only allowed in assistant messages")
    optional = {
        "reasoning_content": reasoning,
        "tool_calls": calls,
        "tool_call_id": _text(raw.get("tool_call_id"), f"{where}.tool_call_id"),
        "name": _text(raw.get("name"), f"{where}.name"),
    }
    return message | {field: value for field, value in optional.items() if value}


def _check_fields(raw: Mapping[str, Any], known: Set[str], where: str, ignored: IgnoredFields | None) -> None:
    """Notes unknown fields; refuses those that carry content, and without `ignored` all of them."""
    if raw.keys() <= known:
        return
    for field, value in raw.items():
        if field in known or (not value and field in _SENT_BACK):
            continue
        if ignored is None or (value and field in _CONTENT):
            raise _invalid(f"{where}.{field}", "is not supported")
        if value is not None:
            ignored.add(f"{where}.{field}")


def _content(raw: Any, where: str, ignored: IgnoredFields | None) -> str:
    """Null is empty; text parts are joined; other parts are rejected."""
    if not isinstance(raw, list):
        return _text(raw, where)
    texts = []
    for index, part in enumerate(raw):
        path = f"{where}[{index}]"
        if not isinstance(part, Mapping):
            raise _invalid(path, "must be an object")
        if part.get("type") != "text":
            raise _invalid(f"{path}.type", f"must be 'text', the only supported part, got {part.get('type')!r}")
        _check_fields(part, _PART_FIELDS, path, ignored)
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{path}.text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _text(raw: Any, where: str) -> str:
    if raw is not None and not isinstance(raw, str):
        raise _invalid(where, "must be a string or null")
    return raw or ""


def _tool_calls(raw: Any, where: str, ignored: IgnoredFields | None) -> list[dict[str, Any]]:
    if raw is not None and not isinstance(raw, list):
        raise _invalid(where, "must be a list")
    return [_tool_call(call, f"{where}[{index}]", ignored) for index, call in enumerate(raw or ())]


def _tool_call(raw: Any, where: str, ignored: IgnoredFields | None) -> dict[str, Any]:
    kind: str = "custom" if isinstance(raw, Mapping) and raw.get("type") == "custom" else "function"
    function = raw.get(kind) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or raw.get("type", "function") != kind:
        raise _invalid(where, "must be a function call, an object with type 'function' and function")
    _check_fields(raw, _CALL_FIELDS[kind], where, ignored)
    name, arguments = function.get("name"), function.get("arguments", "")
    if kind == "custom":
        arguments = {"input": function.get("input", "")}
    if ignored is not None:
        _check_fields(function, _CALLED_FIELDS[kind], f"{where}.{kind}", ignored)
    if not isinstance(name, str) or not name:
        raise _invalid(f"{where}.{kind}.name", "must be a string that is not empty")
    if not isinstance(arguments, str):  # some clients send the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": raw["id"], **call} if isinstance(raw.get("id"), str) else call


def _invalid(where: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{where} {problem}", param=where)


def _parsed(text: str) -> Any:
    """The JSON object that `text` spells, or `text` itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
