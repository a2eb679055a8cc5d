"""Whether a message that a client sends back is the one on record. Pure comparison of normal forms."""

import importlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.chat.messages import Message
from holdfast.errors import ConfigError


class Difference(NamedTuple):
    """The first field in which two messages differ, and its value in each."""

    field: str
    stored: Any
    given: Any


Matcher = Callable[[Message, Message], Difference | None]  # (stored, given)


def normal(stored: Message, given: Message) -> Difference | None:
    """Role, content and tool calls are equal, and so is reasoning unless the client left it out."""
    return _text_fields(stored, given) or _field("tool_call_id", stored, given) or _calls(stored, given, with_ids=True)


def strict(stored: Message, given: Message) -> Difference | None:
    """Every field is equal, reasoning and name too."""
    return normal(stored, given) or _field("reasoning_content", stored, given) or _field("name", stored, given)


def loose_tool_call(stored: Message, given: Message) -> Difference | None:
    """As `normal`, but calls may have other ids."""
    return _text_fields(stored, given) or _calls(stored, given, with_ids=False)


def role_content_only(stored: Message, given: Message) -> Difference | None:
    return _field("role", stored, given) or _field("content", stored, given)


_KNOWN: dict[str, Matcher] = {
    matcher.__name__: matcher for matcher in (normal, strict, loose_tool_call, role_content_only)
}


def load_matcher(name: str) -> Matcher:
    """A matcher by its name here, or by the dotted path of a function elsewhere."""
    if name in _KNOWN:
        return _KNOWN[name]
    module, _, attribute = name.rpartition(".")
    try:
        matcher: Matcher = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        known = ", ".join(_KNOWN)
        raise ConfigError(f"matcher {name!r} is neither one of {known} nor the dotted path of a function") from exc
    return matcher


def _text_fields(stored: Message, given: Message) -> Difference | None:
    sent_reasoning = _field("reasoning_content", stored, given) if given.get("reasoning_content") else None
    return role_content_only(stored, given) or sent_reasoning


def _field(field: str, stored: Message, given: Message) -> Difference | None:
    mine, theirs = stored.get(field) or "", given.get(field) or ""
    return None if mine == theirs else Difference(field, mine, theirs)


def _calls(stored: Message, given: Message, *, with_ids: bool) -> Difference | None:
    mine, theirs = stored.get("tool_calls") or [], given.get("tool_calls") or []
    if len(mine) != len(theirs):
        return Difference("tool_calls", mine, theirs)
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        where = f"tool_calls[{index}]"
        if with_ids and one.get("id") != other.get("id"):
            return Difference(f"{where}.id", one.get("id"), other.get("id"))
        for field, key in (("name", str), ("arguments", _json_value)):
            a, b = one["function"][field], other["function"][field]
            if key(a) != key(b):
                return Difference(f"{where}.function.{field}", a, b)
    return None


def _number(text: str) -> float | int:
    """1.0 and 1 are equal: clients parse numbers and write them again."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _json_value(text: str) -> tuple[str, str]:
    """Equal for equal JSON values (true is not 1), regardless of spacing and the order of keys; no text is `{}`."""
    try:
        return "json", json.dumps(json.loads(text or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return "text", text
