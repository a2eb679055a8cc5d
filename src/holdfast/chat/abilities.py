"""What a chat template can do, found by rendering synthetic conversations with it: never by a model's name.

A conversation is continued by rendering a synthetic one whose last assistant text is a sentinel, plus the new messages.
`probe` finds which synthetic prefix works, which roles and tools the template renders, and which tokens end a turn. A
template that drops a message counts as not supporting it, the same as one that raises.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.chat.messages import Message
from holdfast.chat.template import Renderer
from holdfast.errors import ModelError, TemplateError

SENTINEL = f"holdfast-{secrets.token_hex(8)}"  # random, so that no message contains it
USER: Message = {"role": "user", "content": "-"}
SYSTEM: Message = {"role": "system", "content": "-"}

NO_END_OF_TURN = "the chat template does not mark where an assistant's turn ends, so a chat cannot be continued"

_MARK = f"mark-{secrets.token_hex(8)}"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = "call00000"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _MARK, "description": "-", "parameters": {"type": "object", "properties": {}}},
}


def _calling(arguments: Any, *, name: str = _MARK, call_id: str = _SHORT_ID) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_AFTER_TEXT: list[list[Message]] = [
    [USER, {"role": "assistant", "content": SENTINEL}],
    [SYSTEM, USER, {"role": "assistant", "content": SENTINEL}],
]
_AFTER_CALL: list[list[Message]] = [[USER, _calling(SENTINEL)], [USER, _calling({"a": SENTINEL})], *_AFTER_TEXT]


@dataclass(frozen=True, slots=True)
class Ends:
    """How a template and its model end an assistant's turn.

    `after_text` and `after_call` are what the template renders there. `stops` are the tokens at which a model stops.
    `may_differ`: the model's may be another one than the template renders, and then it is left out of the history.
    """

    after_text: int
    after_call: int
    stops: frozenset[int]
    boundaries: frozenset[int]  # the first of these after the sentinel ends the turn
    may_differ: bool


@dataclass(frozen=True, slots=True)
class Abilities:
    """`after_text` and `after_call` are the prefixes that work after a text and after a tool call (None: no prefix)."""

    first_roles: frozenset[str]
    next_roles: frozenset[str]
    has_tools: bool
    after_text: list[Message]
    after_call: list[Message] | None
    later_roles: frozenset[str] = frozenset()  # that the whole render of a conversation shows after its first message
    must_alternate: bool = False  # two user messages in a row are refused
    reasoning_field: str = "reasoning_content"
    wants_text_arguments: bool = False  # of calls, as JSON text; else as an object
    wants_short_ids: bool = False  # of calls: nine letters and digits
    shows_call_name: bool = False  # a tool's result is rendered with the name or id of the call before it


def probe(renderer: Renderer) -> tuple[Abilities, Ends]:
    """What the renderer's template supports. Raises ModelError if a conversation cannot be continued with it."""
    has_tools = _MARK in _try(renderer, [USER], with_tools=True)
    after_text = _working(renderer, _AFTER_TEXT, _marked("user"), has_tools)
    if after_text is None:
        raise ModelError(NO_END_OF_TURN)
    after_call = _working(renderer, _AFTER_CALL, _marked("tool"), has_tools)
    first = {role for role in ("system", "developer") if _MARK in _try(renderer, [_marked(role), USER])}
    first |= {"assistant"} if _MARK in _try(renderer, [USER, _marked("assistant")]) else set()
    first |= {"user"}  # a prefix works, and it begins with one
    shown = {
        role: _try(renderer, [*after_text, _marked(role)]) for role in ("system", "developer", "user", "assistant")
    }
    following = {role for role, text in shown.items() if _MARK in after_sentinel(text)}
    if after_call is not None:
        first.add("tool")
        following.add("tool")
    later = {role for role in first if role not in ("system", "developer") or _MARK in shown[role]}
    abilities = Abilities(
        frozenset(first),
        frozenset(following),
        has_tools,
        after_text,
        after_call,
        later_roles=frozenset(later),
        must_alternate=_MARK not in _try(renderer, [*after_text, USER, _marked("user")]),
        reasoning_field=next((name for name in _REASONING_FIELDS if _reads(renderer, name)), _REASONING_FIELDS[0]),
        wants_text_arguments=has_tools and _wants_text_arguments(renderer),
        wants_short_ids=has_tools and _wants_short_ids(renderer),
    )
    ends = _find_ends(renderer, abilities)
    return replace(abilities, shows_call_name=_shows_call_name(renderer, abilities, ends)), ends


def renamed(prefix: list[Message], call: dict[str, Any]) -> list[Message]:
    """A prefix that ends in a synthetic call, with the name and id of a real one."""
    if not prefix or "tool_calls" not in prefix[-1]:
        return prefix
    *before, calling = prefix
    (synthetic,) = calling["tool_calls"]
    function = synthetic["function"] | {"name": call["function"]["name"]}
    return [*before, calling | {"tool_calls": [synthetic | {"id": call.get("id", _SHORT_ID), "function": function}]}]


def after_sentinel(text: str) -> str:
    return text.rpartition(SENTINEL)[2]


