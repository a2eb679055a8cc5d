"""Tool calls in the text of a reply, and tools as text in a prompt. Pure: no HTTP, no call ids, no templates."""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.chat.json_object import ObjectScan, is_object, members
from holdfast.chat.stop_strings import StringSearch

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_NONCE = secrets.token_hex(8)
_TAGS = re.compile(f"\u2e28{_NONCE}[^\u2e29]*\u2e29")

# What Llama 3's templates say about calls: the tag, or the key `"parameters":` in the JSON they ask for.
_LLAMA_STYLE = re.compile(r'python_tag|"parameters"\s*:')

# The words that Hermes and Qwen models are trained on.
_SYSTEM_BLOCK = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is the text of a JSON object. The caller assigns missing ids."""

    name: str
    arguments: str
    id: str = ""  # where the model wrote one


@dataclass(frozen=True, slots=True)
class Delta:
    """What has become certain. False when that is nothing."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: "Delta") -> "Delta":
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Text of one reply in pieces; content and complete calls out. Text that turns out not to be a call is content."""

    def push(self, text: str) -> Parsed:
        """What is certain by now."""

    def finish(self) -> Parsed:
        """What was held back, as no more text will come."""


def control_tag(text: str) -> str:
    """How a control token is spelled in the text of a reply that a parser reads: as no reply can spell it."""
    return f"\u2e28{_NONCE}{text}\u2e29"


def without_tags(text: str) -> str:
    """Text for a client: control tokens that no parser used are left out."""
    return _TAGS.sub("", text) if _NONCE in text else text


def parser_for(template_source: str, names: Collection[str]) -> ToolCallParser:
    """The parser for the format that a chat template asks models to write: Llama's if it says so, else Hermes'.

    A template that contains `<tool_call>` is Hermes' whatever else it says. So is one without any tool support,
    because our own system block (`hermes_system_block`) then offers the tools.
    """
    is_llama = _OPEN not in template_source and _LLAMA_STYLE.search(template_source)
    return LlamaParser(names) if is_llama else HermesParser(names)


def hermes_system_block(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that offers `tools` (in OpenAI's form) and says how to call them; "" for no tools.

    For models whose chat template does not support tools; `HermesParser` reads the calls that it asks for.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _SYSTEM_BLOCK.format(tools=lines, open=_OPEN, close=_CLOSE) if tools else ""


def render_call(name: str, arguments: str) -> str:
    """An assistant's call as text. Arguments that are not a JSON object become a JSON string; blank ones `{}`."""
    spelled = arguments.strip() or "{}"
    if not is_object(spelled):
        spelled = json.dumps(arguments, ensure_ascii=False)
    return f'{_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {spelled}}}\n{_CLOSE}'


def render_result(content: str) -> str:
    """A tool's result as a user says it. No tags: a model whose template has no tools was not trained on them, and a
    small one repeats them in its reply."""
    return f"The result of the call is: {content}\n\nAnswer my question in one sentence."


class HermesParser:
    """Hermes' and Qwen's format: JSON between `<tool_call>` tags, anywhere in the reply.

    A call is an opening tag, one JSON object that calls one of `names`, and a closing tag, with white space in
    between. Where that breaks off, the text up to there is content, unchanged, and the search goes on. White space
    next to calls is content only if there is text before and after them. Held back are a possible tag, what follows
    an opening tag, and white space.
    """

    def __init__(self, names: Collection[str], open: str = _OPEN, close: str = _CLOSE) -> None:
        self._names = frozenset(names)
        self._tags = open, close
        self._opening = StringSearch([open])
        self._block: _HermesBlock | None = None
        self._content = ContentAroundCalls()

    def push(self, text: str) -> Parsed:
        content: list[str] = []
        calls: list[ToolCall] = []
        while text:
            if self._block is None:
                cut = self._opening.push(text)
                content.append(self._content.push(cut.before))
                self._block, text = (_HermesBlock(*self._tags) if cut.found else None), cut.after
                continue
            text = self._block.push(text)
            if self._block.is_over:
                if call := self._block.call(self._names):
                    calls.append(call)
                    self._content.note_call()
                else:
                    content.append(self._content.push(self._block.text))
                self._block = None
        return Parsed("".join(content), tuple(calls))

    def finish(self) -> Parsed:
        unclosed = self._block.text + self._block.tag if self._block else self._opening.finish().before
        self._block = None
        return Parsed(self._content.push(unclosed) + self._content.finish())


