"""OpenAI messages as clients send them, converted to one normal form. Knows JSON values, nothing of HTTP.

Normal form: `role`, `content` as a string and, unless empty, `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import InvalidArgument

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ALSO_ALLOWED = ("refusal", "annotations", "audio", "function_call", "index")  # clients send these back, empty
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", *_ALSO_ALLOWED)


def read_messages(raw: Sequence[Any], where: str = "messages") -> list[Message]:
    """The normal form of a request's messages. InvalidArgument names the path of what cannot be understood."""
    if not raw:
        raise _invalid(where, "must contain at least one message")
    return [_plain(value) or _message(value, f"{where}[{index}]") for index, value in enumerate(raw)]


def for_template(message: Message) -> Message:
    """The message as templates expect it: a call's arguments as the object they spell, if they spell one."""
    if "tool_calls" not in message:
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


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise _invalid(where, "must be an object")
    role = raw.get("role")
    if role not in ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {role!r}")
    for field, value in raw.items():
        if field not in _FIELDS or (field in _ALSO_ALLOWED and field != "index" and value):
            raise _invalid(f"{where}.{field}", "is not supported")
    message: Message = {"role": role, "content": _content(raw.get("content"), f"{where}.content")}
    reasoning = _text(raw.get("reasoning_content") or raw.get("reasoning"), f"{where}.reasoning_content")
    calls = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls")
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


def _content(raw: Any, where: str) -> str:
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
        for field in part.keys() - {"type", "text"}:
            raise _invalid(f"{path}.{field}", "is not supported")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{path}.text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _text(raw: Any, where: str) -> str:
    if raw is not None and not isinstance(raw, str):
        raise _invalid(where, "must be a string or null")
    return raw or ""


def _tool_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    if raw is not None and not isinstance(raw, list):
        raise _invalid(where, "must be a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(raw or ())]


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or raw.get("type", "function") != "function":
        raise _invalid(where, "must be a function call, an object with type 'function' and function")
    for field in raw.keys() - {"id", "type", "function", "index"}:
        raise _invalid(f"{where}.{field}", "is not supported")
    name, arguments = function.get("name"), function.get("arguments", "")
    if not isinstance(name, str) or not name:
        raise _invalid(f"{where}.function.name", "must be a string that is not empty")
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
