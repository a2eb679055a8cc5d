"""A reply's reasoning apart from its answer, as the text comes. Knows tags, not models."""

from typing import NamedTuple

from holdfast.chat.stop_strings import StringSearch

_NEWLINES = "\r\n"


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningSplit:
    """Splits `<think>reasoning</think>content`; only a tag at the very start of the reply opens reasoning.

    White space before the opening tag and newlines directly inside and after the tags belong to the tags and are
    dropped. A reply without an opening tag is content, untouched. Without a closing tag all is reasoning.
    `starts_open` is for prompts that already end in the opening tag.
    """

    def __init__(self, open: str = "<think>", close: str = "</think>", starts_open: bool = False) -> None:
        self._open = open
        self._closing = StringSearch([close])
        self._take = self._take_newlines_after_open if starts_open else self._take_start
        self._space: list[str] = []  # white space that is dropped if a tag follows, else given back
        self._tag = ""  # what has been seen of the opening tag

    def push(self, text: str) -> Split:
        return self._take(text)

    def finish(self) -> Split:
        """What was held back for a tag that did not come."""
        is_thinking = self._take == self._take_reasoning
        rest = "".join(self._space) + self._tag + self._closing.finish().before
        self._space, self._tag, self._take = [], "", self._take_content
        return Split(rest, "") if is_thinking else Split("", rest)

    def _take_start(self, text: str) -> Split:
        if not self._tag:
            body = text.lstrip()
            self._space.append(text[: len(text) - len(body)])
            text = body
        self._tag += text
        if self._tag.startswith(self._open):
            after = self._tag[len(self._open) :]
            self._space, self._tag, self._take = [], "", self._take_newlines_after_open
            return self._take(after)
        return Split("", "") if self._open.startswith(self._tag) else self.finish()

    def _take_newlines_after_open(self, text: str) -> Split:
        if body := text.lstrip(_NEWLINES):
            self._take = self._take_reasoning
            return self._take(body)
        return Split("", "")

    def _take_reasoning(self, text: str) -> Split:
        cut = self._closing.push(text)
        reasoning = self._without_last_newlines(cut.before)
        if cut.found is None:
            return Split(reasoning, "")
        self._space, self._take = [], self._take_newlines_after_close
        return Split(reasoning, self._take(cut.after).content)

    def _take_newlines_after_close(self, text: str) -> Split:
        if body := text.lstrip(_NEWLINES):
            self._take = self._take_content
        return Split("", body)

    def _take_content(self, text: str) -> Split:
        return Split("", text)

    def _without_last_newlines(self, text: str) -> str:
        """`text` after the newlines held so far, less those at its end, which are held now."""
        body = text.rstrip(_NEWLINES)
        if not body:
            self._space.append(text)
            return ""
        body, self._space = "".join(self._space) + body, [text[len(body) :]]
        return body