def tail_ids(renderer: Renderer, text: str, boundaries: frozenset[int]) -> list[int]:
    """The ids of rendered text from the token on that ends the sentinel's turn; [] if there is none."""
    ids = renderer.encode(text)
    for is_end in (boundaries.__contains__, renderer.tokenizer.is_control):
        for index, token in enumerate(ids):
            if is_end(token):
                return ids[index:]
    return []


def _find_ends(renderer: Renderer, abilities: Abilities) -> Ends:
    eos = renderer.tokenizer.eos_token_ids

    def ending(prefix: list[Message], *following: Message, prompt: bool = True) -> int | None:
        """The token that ends the prefix's last turn where `following` comes next."""
        text = _try(renderer, [*prefix, *following], with_tools=abilities.has_tools, prompt=prompt)
        ids = tail_ids(renderer, after_sentinel(text), eos) if SENTINEL in text else []
        return ids[0] if ids else None

    after_text, before_user = ending(abilities.after_text), ending(abilities.after_text, USER)
    if after_text is None or before_user is None:
        raise ModelError(NO_END_OF_TURN)
    after_call, before_result = after_text, after_text
    if abilities.after_call is not None:
        after_call = ending(abilities.after_call) or after_text
        before_result = ending(abilities.after_call, _marked("tool")) or after_call
    others = {ending(abilities.after_text, _marked(role)) for role in abilities.next_roles - {"tool", "user"}}
    final = ending(abilities.after_text, prompt=False) or after_text
    is_opener = after_text != before_user
    found = {after_text, before_user, after_call, before_result, final, *(others if is_opener else ())}
    ends = frozenset(token for token in found if token is not None)
    stops = (eos | ends) - frozenset(_inside_turns(renderer, abilities, ends))
    if not stops:
        raise ModelError(NO_END_OF_TURN)
    return Ends(after_text, after_call, stops, eos | ends, may_differ=is_opener or final != after_text)


def _inside_turns(renderer: Renderer, abilities: Abilities, ends: frozenset[int]) -> Iterator[int]:
    """Those of `ends` that also stand between the reasoning and the text of one reply."""
    reasoning = f"{_MARK}-reasoning"
    for prefix in filter(None, (abilities.after_text, abilities.after_call)):
        text = _try(renderer, [*prefix[:-1], prefix[-1] | {abilities.reasoning_field: reasoning}], prompt=False)
        between, sentinel, _ = text.partition(reasoning)[2].partition(SENTINEL)
        if sentinel:
            yield from ends.intersection(renderer.encode(between))


def _reads(renderer: Renderer, field: str) -> bool:
    """Whether reasoning under this name is rendered before the text of a reply."""
    text = _try(renderer, [USER, {"role": "assistant", "content": SENTINEL, field: _MARK}], prompt=False)
    return _MARK in text.partition(SENTINEL)[0]


def _wants_text_arguments(renderer: Renderer) -> bool:
    as_object, as_text = (
        _try(renderer, [USER, _calling(arguments)], with_tools=True) for arguments in ({"a": SENTINEL}, SENTINEL)
    )
    return SENTINEL in as_text and SENTINEL not in as_object


def _wants_short_ids(renderer: Renderer) -> bool:
    short, long = (
        _try(renderer, [USER, _calling({"a": SENTINEL}, call_id=call_id)], with_tools=True)
        for call_id in (_SHORT_ID, "call_" + "0" * 24)
    )
    return SENTINEL in short and SENTINEL not in long


def _shows_call_name(renderer: Renderer, abilities: Abilities, ends: Ends) -> bool:
    """Whether another name or id of the call changes how its result is rendered."""
    prefix = abilities.after_call or []
    result: Message = {"role": "tool", "content": "-", "tool_call_id": _SHORT_ID}
    other = {"id": "call11111", "function": {"name": "-"}}
    one, two = (
        after_sentinel(_try(renderer, [*messages, result], with_tools=abilities.has_tools))
        for messages in (prefix, renamed(prefix, other))
    )
    return tail_ids(renderer, one, ends.boundaries) != tail_ids(renderer, two, ends.boundaries)


def _marked(role: str) -> Message:
    message: Message = {"role": role, "content": _MARK}
    return message | {"tool_call_id": _SHORT_ID, "name": "-"} if role == "tool" else message


def _working(
    renderer: Renderer, prefixes: Sequence[list[Message]], message: Message, with_tools: bool
) -> list[Message] | None:
    for prefix in prefixes:
        text = _try(renderer, [*prefix, message], with_tools=with_tools)
        tail = after_sentinel(text)
        ends = any(renderer.tokenizer.is_control(token) for token in renderer.encode(tail.partition(_MARK)[0]))
        if text.count(SENTINEL) == 1 and _MARK in tail and ends:
            return prefix
    return None


def _try(renderer: Renderer, messages: list[Message], *, with_tools: bool = False, prompt: bool = True) -> str:
    """The rendered text, or "" if the template raises."""
    try:
        return renderer.text(messages, prompt=prompt, tools=[_TOOL] if with_tools else ())
    except TemplateError:
        return ""
