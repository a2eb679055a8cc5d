"""Replies in channels, as gpt-oss writes them: analysis is reasoning, a message to a function a call, the rest content.

A reply is a row of messages, each a header and a body: `<|channel|>analysis<|message|>...<|end|><|start|>assistant`,
then the next one. Pure text in, deltas out; knows nothing of tokens.
"""

import re
from collections.abc import Callable, Collection

from holdfast.chat.json_object import is_object
from holdfast.chat.stop_strings import StringSearch
from holdfast.chat.tool_calls import Delta, ToolCall

TAGS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
_ROLE, _TO = "assistant", "to="


class HarmonyReader:
    """Splits text in channels into content, reasoning and calls of `names`, as far as it is certain.

    Text that does not begin with a header is content. So is a call of another name, or one whose arguments are not
    a JSON object. Parts of content, and of reasoning, are separated by a line break.
    """

    def __init__(self, names: Collection[str], tag: Callable[[str], str] = str) -> None:
        """`tag` says how a tag is spelled in the text."""
        self._names = frozenset(names)
        tags = {tag(text): text for text in TAGS}
        self._tags = tags
        self._search = StringSearch(list(tags))
        self._header: list[str] | None = []  # of the message that begins; None inside a body
        self._is_certain = False  # that it is a header
        self._kind = "content"
        self._call: str | None = None  # the function that the body is for
        self._body: list[str] = []
        self._has = {"content": False, "reasoning": False}
        self._is_new = False  # a body begins: its text is separated from what came before

    def push(self, text: str) -> Delta:
        delta = Delta()
        while text:
            cut = self._search.push(text)
            delta += self._take(cut.before)
            if cut.found is not None:
                delta += self._take_tag(self._tags[cut.found])
            text = cut.after
        return delta

    def finish(self) -> Delta:
        delta = self._take(self._search.finish().before)
        if self._header is None:
            return delta + self._end()
        text, self._header = "".join(self._header), None
        return delta if self._is_certain else delta + self._shown(text)

    def _take(self, text: str) -> Delta:
        if self._header is not None:
            self._header.append(text)
            start = "".join(self._header)
            if self._is_certain or _begins_header(start.lstrip()):
                return Delta()
            self._header, self._kind, self._call, self._is_new = None, "content", None, True
            return self._shown(start)
        if self._call is not None:
            self._body.append(text)
            return Delta()
        return self._shown(text)

    def _take_tag(self, tag: str) -> Delta:
        if tag == "<|message|>" and self._header is not None:
            self._open("".join(self._header))
        elif tag in ("<|end|>", "<|return|>", "<|call|>"):
            return self._end()
        elif tag == "<|start|>" or (tag == "<|channel|>" and self._header is None):  # a start may be left out
            delta, self._header, self._is_certain = self._end(), [tag], True
            return delta
        elif self._header is not None:
            self._header.append(tag)
            self._is_certain = True
        return Delta()

    def _open(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        to = re.search(r"to=functions\.([^\s<]+)", header)
        self._header, self._is_new = None, True
        self._call = to[1] if to and to[1] in self._names else None
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"

    def _end(self) -> Delta:
        """The body is over: the call that it is, if it is one."""
        name, body = self._call, "".join(self._body)
        self._call, self._body = None, []
        if name is None:
            return Delta()
        arguments = body.strip() or "{}"
        if is_object(arguments):
            return Delta(calls=(ToolCall(name, arguments),))
        self._kind = "content"
        return self._shown(body)

    def _shown(self, text: str) -> Delta:
        if not text:
            return Delta()
        if self._is_new and self._has[self._kind]:
            text = f"\n{text}"
        self._is_new, self._has[self._kind] = False, True
        return Delta(content=text) if self._kind == "content" else Delta(reasoning=text)


def _begins_header(text: str) -> bool:
    """Whether text without tags may be, or become, the start of a header."""
    text = text[len(_ROLE) :].lstrip() if text.startswith(_ROLE) else text
    return text.startswith(_TO) or _TO.startswith(text) or _ROLE.startswith(text)
