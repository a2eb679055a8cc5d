"""Search in the history of a session: in the messages of a chat, or in what the tokens of another session spell."""

import asyncio
import itertools
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from holdfast.chat.passages import Passage, PassageIndex, WordIndex, split_text
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.recall import token_pieces
from holdfast.chats.service import Trajectories
from holdfast.chats.turn import run_off_loop
from holdfast.errors import InvalidArgument
from holdfast.sessions.history import History, SpanKind
from holdfast.sessions.record import View
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.view import FoundPassage

MAX_RESULTS = 64
_MAX_QUERY = 1 << 14  # characters
_BLOCK = 2048  # tokens of a span that are cut into passages together
_NOT_TEXT = re.compile("[\ud800-\udfff]")  # bytes that are no character


class Block(NamedTuple):
    """Tokens of one span, at most `_BLOCK` of them: which ones follows from where the span begins."""

    turn: int
    role: str
    start: int
    end: int


class Growth(NamedTuple):
    """What an index lacks: the first `num_blocks` blocks stay, then come these spans (kind, start, end), whose tokens
    begin at position `start` and in that turn."""

    num_blocks: int
    turn: int
    start: int
    tokens: "array[int]"
    spans: list[tuple[SpanKind, int, int]]

    def blocks(self) -> Iterator[Block]:
        turn, was_sampled = self.turn, False
        for kind, first, end in self.spans:
            turn += was_sampled and kind is not SpanKind.SAMPLED
            was_sampled = kind is SpanKind.SAMPLED
            if kind is not SpanKind.RECALLED:
                for start in range(first, end, _BLOCK):
                    if start >= self.start:
                        yield Block(turn, kind, start, min(start + _BLOCK, end))


