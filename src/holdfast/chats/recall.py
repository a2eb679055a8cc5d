"""Passages of a conversation that are out of its model's view, and which of them a new turn gets as quotes.

The index of a session is made of its turns on record when it is first searched, and grows with them: it is never
written down, and knows no other session.
"""

import re
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.chat.messages import Message
from holdfast.chat.passages import (
    ANY,
    MAX_BYTES,
    Demand,
    Mask,
    Passage,
    PassageIndex,
    WordIndex,
    is_question,
    quoted,
    split_text,
)
from holdfast.chat.tokenizer import Detokenizer, Tokenizer
from holdfast.chats.tree import Node, Tree
from holdfast.errors import InvalidArgument
from holdfast.sessions.record import View

_KEY = "holdfast-recall"  # of a session's metadata, under which its own limits are kept
_CANDIDATES = 64  # passages that are looked at for a turn
_LEAST_SCORE = 0.7  # of the best passage's that the others must have
# Where more passages have the same part of the new messages' words, the rest would say which of them is meant: none is.
_DEMAND = Demand(share=0.33, alike=2)
_MAX_QUERY = 1 << 14  # characters
_ASKED = re.compile(r"(?<![^.!?\n\u3002\uff01\uff1f])[^.!?\n\u3002\uff01\uff1f]++[?\uff1f]")


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
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
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
    _path: "array[int]" = field(default_factory=lambda: array("q"))  # to the turn that was searched for last
    _num_turns: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, tree: Tree, tokenizer: Tokenizer) -> None:
        """Take in the turns that are new in the tree."""
        with self._lock:
            for node in self.missing(tree):
                asked = ""
                for passage in passages_of(node, tokenizer):
                    self.index.add(f"{asked}\n{passage.text}")  # an answer is found by its question, too
                    asked = passage.text if is_question(passage.text) else ""
                    self._passages.append(passage)
                    self._numbers.append(node.number)
                    self._starts.append(passage.start)
                    self._ends.append(passage.end)
                self._num_turns += 1

    def missing(self, tree: Tree) -> list[Node]:
        return tree.nodes[self._num_turns :]

    def search(
        self, parent: Node, view: View, query: str, limit: int = _CANDIDATES, demand: Demand = ANY
    ) -> list[tuple[Passage, float]]:
        """The passages on the path to `parent` that are out of view and that the query is most about."""
        with self._lock:
            found = self.index.search(query, self._allowed(parent, view), limit, demand)
            return [(self._passages[number], score) for number, score in found]

    def choose(
        self, parent: Node, view: View, messages: Sequence[Message], limits: RecallLimits, tokenizer: Tokenizer
    ) -> list[Passage]:
        """What a turn below `parent` with these messages recalls: the best passages that fit into the limits, the best
        first. Together they may have a few tokens more than one by one."""
        found = self.search(parent, view, query_of(messages), _CANDIDATES, _DEMAND)
        chosen: list[Passage] = []
        frame = len(spelled([], tokenizer))
        room = limits.tokens - frame
        for passage, score in found:
            if len(chosen) == limits.passages or score < _LEAST_SCORE * found[0][1]:
                break
            if frame < (num_tokens := len(spelled([passage], tokenizer))) <= frame + room:
                chosen.append(passage)
                room -= num_tokens - frame
        return chosen

    def _allowed(self, parent: Node, view: View) -> Mask:
        self._follow(parent)
        path = np.frombuffer(self._path, np.int64)
        on_path = np.zeros(self._num_turns + 1, np.bool_)
        on_path[path] = True
        numbers, starts, ends = (np.frombuffer(part, np.int64) for part in (self._numbers, self._starts, self._ends))
        allowed: Mask = on_path[numbers] & (ends <= view.start) & (starts >= view.pinned)
        again = set(_recalled_in_view(parent, view))
        for number in {int(path[turn - 1]) for turn, _, _ in again}:
            for at in range(*np.searchsorted(numbers, [number, number + 1])):
                allowed[at] &= self._passages[at].key not in again
        return allowed

    def _follow(self, parent: Node) -> None:
        """Make `_path` that to `parent`. Most turns continue the one before, so that only the end is new."""
        node, below = parent, array("q")
        while node.parent is not None and not (
            node.depth <= len(self._path) and self._path[node.depth - 1] == node.number
        ):
            below.append(node.number)
            node = node.parent
        self._path = self._path[: node.depth] + below[::-1]


