"""The first of several strings in text that arrives in pieces. Knows nothing of what the strings mean."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import InvalidArgument


class Cut(NamedTuple):
    """Text around the string that was found. If none was found, `before` is what can no longer be part of one."""

    before: str
    found: str | None = None
    after: str = ""


class StringSearch:
    """Finds the string that starts first, and of several that start there the shortest. Then it starts afresh.

    Held back is exactly the longest end of the text that may still become one of the strings, so the work for a
    piece depends on the length of the piece and of the strings, not on the text before it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InvalidArgument("stop strings must not be empty")
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self._first_char = re.compile("|".join({re.escape(string[0]) for string in strings}) or "(?!)")
        self._held = ""

    def push(self, text: str) -> Cut:
        """What is certain once `text` has arrived."""
        text = self._held + text
        end, self._held = self._unfinished(text), ""
        cut = self._cut(text)
        if cut.found is not None and len(cut.before) <= end:  # no other string can start earlier any more
            return cut
        self._held = text[end:]
        return Cut(text[:end])

    def finish(self) -> Cut:
        """What is held back, as no more text will come."""
        text, self._held = self._held, ""
        return self._cut(text)

    def _cut(self, text: str) -> Cut:
        matches = [(start, len(string)) for string in self._strings if (start := text.find(string)) >= 0]
        if not matches:
            return Cut(text)
        start, length = min(matches)
        return Cut(text[:start], text[start : start + length], text[start + length :])

    def _unfinished(self, text: str) -> int:
        """Where the longest end of `text` starts that one of the strings starts with."""
        for match in self._first_char.finditer(text, max(0, len(text) - self._longest + 1)):
            end = text[match.start() :]
            if any(string.startswith(end) for string in self._strings):
                return match.start()
        return len(text)


class StopStrings:
    """Passes text on up to the first stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._search = StringSearch(strings)
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that certainly comes before any stop string; nothing after a match."""
        return self._until_match(self._search.push(text)) if self.matched is None else ""

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        return self._until_match(self._search.finish()) if self.matched is None else ""

    def _until_match(self, cut: Cut) -> str:
        self.matched = cut.found
        return cut.before
