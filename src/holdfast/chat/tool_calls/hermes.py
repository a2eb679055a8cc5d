"""Hermes' and Qwen's tool calls: JSON between `<tool_call>` tags, anywhere in the reply."""

from collections.abc import Collection

from holdfast.chat.stop_strings import StringSearch
from holdfast.chat.tool_calls.base import Parsed, ToolCall
from holdfast.chat.tool_calls.json_text import ObjectScan, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Takes calls of `names` out of the text; tags in which no such call stands are content, verbatim.

    A call is an opening tag, one JSON object and a closing tag, white space in between. Where that breaks off, the
    text up to there is content and the search goes on. White space next to calls is content only where text stands
    before and after them. Held back are a possible tag, what follows an opening one, and white space.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._opening = StringSearch([OPEN])
        self._block: _Block | None = None
        self._content = _Content()

    def push(self, text: str) -> Parsed:
        content: list[str] = []
        calls: list[ToolCall] = []
        while text:
            if self._block is None:
                cut = self._opening.push(text)
                content.append(self._content.push(cut.before))
                self._block, text = (_Block() if cut.found else None), cut.after
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


class _Block:
    """An opening tag and what follows it, up to the closing tag or to where it can be no call any more."""

    def __init__(self) -> None:
        self.is_over = False
        self.tag = ""  # what has been seen of the closing tag
        self._object = ObjectScan()
        self._space: list[str] = []

    @property
    def text(self) -> str:
        return OPEN + self._object.text + "".join(self._space) + (CLOSE if self.tag == CLOSE else "")

    def call(self, names: Collection[str]) -> ToolCall | None:
        return read_call(self._object.text, names, ["arguments"]) if self.tag == CLOSE else None

    def push(self, text: str) -> str:
        """What is left of `text`, which is something only when the block is over."""
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
        if CLOSE.startswith(seen) and seen != CLOSE:
            self.tag = seen
            return ""
        self.is_over = True
        self.tag = CLOSE if seen.startswith(CLOSE) else ""
        return seen.removeprefix(CLOSE)


class _Content:
    """The text outside calls, less the white space that only sets calls apart."""

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
