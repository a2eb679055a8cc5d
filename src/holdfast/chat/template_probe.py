"""What a chat template supports, found by rendering small conversations: roles, tools, and how to continue.

A conversation is continued by rendering a synthetic one whose last assistant text is a sentinel, plus the new
messages; the probe also finds which synthetic prefix works. A template that drops a message counts as not
supporting it, the same as one that raises.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from holdfast.chat.messages import Message
from holdfast.chat.template import Renderer
from holdfast.errors import ModelError, TemplateError

SENTINEL = f"holdfast-{secrets.token_hex(8)}"  # random, so that no message contains it
USER: Message = {"role": "user", "content": "-"}
SYSTEM: Message = {"role": "system", "content": "-"}

NO_END_OF_TURN = "the chat template does not mark where an assistant's turn ends, so a chat cannot be continued"

_MARK = f"mark-{secrets.token_hex(8)}"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _MARK, "description": "-", "parameters": {"type": "object", "properties": {}}},
}


def _call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "call00000", "type": "function", "function": {"name": _MARK, "arguments": arguments}}]


_AFTER_TEXT: list[list[Message]] = [
    [USER, {"role": "assistant", "content": SENTINEL}],
    [SYSTEM, USER, {"role": "assistant", "content": SENTINEL}],
]
_AFTER_CALL: list[list[Message]] = [
    [USER, {"role": "assistant", "content": "", "tool_calls": _call(SENTINEL)}],
    [USER, {"role": "assistant", "content": "", "tool_calls": _call(f'{{"a": "{SENTINEL}"}}')}],
    *_AFTER_TEXT,
]


@dataclass(frozen=True, slots=True)
class Abilities:
    """`after_text` and `after_call` are the prefixes that work after a text and after a tool call (None: no prefix)."""

    first_roles: frozenset[str]
    next_roles: frozenset[str]
    has_tools: bool
    after_text: list[Message]
    after_call: list[Message] | None


def probe(renderer: Renderer) -> Abilities:
    """What the renderer's template supports. Raises ModelError if a conversation cannot be continued with it."""
    has_tools = _MARK in _try(renderer, [USER], with_tools=True)
    after_text = _working(renderer, _AFTER_TEXT, _marked("user"), has_tools)
    if after_text is None:
        raise ModelError(NO_END_OF_TURN)
    after_call = _working(renderer, _AFTER_CALL, _marked("tool"), has_tools)
    first = {role for role in ("system", "developer") if _MARK in _try(renderer, [_marked(role), USER])}
    first |= {role for role in ("user", "assistant") if _MARK in _try(renderer, [USER, _marked(role)])}
    following = {
        role
        for role in ("system", "developer", "user", "assistant")
        if _MARK in _try(renderer, [*after_text, _marked(role)]).rpartition(SENTINEL)[2]
    }
    if after_call is not None:
        first.add("tool")
        following.add("tool")
    return Abilities(frozenset(first), frozenset(following), has_tools, after_text, after_call)


def _marked(role: str) -> Message:
    message: Message = {"role": role, "content": _MARK}
    return message | {"tool_call_id": "call00000", "name": "-"} if role == "tool" else message


def _working(
    renderer: Renderer, prefixes: list[list[Message]], message: Message, with_tools: bool
) -> list[Message] | None:
    for prefix in prefixes:
        text = _try(renderer, [*prefix, message], with_tools=with_tools)
        tail = text.rpartition(SENTINEL)[2]
        ends = any(renderer.tokenizer.is_control(token) for token in renderer.encode(tail.partition(_MARK)[0]))
        if text.count(SENTINEL) == 1 and _MARK in tail and ends:
            return prefix
    return None


def _try(renderer: Renderer, messages: list[Message], *, with_tools: bool = False) -> str:
    """The rendered text, or "" if the template raises."""
    try:
        return renderer.text(messages, prompt=True, tools=[_TOOL] if with_tools else ())
    except TemplateError:
        return ""
