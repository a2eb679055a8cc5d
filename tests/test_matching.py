"""Whether a message that comes back is the one on record."""

from typing import Any

import pytest

from holdfast.chat import matching
from holdfast.chat.messages import Message, read_messages
from holdfast.errors import ConfigError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": [true]}'}}
STORED = read_messages([{"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}])[0]


def _given(**changes: Any) -> Message:
    raw = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]} | changes
    return read_messages([raw])[0]


def _call(**changes: Any) -> dict[str, Any]:
    function = CALL["function"] | {key: changes.pop(key) for key in ("name", "arguments") if key in changes}
    return CALL | {"function": function} | changes


@pytest.mark.parametrize(
    "given",
    [
        _given(),
        _given(content=""),
        _given(content=[]),
        _given(content=[{"type": "text", "text": ""}]),
        _given(reasoning_content=None),
        _given(reasoning_content=None, reasoning="Hm."),
        _given(tool_calls=[_call(arguments='{"b":[true],"a":1}')]),
        _given(tool_calls=[_call(arguments='{"a": 1.0, "b": [true]}')]),
        _given(tool_calls=[_call(index=0)]),
        _given(name="bot"),
    ],
)
def test_other_spellings_of_the_same_message_match(given: Message) -> None:
    assert matching.normal(STORED, given) is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (_given(content="x"), "content"),
        (_given(reasoning_content="No."), "reasoning_content"),
        (_given(tool_calls=[]), "tool_calls"),
        (_given(tool_calls=[_call(name="g")]), "tool_calls[0].function.name"),
        (_given(tool_calls=[_call(arguments='{"a": 1, "b": [1]}')]), "tool_calls[0].function.arguments"),
        (_given(tool_calls=[_call(arguments="not json")]), "tool_calls[0].function.arguments"),
        (_given(tool_calls=[_call(id="c2")]), "tool_calls[0].id"),
        (read_messages([{"role": "user", "content": ""}])[0], "role"),
    ],
)
def test_other_messages_do_not_and_say_where(given: Message, field: str) -> None:
    difference = matching.normal(STORED, given)
    assert difference is not None
    assert difference.field == field


def test_matchers_differ_in_what_they_forgive() -> None:
    renamed = _given(tool_calls=[_call(id="c2")])
    assert matching.load_matcher("loose_tool_call")(STORED, renamed) is None
    assert matching.load_matcher("role_content_only")(STORED, _given(tool_calls=[])) is None
    assert matching.load_matcher("strict")(STORED, _given(reasoning_content=None)) is not None
    assert matching.load_matcher("strict")(STORED, _given()) is None


def test_a_matcher_of_ones_own_is_found_by_its_path() -> None:
    assert matching.load_matcher("holdfast.chat.matching.strict") is matching.strict
    for name in ("mood", "holdfast.nowhere.strict", "holdfast.chat.matching.nothing"):
        with pytest.raises(ConfigError, match="neither one of normal"):
            matching.load_matcher(name)
