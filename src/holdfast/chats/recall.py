"""Passages of a conversation that are out of its model's view, and which of them a new turn gets as quotes.

The index of a session is made of its turns on record when it is first searched, and grows with them: it is never
written down, and knows no other session.
"""

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.chat.messages import Message
from holdfast.chat.passages import Mask, Passage, PassageIndex, WordIndex, quoted, split_text
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.tree import Node, Tree
from holdfast.errors import InvalidArgument
from holdfast.sessions.record import View

_KEY = "holdfast-recall"  # of a session's metadata, under which its own limits are kept
_CANDIDATES = 64  # passages that are looked at for a turn
_LEAST_SHARE = 0.25  # of the best passage's score that the others must have
_MAX_QUERY = 1 << 14  # characters


@dataclass(frozen=True, slots=True)
class RecallLimits:
    """How many tokens and passages one turn may recall; 0 tokens: none."""

    tokens: int = 0
    passages: int = 8

    def as_metadata(self) -> dict[str, str]:
        return {_KEY: f"{self.tokens}/{self.passages}"}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> "RecallLimits | None":
        """What a session was opened with; None: as the server's settings say."""
        if (text := metadata.get(_KEY)) is None:
            return None
        parts = text.split("/")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            raise InvalidArgument(f"metadata.{_KEY} must be TOKENS/PASSAGES, got {text!r}", param=f"metadata.{_KEY}")
        return cls(*map(int, parts))


NO_RECALL = RecallLimits()


@dataclass(slots=True)
class Recall:
    """The passages of all turns of one tree. Turns of a forest may search it at once, in several threads."""

    index: PassageIndex = field(default_factory=WordIndex)
    _passages: list[Passage] = field(default_factory=list)
    _numbers: "array[int]" = field(default_factory=lambda: array("q"))  # the turn's, for each passage
    _starts: "array[int]" = field(default_factory=lambda: array("q"))
    _ends: "array[int]" = field(default_factory=lambda: array("q"))
    _num_turns: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, tree: Tree, tokenizer: Tokenizer) -> None:
        """Take in the turns that are new in the tree."""
        with self._lock:
            for node in self.missing(tree):
                for passage in passages_of(node, tokenizer):
                    self.index.add(passage.text)
                    self._passages.append(passage)
                    self._numbers.append(node.number)
                    self._starts.append(passage.start)
                    self._ends.append(passage.end)
                self._num_turns += 1

    def missing(self, tree: Tree) -> list[Node]:
        return tree.nodes[self._num_turns :]

    def search(self, parent: Node, view: View, query: str, limit: int = _CANDIDATES) -> list[tuple[Passage, float]]:
        """The passages on the path to `parent` that are out of view and that the query is most about."""
        with self._lock:
            allowed = self._allowed(parent, view)
            return [(self._passages[found.number], found.score) for found in self.index.search(query, allowed, limit)]

    def choose(
        self, parent: Node, view: View, messages: Sequence[Message], limits: RecallLimits, tokenizer: Tokenizer
    ) -> list[Passage]:
        """What a turn below `parent` with these messages recalls: the best passages that fit into the limits."""
        found = self.search(parent, view, query_of(messages))
        chosen: list[Passage] = []
        for passage, score in found:
            if len(chosen) == limits.passages or score < _LEAST_SHARE * found[0][1]:
                break
            if len(tokenizer.encode_plain(f"{quoted([*chosen, passage])}\n\n")) <= limits.tokens:
                chosen.append(passage)
        return sorted(chosen, key=lambda passage: passage.key)

    def _allowed(self, parent: Node, view: View) -> Mask:
        path = parent.path()
        on_path = np.zeros(self._num_turns + 1, np.bool_)
        on_path[[node.number for node in path]] = True
        starts, ends = np.frombuffer(self._starts, np.int64), np.frombuffer(self._ends, np.int64)
        allowed: Mask = on_path[np.frombuffer(self._numbers, np.int64)] & (ends <= view.start) & (starts >= view.pinned)
        again = set(_recalled_in_view(path, view))
        if again:
            for number in np.flatnonzero(allowed):
                allowed[number] = self._passages[number].key not in again
        return allowed


def _recalled_in_view(path: Sequence[Node], view: View) -> Iterator[tuple[int, int, int]]:
    """The passages whose quotes are still in view."""
    for node in reversed(path):
        if node.end <= view.start:
            return
        recalled = node.turn.facts.recalled
        if recalled is not None and node.start + recalled.start >= view.start:
            yield from recalled.passages


def query_of(messages: Sequence[Message]) -> str:
    """What new messages are about: what people say, or else what tools answered."""
    for role in ("user", "tool"):
        if texts := [message["content"] for message in messages if message["role"] == role and message["content"]]:
            return "\n".join(texts)[-_MAX_QUERY:]
    return ""


def with_quotes(messages: Sequence[Message], passages: Sequence[Passage]) -> list[Message]:
    """The messages with the quotes before the text of the last one that a person or a tool wrote."""
    places = {message["role"]: index for index, message in enumerate(messages)}
    at = places.get("user", places.get("tool"))
    if at is None or not passages:
        return list(messages)
    text = f"{quoted(passages)}\n\n{messages[at]['content']}"
    return [*messages[:at], messages[at] | {"content": text}, *messages[at + 1 :]]


def passages_of(node: Node, tokenizer: Tokenizer) -> Iterator[Passage]:
    """Those of a turn's messages and of its reply."""
    turn = node.turn
    given = _Positions(turn.given, node.start, tokenizer)
    sampled = _Positions(turn.sampled, node.start + len(turn.given), tokenizer)
    for index, message in enumerate((*turn.messages, turn.reply)):
        positions = sampled if index == len(turn.messages) else given
        for place, text in enumerate(_texts(message)):
            start, end = positions.find(text)
            yield Passage(node.depth, index, place, message["role"], text, start, end)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content: str = message.get("content") or ""
    for start, end in split_text(content):
        yield content[start:end]
    for call in message.get("tool_calls") or ():
        text = f"{call['function']['name']}({call['function']['arguments']})"
        for start, end in split_text(text):
            yield text[start:end]


class _Positions:
    """Finds texts, one after the other, among tokens that begin at position `start` of a history."""

    def __init__(self, tokens: "array[int]", start: int, tokenizer: Tokenizer) -> None:
        self._start = start
        pieces = [tokenizer.token_bytes(token) for token in tokens] if tokenizer.is_byte_level else []
        self._bytes = b"".join(pieces)
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._whole = (start, start + len(tokens))
        self._at = 0

    def find(self, text: str) -> tuple[int, int]:
        """From which token to which; all of them where the text is not spelled there as it is."""
        data = text.encode(errors="surrogatepass")
        begin = self._bytes.find(data, self._at)
        if begin < 0:
            return self._whole
        self._at = begin + len(data)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, self._at, side="left"))
        return self._start + first, self._start + last + 1
