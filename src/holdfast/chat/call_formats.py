"""How models write tool calls: the known formats, each with its parser and, where it can be forced, its grammar.

Which of them a model uses is found by rendering a known call with its template and reading it back (`chat_model.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.chat.grammar import HERMES, CallFrame
from holdfast.chat.json_object import is_object, members
from holdfast.chat.stop_strings import StringSearch
from holdfast.chat.tool_calls import (
    ContentAroundCalls,
    HermesParser,
    LlamaParser,
    Parsed,
    ToolCall,
    ToolCallParser,
    read_call,
)

Tools = Sequence[Mapping[str, Any]]
Tag = Callable[[str], str]  # how a tag is spelled in the text: as it is, or as a control token is
Read = Callable[[str], list[ToolCall] | None]  # the calls that a block spells; None if it does not

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BAR, _LOW = "\uff5c", "\u2581"
_DEEPSEEK = {
    name: f"<{_BAR}tool{_LOW}{name.replace(' ', _LOW)}{_BAR}>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
_MISTRAL = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`tags` are those tokens of a reply that its parser looks for. Without a `frame` a call cannot be forced."""

    name: str
    tags: tuple[str, ...]
    parser: Callable[[Tools, Tag], ToolCallParser]
    frame: CallFrame | None = None


class BlockParser:
    """Calls in blocks between two tags, anywhere in the reply; without a closing tag, up to its end.

    A block that `read` cannot read is content, unchanged. White space next to calls is content only if there is text
    before and after them. Held back are a possible tag, a block until it is closed, and white space.
    """

    def __init__(self, open: str, close: str, read: Read) -> None:
        self._open, self._close, self._read = open, close, read
        self._opening = StringSearch([open])
        self._closing = StringSearch([close] if close else [])
        self._block: list[str] | None = None
        self._content = ContentAroundCalls()

    def push(self, text: str) -> Parsed:
        content: list[str] = []
        calls: list[ToolCall] = []
        while text:
            cut = (self._opening if self._block is None else self._closing).push(text)
            if self._block is None:
                content.append(self._content.push(cut.before))
                self._block = [] if cut.found else None
            else:
                self._block.append(cut.before)
                if cut.found:
                    content.append(self._ended(self._close, calls))
            text = cut.after
        return Parsed("".join(content), tuple(calls))

    def finish(self) -> Parsed:
        calls: list[ToolCall] = []
        if self._block is None:
            content = self._content.push(self._opening.finish().before)
        else:
            self._block.append(self._closing.finish().before)
            is_cut = bool(self._close)
            content = self._ended("", calls) if not is_cut else self._content.push(self._open + "".join(self._block))
        return Parsed(content + self._content.finish(), tuple(calls))

    def _ended(self, close: str, calls: list[ToolCall]) -> str:
        """The block is over: its calls, or the text that is content."""
        text, self._block = "".join(self._block or ()), None
        if (found := self._read(text)) is None:
            return self._content.push(self._open + text + close)
        calls += found
        self._content.note_call()
        return ""