class _HermesBlock:
    """An opening tag and what follows it, up to the closing tag or to where it can no longer be a call."""

    def __init__(self, open: str, close: str) -> None:
        self._open, self._close = open, close
        self.is_over = False
        self.tag = ""  # what has been seen of the closing tag
        self._object = ObjectScan()
        self._space: list[str] = []

    @property
    def text(self) -> str:
        return self._open + self._object.text + "".join(self._space) + (self._close if self.tag == self._close else "")

    def call(self, names: Collection[str]) -> ToolCall | None:
        return read_call(self._object.text, names, ["arguments"]) if self.tag == self._close else None

    def push(self, text: str) -> str:
        """What is left of `text`; not empty only when the block is over."""
        if not self._object.is_done:
            text = self._object.push(text)
            self.is_over = self._object.is_broken
            if not self._object.is_done:
                return text
        if not self.tag:
            tag = text.lstrip()
            self._space.append(text[: len(text) - len(tag)])
            text = tag
        seen = self.tag + text
        if self._close.startswith(seen) and seen != self._close:
            self.tag = seen
            return ""
        self.is_over = True
        self.tag = self._close if seen.startswith(self._close) else ""
        return seen.removeprefix(self._close)


class ContentAroundCalls:
    """The text outside calls, without the white space that only separates calls."""

    def __init__(self) -> None:
        self._has_text = False
        self._after_call = False
        self._before_call = ""  # the white space between the last text and the calls after it
        self._space: list[str] = []  # the white space that came last

    def push(self, text: str) -> str:
        body = text.strip()
        if not body:
            self._space.append(text)
            return ""
        start = text.index(body)
        space = self._before_call + "".join(self._space) + text[:start]
        drops_space = self._after_call and not self._has_text
        self._space, self._before_call = [text[start + len(body) :]], ""
        self._has_text, self._after_call = True, False
        return body if drops_space else space + body

    def note_call(self) -> None:
        if not self._after_call:
            self._before_call = "".join(self._space)
        self._after_call, self._space = True, []

    def finish(self) -> str:
        space, self._space = "".join(self._space), []
        return "" if self._after_call else space


class LlamaParser:
    """Llama 3's format: the whole reply is JSON, `{"name": ..., "parameters": {...}}`, several separated by `;`.

    A reply that starts with `{` or `<|python_tag|>` is read as calls of `names`; any other is content, as it comes.
    From the first thing that is not a call, everything is content, unchanged. A call is certain when `;` or the end
    of the reply follows; white space and `;` next to calls are dropped.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._take = self._take_start  # takes the next part from a text and returns what is left of it
        self._taken: list[str] = []  # content, if it does not become a call
        self._tag = ""  # what has been seen of the python tag
        self._object = ObjectScan()
        self._call: ToolCall | None = None  # complete, but what follows is not known yet
        self._calls: list[ToolCall] = []  # certain, and not returned yet
        self._has_calls = False

    def push(self, text: str) -> Parsed:
        while text and self._take != self._take_content:
            text = self._take(text)
        calls, self._calls = tuple(self._calls), []
        return Parsed(text, calls)

    def finish(self) -> Parsed:
        if self._call:
            self._accept(self._call)
        return self.push(self._as_content(self._tag))

    def _take_start(self, text: str) -> str:
        if not self._tag:
            text = self._take_space(text)
        seen = self._tag + text
        if _PYTHON_TAG.startswith(seen) and seen != _PYTHON_TAG:
            self._tag = seen
            return ""
        if seen.startswith(_PYTHON_TAG):
            self._taken.append(_PYTHON_TAG)
        self._tag, self._take = "", self._take_object
        return seen.removeprefix(_PYTHON_TAG)

    def _take_object(self, text: str) -> str:
        rest = self._object.push(text)
        self._taken.append(text[: len(text) - len(rest)])
        if self._object.is_done:
            self._call = read_call(self._object.text, self._names, ["parameters", "arguments"])
            self._take = self._take_separator
        is_no_call = self._object.is_broken or (self._object.is_done and not self._call)
        return self._as_content(rest) if is_no_call else rest

    def _take_separator(self, text: str) -> str:
        text = self._take_space(text)
        if self._call and text.startswith(";"):
            self._accept(self._call)
            self._take = self._take_object
            return text[1:]
        return self._as_content(text) if text else ""

    def _take_content(self, text: str) -> str:
        return text

    def _take_space(self, text: str) -> str:
        rest = text.lstrip()
        self._taken.append(text[: len(text) - len(rest)])
        return rest

    def _accept(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._has_calls = True
        self._call, self._taken, self._object = None, [], ObjectScan()

    def _as_content(self, rest: str) -> str:
        """What was taken since the last call, and `rest`; all that follows is content too."""
        content = "".join(self._taken) + rest
        self._taken, self._tag, self._call, self._take = [], "", None, self._take_content
        return content.lstrip() if self._has_calls else content


def read_call(text: str, names: Collection[str], keys: Sequence[str]) -> ToolCall | None:
    """The call of one of `names` that `text` spells, its arguments under the first of `keys` that is there."""
    try:
        found = members(text)
        name, _ = found["name"]
        value, spelled = next(found[key] for key in keys if key in found)
        if isinstance(value, str):  # an object inside a string
            value.encode()
            spelled = value.strip()
        if not isinstance(name, str) or name not in names or not is_object(spelled):
            return None
    except (ValueError, KeyError, StopIteration, RecursionError):
        return None
    return ToolCall(name, spelled)
