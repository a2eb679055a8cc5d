"""Llama 3's tool calls: the whole reply is JSON, `{"name": ..., "parameters": {...}}`, several set apart by `;`."""

from collections.abc import Collection

from holdfast.chat.tool_calls.base import Parsed, ToolCall
from holdfast.chat.tool_calls.json_text import ObjectScan, read_call

PYTHON_TAG = "<|python_tag|>"


class LlamaParser:
    """Reads a reply that starts with `{` or `<|python_tag|>` as calls of `names`; any other is content, as it comes.

    From the first thing on that is no call, all is content, verbatim. A call is certain when `;` or the end of the
    reply follows; white space and `;` next to calls are dropped.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._take = self._take_start  # takes the next thing from a text and gives back what is left of it
        self._taken: list[str] = []  # what is content if no call comes of it
        self._tag = ""  # what has been seen of the python tag
        self._object = ObjectScan()
        self._call: ToolCall | None = None  # complete, but what follows is not known yet
        self._calls: list[ToolCall] = []  # certain, and not given back yet
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
        if PYTHON_TAG.startswith(seen) and seen != PYTHON_TAG:
            self._tag = seen
            return ""
        if seen.startswith(PYTHON_TAG):
            self._taken.append(PYTHON_TAG)
        self._tag, self._take = "", self._take_object
        return seen.removeprefix(PYTHON_TAG)

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
        """What was taken since the last call, and `rest`; so is all that follows."""
        content = "".join(self._taken) + rest
        self._taken, self._tag, self._call, self._take = [], "", None, self._take_content
        return content.lstrip() if self._has_calls else content