def _names(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The properties of each tool's arguments."""
    return {
        tool["function"]["name"]: _object((_object(tool["function"].get("parameters"))).get("properties"))
        for tool in tools
    }


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _typed(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON of an argument that is written without quotes: a string unless its schema allows something else."""
    if schema.get("type") == "string":
        return json.dumps(text, ensure_ascii=False)
    python = {"True": "true", "False": "false", "None": "null"}
    spelled = python.get(text, text)
    try:
        value = members(f'{{"a": {spelled}}}')["a"]
    except (ValueError, RecursionError):
        value = ("", "")
    is_one = not isinstance(value[0], str) and value[1] == spelled
    return spelled if is_one else json.dumps(text, ensure_ascii=False)


def _by_arguments(
    name: str, pairs: Sequence[tuple[str, str]], tools: Mapping[str, Mapping[str, Any]]
) -> ToolCall | None:
    if name not in tools:
        return None
    spelled = [
        f"{json.dumps(key, ensure_ascii=False)}: {_typed(value, _object(tools[name].get(key)))}" for key, value in pairs
    ]
    return ToolCall(name, "{" + ", ".join(spelled) + "}")


_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>\n?(.*)</function>\s*", re.DOTALL)
_XML_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _arguments(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]] | None:
    """Every argument in `text`; None if there is anything else in it."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < len(text.rstrip()):
        if (found := pattern.match(text, at)) is None:
            return None
        pairs.append((found[1], found[2]))
        at = found.end()
    return pairs


def _glm(tools: Tools, tag: Tag) -> ToolCallParser:
    schemas = _schemas(tools)

    def read(text: str) -> list[ToolCall] | None:
        name, key, rest = text.partition("<arg_key>")
        pairs = _arguments(key + rest, _GLM_ARGUMENT)
        call = _by_arguments(name.strip(), pairs, schemas) if pairs is not None else None
        return [call] if call else None

    return BlockParser(tag(_OPEN), tag(_CLOSE), read)


def _xml(tools: Tools, tag: Tag) -> ToolCallParser:
    schemas = _schemas(tools)

    def read(text: str) -> list[ToolCall] | None:
        found = _XML_CALL.fullmatch(text)
        pairs = _arguments(found[2], _XML_ARGUMENT) if found else None
        call = _by_arguments(found[1], pairs, schemas) if found and pairs is not None else None
        return [call] if call else None

    return BlockParser(tag(_OPEN), tag(_CLOSE), read)


def _deepseek(tools: Tools, tag: Tag) -> ToolCallParser:
    names = _names(tools)
    tags = {name: re.escape(tag(text)) for name, text in _DEEPSEEK.items()}
    called = (
        rf"function{tags['sep']}(?P<old_name>[^\n]+)\n```json\n(?P<old>.*?)\n```|(?P<name>.*?){tags['sep']}(?P<new>.*?)"
    )
    pattern = re.compile(rf"\s*{tags['call begin']}(?:{called}){tags['call end']}\s*", re.DOTALL)

    def read(text: str) -> list[ToolCall] | None:
        calls, at = [], 0
        while at < len(text):
            if (found := pattern.match(text, at)) is None:
                return None
            name, arguments = found["old_name"] or found["name"], (found["old"] or found["new"] or "").strip()
            if name not in names or not is_object(arguments):
                return None
            calls.append(ToolCall(name, arguments))
            at = found.end()
        return calls or None

    return BlockParser(tag(_DEEPSEEK["calls begin"]), tag(_DEEPSEEK["calls end"]), read)


def _mistral(tools: Tools, tag: Tag) -> ToolCallParser:
    names = _names(tools)

    def read(text: str) -> list[ToolCall] | None:
        """A JSON list of calls."""
        try:
            spelled = members(f'{{"calls": {text}}}')["calls"]
            items = spelled[0] if isinstance(spelled[0], list) else []
            calls = [_listed(item, names) for item in _items(spelled[1])] if items else []
        except (ValueError, KeyError, RecursionError):
            return None
        return [call for call in calls if call] if calls and all(calls) else None

    return BlockParser(tag(_MISTRAL), "", read)


def _items(text: str) -> list[str]:
    """The items of a JSON list, as they are spelled."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    items: list[str] = []
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
        if text[at] == "]":
            return items
        _, end = decoder.raw_decode(text, at)
        items.append(text[at:end])
        at = end


def _listed(text: str, names: Sequence[str]) -> ToolCall | None:
    call = read_call(text, names, ["arguments"])
    call_id = members(text).get("id", ("", ""))[0] if call else ""
    if call and isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return ToolCall(call.name, call.arguments, call_id)
    return call


FORMATS = (
    CallFormat(
        "hermes", (_OPEN, _CLOSE), lambda tools, tag: HermesParser(_names(tools), tag(_OPEN), tag(_CLOSE)), HERMES
    ),
    CallFormat("llama", (), lambda tools, _: LlamaParser(_names(tools))),
    CallFormat("xml", (_OPEN, _CLOSE), _xml),
    CallFormat("glm", (_OPEN, _CLOSE), _glm),
    CallFormat(
        "deepseek",
        tuple(_DEEPSEEK.values()),
        _deepseek,
        CallFrame(
            before_name=f"{_DEEPSEEK['call begin']}function{_DEEPSEEK['sep']}",
            after_name="\n```json\n",
            after=f"\n```{_DEEPSEEK['call end']}",
            begin=_DEEPSEEK["calls begin"],
            separator="\n",
            end=_DEEPSEEK["calls end"],
            quotes_name=False,
        ),
    ),
    CallFormat(
        "mistral",
        (_MISTRAL,),
        _mistral,
        CallFrame('{"name": ', ', "arguments": ', "}", begin=f"{_MISTRAL}[", separator=", ", end="]"),
    ),
)
