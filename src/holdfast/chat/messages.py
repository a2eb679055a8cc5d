"""OpenAI messages as clients send them, brought to one normal form. Knows JSON values, nothing of HTTP.

Normal form: `role`, `content` as text, and where there is something to say `reasoning_content`, `tool_calls`,
`tool_call_id`, `name`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import InvalidArgument

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ALSO_ALLOWED = ("refusal", "annotations", "audio", "function_call", "index")  # what clients echo, empty
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", *_ALSO_ALLOWED)


def read_messages(raw: Sequence[Any], where: str = "messages") -> list[Message]:
    """The normal form of a request's messages; what cannot be understood is refused by its path."""
    if not raw:
        raise InvalidArgument(f"{where} must hold at least one message", param=where)
    return [_plain(value) or _message(value, f"{where}[{index}]") for index, value in enumerate(raw)]


def _plain(raw: Any) -> Message | None:
    """The message where it has nothing but a role and a text, as nearly all of a long conversation have."""
    if type(raw) is dict and len(raw) == 2 and raw.get("role") in ROLES and type(raw.get("content")) is str:
        return {"role": raw["role"], "content": raw["content"]}
    return None


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise InvalidArgument(f"{where} must be an object", param=where)
    role = raw.get("role")
    if role not in ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role")
    for field, value in raw.items():
        if field not in _FIELDS or (field in _ALSO_ALLOWED and field != "index" and value):
            raise InvalidArgument(f"{where}.{field} is not supported", param=f"{where}.{field}")
    message: Message = {"role": role, "content": _content(raw.get("content"), f"{where}.content")}
    reasoning = _text(raw.get("reasoning_content") or raw.get("reasoning"), f"{where}.reasoning_content")
    calls = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls")
    if (reasoning or calls) and role != "assistant":
        field = "tool_calls" if calls else "reasoning_content"
        raise InvalidArgument(f"{where}.{field}: only an assistant has any", param=f"{where}.{field}")
    optional = {
        "reasoning_content": reasoning,
        "tool_calls": calls,
        "tool_call_id": _text(raw.get("tool_call_id"), f"{where}.tool_call_id"),
        "name": _text(raw.get("name"), f"{where}.name"),
    }
    return message | {field: value for field, value in optional.items() if value}


def _content(raw: Any, where: str) -> str:
    """Null is empty; text parts are joined; other parts are refused."""
    if not isinstance(raw, list):
        return _text(raw, where)
    texts = []
    for index, part in enumerate(raw):
        path = f"{where}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidArgument(f"{path} must be an object", param=path)
        if part.get("type") != "text":
            raise InvalidArgument(f"{path}.type: only text parts are supported here", param=f"{path}.type")
        for field in part.keys() - {"type", "text"}:
            raise InvalidArgument(f"{path}.{field} is not supported", param=f"{path}.{field}")
        if not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{path}.text must be text", param=f"{path}.text")
        texts.append(part["text"])
    return "".join(texts)


def _text(raw: Any, where: str) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, str):
        raise InvalidArgument(f"{where} must be text or null", param=where)
    return raw


def _tool_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise InvalidArgument(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(raw)]


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or raw.get("type", "function") != "function":
        raise InvalidArgument(f"{where} must be a call of a function", param=where)
    for field in raw.keys() - {"id", "type", "function", "index"}:
        raise InvalidArgument(f"{where}.{field} is not supported", param=f"{where}.{field}")
    name, arguments = function.get("name"), function.get("arguments", "")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{where}.function.name must be text", param=f"{where}.function.name")
    if not isinstance(arguments, str):  # some clients send the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": raw["id"], **call} if isinstance(raw.get("id"), str) else call


def for_template(message: Message) -> Message:
    """As templates want it: the arguments of a call as the object that they spell, where they do."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = parsed_arguments(call["function"]["arguments"])
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def parsed_arguments(text: str) -> Any:
    """The JSON object that `text` spells, or `text` itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
