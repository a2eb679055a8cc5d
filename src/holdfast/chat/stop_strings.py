"""Where strings first stand in text that comes in pieces. Knows nothing of what the strings mean.

One pass with an Aho-Corasick automaton: its state is the longest end of the text that may still become one of
the strings, and exactly that end is held back. Work is linear in the text, however many strings there are.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import InvalidArgument


class StopStrings:
    """Passes text on up to the first stop string. Of several the one that starts first wins, then the shortest."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._search = StringSearch(strings)
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to stand before any stop string; after a match: nothing."""
        return self._until_match(self._search.push(text)) if self.matched is None else ""

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        return self._until_match(self._search.finish()) if self.matched is None else ""

    def _until_match(self, cut: "Cut") -> str:
        self.matched = cut.found
        return cut.before


class Cut(NamedTuple):
    """Text around the string that was found. Where none was: `before` is what can no longer be part of one."""

    before: str
    found: str | None = None
    after: str = ""


class StringSearch:
    """The first of several strings in text that comes in pieces; after each one found it starts afresh."""

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InvalidArgument("an empty string cannot be searched for")
        self._root = _automaton(strings)
        self._first = re.compile("|".join(map(re.escape, self._root.children)) or "(?!)")
        self._node = self._root
        self._held = ""
        # Where in the held text a string is complete, while one that starts before it may still become so.
        self._candidate: tuple[int, str] | None = None

    def push(self, text: str) -> Cut:
        text, index = self._held + text, len(self._held)
        node, root = self._node, self._root
        while index < len(text):
            if node is root:
                first = self._first.search(text, index)
                if first is None:
                    index = len(text)
                    break
                index = first.start()
            char = text[index]
            index += 1
            while char not in node.children and node is not root:
                node = node.fallback
            node = node.children.get(char, root)
            if node.ends is not None:
                self._candidate = min(self._candidate or (index, ""), (index - len(node.ends), node.ends))
            if self._candidate and self._candidate[0] <= index - node.depth:  # nothing can start earlier any more
                return self._cut(text)
        start = index - node.depth
        if self._candidate:
            self._candidate = (self._candidate[0] - start, self._candidate[1])
        self._node, self._held = node, text[start:]
        return Cut(text[:start])

    def finish(self) -> Cut:
        """What is held back, as no more text will come."""
        return self._cut(self._held)

    def _cut(self, text: str) -> Cut:
        start, found = self._candidate or (len(text), None)
        self._node, self._held, self._candidate = self._root, "", None
        return Cut(text[:start], found, text[start + len(found or "") :])


class _Node:
    """A beginning of some of the strings. `ends` is the longest of the strings that it ends with."""

    __slots__ = ("children", "depth", "ends", "fallback")

    def __init__(self, depth: int, fallback: "_Node | None" = None) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.ends: str | None = None
        self.fallback = fallback or self  # the node of the longest proper end of this beginning


def _automaton(strings: Sequence[str]) -> _Node:
    """The root of all beginnings of `strings`."""
    root = _Node(0)
    for string in strings:
        node = root
        for char in string:
            node = node.children.setdefault(char, _Node(node.depth + 1, root))
        node.ends = string
    level = list(root.children.values())
    while level:
        for node in level:
            for char, child in node.children.items():
                fallback = node.fallback
                while char not in fallback.children and fallback is not root:
                    fallback = fallback.fallback
                child.fallback = fallback.children.get(char, root)
                child.ends = child.ends or child.fallback.ends
        level = [child for node in level for child in node.children.values()]
    return root