def _recalled_in_view(parent: Node, view: View) -> Iterator[tuple[int, int, int]]:
    """The passages whose quotes are still in view."""
    node: Node | None = parent
    while node is not None and node.end > view.start:
        recalled = node.turn.facts.recalled
        if recalled is not None and node.start + recalled.start >= view.start:
            yield from recalled.passages
        node = node.parent


def query_of(messages: Sequence[Message]) -> str:
    """What new messages are about: what people say, or else what tools answered. Of a long text, what it asks."""
    for role in ("user", "tool"):
        if texts := [message["content"] for message in messages if message["role"] == role and message["content"]]:
            text = "\n".join(texts)[-_MAX_QUERY:]
            return "\n".join(_ASKED.findall(text) if len(text) > MAX_BYTES else ()) or text
    return ""


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with another text in the last one that a person or a tool wrote, before which quotes stand."""
    places = {message["role"]: index for index, message in enumerate(messages)}
    at = places.get("user", places.get("tool", len(messages)))
    return [message | {"content": text} if index == at else message for index, message in enumerate(messages)]


def spelled(passages: Sequence[Passage], tokenizer: Tokenizer) -> list[int]:
    """The tokens of the quotes, none of which is a control token; [] where the vocabulary cannot spell them so."""
    try:
        ids = tokenizer.encode_plain(f"{quoted(passages)}\n\n")
    except InvalidArgument:
        return []
    return [] if any(map(tokenizer.is_control, ids)) else ids


def passages_of(node: Node, tokenizer: Tokenizer) -> list[Passage]:
    """Those of a turn's messages and of its reply."""
    turn, recalled = node.turn, node.turn.facts.recalled
    quotes = range(recalled.start, recalled.start + recalled.length) if recalled else range(0)
    positions = _Positions(turn.given, node.start, tokenizer, quotes)
    found: list[Passage] = []
    for index, message in reversed([*enumerate((*turn.messages, turn.reply))]):
        is_reply = index == len(turn.messages)
        among = _Positions(turn.sampled, node.start + len(turn.given), tokenizer) if is_reply else positions
        for place, text in reversed([*enumerate(_texts(message))]):
            found.append(Passage(node.depth, index, place, message["role"], text, *among.find(text)))
    return found[::-1]


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content: str = message.get("content") or ""
    for start, end in split_text(content):
        yield content[start:end]
    for call in message.get("tool_calls") or ():
        text = f"{call['function']['name']}({call['function']['arguments']})"
        for start, end in split_text(text):
            yield text[start:end]


class _Positions:
    """Finds texts, the last one first, among tokens that begin at position `start` of a history: before a message may
    stand what reads like it (tools, reasoning, quotes of it), after it only what opens the reply."""

    def __init__(self, tokens: "array[int]", start: int, tokenizer: Tokenizer, quotes: range = range(0)) -> None:
        self._whole = (start, start + len(tokens))
        pieces = [*token_pieces(tokens, tokenizer)][::-1]
        for index in quotes:
            pieces[len(tokens) - 1 - index] = b"\xff"  # a byte that no text has
        # The other way round, as searching from the end may take much longer.
        self._bytes = b"".join(piece[::-1] for piece in pieces)
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._at = 0

    def find(self, text: str) -> tuple[int, int]:
        """From which token to which; all of them where the text is not spelled there as it is."""
        data = text.encode(errors="surrogatepass")[::-1]
        begin = self._bytes.find(data, self._at)
        if begin < 0:
            return self._whole
        self._at = begin + len(data)
        last = int(np.searchsorted(self._ends, begin, side="right"))
        first = int(np.searchsorted(self._ends, self._at, side="left"))
        return self._whole[1] - first - 1, self._whole[1] - last


def token_pieces(tokens: "array[int]", tokenizer: Tokenizer) -> Iterator[bytes]:
    """What each token spells, or completes."""
    if tokenizer.is_byte_level:
        return map(tokenizer.token_bytes, tokens)
    detokenizer = Detokenizer(tokenizer)
    return (detokenizer.push(token).encode() for token in tokens)
