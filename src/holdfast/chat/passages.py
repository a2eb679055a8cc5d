"""Passages of a conversation, and which of them a text is about: an index of words, ranked by BM25.

Pure: nothing but the texts that were added decides what is found, so the same search always gives the same passages.
"""

import json
import re
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
    _Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
    _Bits = np.ndarray[tuple[int], np.dtype[np.uint64]]
else:
    Mask = _Ints = _Bits = np.ndarray

MAX_BYTES = 480  # of a passage: about 128 tokens of English
_MAX_QUERY = 64  # words, one bit each; of a longer text the rarest count
_K1, _B = 1.2, 0.75  # BM25's usual constants: how soon a repeated word counts no more, how much long passages lose
_QUESTION = 0.3  # what a question's score is multiplied with: it resembles a new one more than its answer does
_CUTS = (r"\n\s*\n\s*", r"\n", r"(?<=[.!?\u3002\uff01\uff1f])\s*", r"\s+")  # where a text may be cut, the best first
_WORD = re.compile(r"\w+")
_ENDING = re.compile(r"(?<=\w{3})(?<![^aeiouy]{3})(?:ing|ed)$")  # not of "string"
_DENSE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]")  # scripts without spaces between words
_BREAK = re.compile("[\x85\u2028\u2029]")  # which end a line, and need not be escaped in JSON
_NOWHERE = (array("i"), array("i"))
_COMMON = frozenset(
    _WORD.findall(
        "a about again all also an and any are as ask asked at be been before but by came can come could d did do"
        " does earlier ever for forget forgot from get give got had has have he her his how i if in into is it its"
        " just know let like ll look m me mean mention mentioned more my need no not now of on or our out please re"
        " recall remember s said say see she so some still t tell than that the their them then there these they think"
        " this to told too up us ve want was we were what when where which who why will with would you your"
    )
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a message: `turn` counts the turns of its conversation from 1, `message` those of the turn, of which
    the reply is the last, `place` the parts of the message. It is among the tokens from `start` to `end`."""

    turn: int
    message: int
    place: int
    role: str
    text: str
    start: int
    end: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.turn, self.message, self.place


class Found(NamedTuple):
    number: int  # of the passage, in the order in which passages were added
    score: float


class Demand(NamedTuple):
    """What a text must have in common with a query."""

    share: float = 0.0  # of the query's words, weighted by how rare they are
    alike: int | None = None  # how many different texts may have as much of a query as a text that lacks a part of it


ANY = Demand()


class PassageIndex(Protocol):
    """Texts, numbered from 0 on, that can be searched."""

    def __len__(self) -> int: ...

    def add(self, text: str) -> None: ...

    def pop(self, text: str) -> None:
        """Take the last text, which must be this one, out again."""

    def search(self, query: str, allowed: Mask, limit: int, demand: Demand = ANY) -> list[Found]:
        """The texts among those allowed that the query is most about, the best first, of which those that do not meet
        the demand are left out. Others have no influence."""


def split_text(text: str, max_bytes: int = MAX_BYTES) -> Iterator[tuple[int, int]]:
    """Where parts of the text begin and end: paragraphs, as many as fit into one part; a longer one is cut at a line,
    a sentence, a word, or where it must."""
    start = 0
    for begin, end in _pieces(text, 0, len(text), max_bytes, 0):
        if end > start and _size(text, start, end) > max_bytes and begin > start:
            yield from _stripped(text, start, begin)
            start = begin
    yield from _stripped(text, start, len(text))


def _pieces(text: str, start: int, end: int, max_bytes: int, level: int) -> Iterator[tuple[int, int]]:
    if _size(text, start, end) <= max_bytes:
        yield start, end
    elif level == len(_CUTS):
        step = max(1, max_bytes // 4)  # a character has at most four bytes
        for begin in range(start, end, step):
            yield begin, min(begin + step, end)
    else:
        begin = start
        for cut in re.compile(_CUTS[level]).finditer(text, start, end):
            if begin < cut.end() < end:
                yield from _pieces(text, begin, cut.end(), max_bytes, level + 1)
                begin = cut.end()
        yield from _pieces(text, begin, end, max_bytes, level + 1)


def _size(text: str, start: int, end: int) -> int:
    return len(text[start:end].strip().encode(errors="surrogatepass"))


def _stripped(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    part = text[start:end]
    if words := part.strip():
        begin = start + part.index(words[0])
        yield begin, begin + len(words)


def words_of(text: str) -> list[str]:
    """The words by which a text is found: in one case, without accents and common endings. Not those that any text
    has."""
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(char for char in text if not unicodedata.combining(char)) if not text.isascii() else text
    found: list[str] = []
    for word in _WORD.findall(text):
        if not word.isascii() and _DENSE.search(word):
            found += [word[index : index + 2] for index in range(max(1, len(word) - 1))]
        else:
            found += (_stem(part) for part in word.split("_") if part and part not in _COMMON)
    return found


@lru_cache(1 << 16)
def _stem(word: str) -> str:
    if len(word) < 4 or not word.isascii():
        return word
    if word.endswith("ies"):
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    word = _ENDING.sub("", word)
    word = word.removesuffix("e") if len(word) > 3 else word
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] > "9" else word  # as in "stopped", not in "2011"


def is_question(text: str) -> bool:
    return text.rstrip(" \t\r\n\"')*_").endswith(("?", "\uff1f"))


class WordIndex:
    """For each word, in which texts it is and how often. Texts that are not allowed do not even count as such: how rare
    a word is, is counted among those allowed."""

    def __init__(self) -> None:
        self._postings: dict[str, tuple[array[int], array[int]]] = {}
        self._lengths = array("i")
        self._weights = array("d")
        self._sums = array("I")  # of the words in their order: what says the same is not different

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: str) -> None:
        counts: dict[str, int] = {}
        words = words_of(text)
        for word in words:
            counts[word] = counts.get(word, 0) + 1
        for word, count in counts.items():
            numbers, times = self._postings.setdefault(word, (array("i"), array("i")))
            numbers.append(len(self._lengths))
            times.append(count)
        self._lengths.append(len(words))
        self._weights.append(_QUESTION if is_question(text) else 1.0)
        self._sums.append(crc32(" ".join(words).encode(errors="surrogatepass")))

    def pop(self, text: str) -> None:
        for word in set(words_of(text)):
            numbers, times = self._postings[word]
            numbers.pop()
            times.pop()
            if not numbers:
                del self._postings[word]
        self._lengths.pop()
        self._weights.pop()
        self._sums.pop()

    def search(self, query: str, allowed: Mask, limit: int, demand: Demand = ANY) -> list[Found]:
        num = int(np.count_nonzero(allowed))
        if not num:
            return []
        lengths = np.frombuffer(self._lengths, np.int32)
        usual = max(1.0, float(lengths[allowed].mean()))
        scores, shares, whole = np.zeros(len(lengths)), np.zeros(len(lengths)), 0.0
        common = np.zeros(len(lengths), np.uint64)  # which words of the query a text has, one bit each
        words = self._rarest(query, allowed, num)
        for bit, (rarity, numbers, times) in enumerate(words):
            damping = _K1 * (1 - _B + _B * lengths[numbers] / usual)
            scores[numbers] += rarity * times * (_K1 + 1) / (times + damping)
            shares[numbers] += rarity
            common[numbers] |= np.uint64(1 << bit)
            whole += rarity
        scores *= np.frombuffer(self._weights, np.float64)
        scores[shares < demand.share * whole] = 0.0
        least = np.partition(scores, -limit)[-limit] if len(scores) > limit else 0.0
        best = np.flatnonzero(scores >= max(least, np.nextafter(0, 1)))
        best = best[np.lexsort((-best, -scores[best]))][:limit]
        if demand.alike is not None:
            num_alike = {
                own: self._num_alike(common, own) for own in {*common[best]} if int(own).bit_count() < len(words)
            }
            best = best[[num_alike.get(own, 0) <= demand.alike for own in common[best]]]
        return [Found(int(number), float(scores[number])) for number in best]

    def _num_alike(self, common: _Bits, own: np.uint64) -> int:
        """How many different texts have these words of a query."""
        return len(np.unique(np.frombuffer(self._sums, np.uint32)[common & own == own]))

    def _rarest(self, query: str, allowed: Mask, num: int) -> list[tuple[float, _Ints, _Ints]]:
        """For each word of the query how rare it is, where it is and how often; the rarest first."""
        found = []
        for word in dict.fromkeys(words_of(query)):
            numbers, times = (np.frombuffer(part, np.int32) for part in self._postings.get(word, _NOWHERE))
            here = allowed[numbers]
            count = int(np.count_nonzero(here))
            rarity = float(np.log1p((num - count + 0.5) / (count + 0.5)))
            found.append((rarity, numbers[here], times[here]))
        found.sort(key=lambda one: -one[0])
        return found[:_MAX_QUERY]


def quoted(passages: Sequence[Passage]) -> str:
    """The passages as a text that a model reads as quotes, in their order. Each is one JSON string on a line of its
    own, which nothing in it can end; those of others than the user begin with the role."""
    lines = ["Earlier in this conversation:"]
    for passage in sorted(passages, key=lambda one: one.key):
        text = _BREAK.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(passage.text, ensure_ascii=False))
        lines.append(text if passage.role == "user" else f"{passage.role}: {text}")
    return "\n".join(lines)