class TokenPassages:
    """The passages of one history of tokens, which grows and may be rewound. A turn is what was given, then what was
    sampled. Quotes are not searched."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lock = asyncio.Lock()
        self.clear()

    def clear(self) -> None:
        self._index: PassageIndex = WordIndex()
        self._passages: list[Passage] = []
        self._starts, self._ends = array("q"), array("q")  # of the passages
        self._blocks: list[Block] = []
        self._length = 0

    def growth(self, history: History) -> Growth:
        """To be taken in by `update` before this is asked again. The last block is made again: it may have grown."""
        num_kept = min(self._length, history.num_kept())
        num_blocks = len(self._blocks)
        if num_kept == len(history) == self._length:
            return Growth(num_blocks, 0, num_kept, array("i"), [])
        while num_blocks and self._blocks[num_blocks - 1].end > num_kept:
            num_blocks -= 1
        num_blocks = max(0, num_blocks - 1)
        turn, _, start, _ = self._blocks[num_blocks] if num_blocks else (1, "", 0, 0)
        spans = itertools.takewhile(lambda span: span.end > start, reversed(history.spans))
        parts = [(span.kind, span.start, span.end) for span in spans]
        return Growth(num_blocks, turn, start, history.slice(start, len(history)), parts[::-1])

    def update(self, growth: Growth) -> None:
        end = self._blocks[growth.num_blocks - 1].end if growth.num_blocks else 0
        while self._ends and self._ends[-1] > end:
            self._index.pop(self._passages.pop().text)
            del self._starts[-1], self._ends[-1]
        del self._blocks[growth.num_blocks :]
        for block in growth.blocks():
            tokens = growth.tokens[block.start - growth.start : block.end - growth.start]
            for passage in _passages_of(block, tokens, self._tokenizer):
                self._index.add(passage.text)
                self._passages.append(passage)
                self._starts.append(passage.start)
                self._ends.append(passage.end)
            self._blocks.append(block)
        self._length = growth.start + len(growth.tokens)

    def search(self, view: View, query: str, limit: int) -> list[tuple[Passage, float]]:
        """The passages that are out of view and that the query is most about."""
        starts, ends = np.frombuffer(self._starts, np.int64), np.frombuffer(self._ends, np.int64)
        found = self._index.search(query, (ends <= view.start) & (starts >= view.pinned), limit)
        return [(self._passages[number], score) for number, score in found]


def _passages_of(block: Block, block_tokens: "array[int]", tokenizer: Tokenizer) -> Iterator[Passage]:
    """Control tokens are no part of a passage."""
    start, place = block.start, 0
    for is_control, tokens in itertools.groupby(block_tokens, tokenizer.is_control):
        part = array("i", tokens)
        if not is_control:
            pieces = [*token_pieces(part, tokenizer)]
            ends = np.cumsum([len(piece) for piece in pieces])
            text = b"".join(pieces).decode(errors="surrogateescape")
            done = num_bytes = 0
            for begin, end in split_text(text):
                first = num_bytes + len(text[done:begin].encode(errors="surrogateescape"))
                num_bytes = first + len(text[begin:end].encode(errors="surrogateescape"))
                among = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, num_bytes) + 1
                shown = _NOT_TEXT.sub("\ufffd", text[begin:end])
                yield Passage(block.turn, 0, place, block.role, shown, *(start + int(at) for at in among))
                done, place = end, place + 1
        start += len(part)


class HistorySearch:
    """Searches the sessions of a runtime. What it knows of a session is gone with it."""

    def __init__(self, runtime: Runtime, trajectories: Trajectories, tokenizer: Tokenizer) -> None:
        self._runtime = runtime
        self._trajectories = trajectories
        self._tokenizer = tokenizer
        self._known: WeakKeyDictionary[History, TokenPassages] = WeakKeyDictionary()

    async def __call__(
        self, session_id: str, owner: str, query: str | Sequence[int], *, limit: int, in_view: bool
    ) -> list[FoundPassage]:
        """As `Search`. Of a chat session, the conversation that was continued last."""
        session = self._runtime.find(session_id, owner)
        text = self._text_of(query)
        if not 1 <= limit <= MAX_RESULTS:
            raise InvalidArgument(f"limit must be 1 to {MAX_RESULTS}, got {limit}", param="limit")
        length, trajectory = len(session.history), self._trajectories.get(session_id)
        view = View(0, length) if in_view else View(session.sink, max(0, length - self._runtime.model.recent))
        if trajectory is not None:
            tree, tip, passages = trajectory.tree, trajectory.tree.tip, trajectory.passages
            if not in_view and tip.turn.facts.view is not None:  # an upstream got less than the window
                view = tip.turn.facts.view

            def search() -> list[tuple[Passage, float]]:
                passages.update(tree, self._tokenizer)
                return passages.search(tip, view, text, limit)

            found = await run_off_loop(search, 4 * length)
        else:  # the index is brought to the end of its work though the caller may leave
            work = self._search_tokens(session.history, view, text, limit)
            found = await asyncio.shield(asyncio.ensure_future(work))
        return [FoundPassage(one.turn, one.role, one.text, one.start, one.end, score) for one, score in found]

    async def _search_tokens(self, history: History, view: View, query: str, limit: int) -> list[tuple[Passage, float]]:
        passages = self._known.setdefault(history, TokenPassages(self._tokenizer))
        async with passages.lock:
            growth = passages.growth(history)

            def search() -> list[tuple[Passage, float]]:
                passages.update(growth)
                return passages.search(view, query, limit)

            try:
                return await run_off_loop(search, 4 * len(history))
            except BaseException:
                passages.clear()  # they may be incomplete
                raise

    def _text_of(self, query: str | Sequence[int]) -> str:
        """Raises InvalidArgument where the query is none."""
        if len(query) > _MAX_QUERY:
            limit = f"at most {_MAX_QUERY} characters or tokens"
            raise InvalidArgument(f"query must have {limit}, got {len(query)}", param="query")
        if not isinstance(query, str):
            vocab_size = self._runtime.model.vocab_size
            if (wrong := next((token for token in query if not 0 <= token < vocab_size), None)) is not None:
                raise InvalidArgument(f"the query has token {wrong}, outside the vocabulary of {vocab_size}")
            query = self._tokenizer.decode(query, skip_special=True)
        if not query:
            raise InvalidArgument("query must not be empty", param="query")
        return query
