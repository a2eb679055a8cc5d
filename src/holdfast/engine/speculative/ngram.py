"""Drafts by looking up: what followed the last time that the history ended like this?

Looks through the whole history, also the part that has left the window. The index has a fixed size, so a session's
memory stays flat: later positions push earlier ones out, and every find is checked against the history itself.
"""

from array import array
from collections.abc import Sequence as List

from holdfast.engine.sequence import Sequence
from holdfast.engine.speculative.proposer import EMPTY_DRAFT, Draft, DraftRequest

SHORTEST = 3  # tokens that must agree
_LONGEST = 16  # how far back an agreement is followed
_STRONG = (5, 9)  # from so many agreeing tokens on, a draft is of the next strength
_SLOTS = 1 << 15
_AT_ONCE = 4096  # runs that are put in between two steps: some milliseconds
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class NGram:
    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    @property
    def num_strengths(self) -> int:
        return len(_STRONG) + 1

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        return [self._of(request.sequence).draft(request.sequence.tokens, request.limit) for request in requests]

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _of(self, sequence: Sequence) -> "_Index":
        return self._indexes.setdefault(sequence.id, _Index())


class _Index:
    """Where each run of three tokens was last seen, by a hash that may err."""

    def __init__(self) -> None:
        self._ends = array("q", [0]) * _SLOTS  # one past the run
        self._num_indexed = 0  # runs that end before this position are in

    def draft(self, tokens: "array[int]", limit: int) -> Draft:
        length = len(tokens)
        self._catch_up(tokens)
        if length < SHORTEST:
            return EMPTY_DRAFT
        end = self._ends[_slot(tokens, length)]
        agreeing = _num_agreeing(tokens, end)
        if agreeing < SHORTEST:
            return EMPTY_DRAFT
        strength = sum(agreeing >= bar for bar in _STRONG)
        return Draft(tokens[end : min(end + limit, length)].tolist(), strength)

    def _catch_up(self, tokens: "array[int]") -> None:
        """All runs but the last, which would only find itself; of a long history some at a time, for other streams
        wait meanwhile. After a rewind some are put in once more."""
        first = max(min(self._num_indexed, len(tokens)), SHORTEST)
        stop = max(first, min(len(tokens), first + _AT_ONCE))
        for end in range(first, stop):
            self._ends[_slot(tokens, end)] = end
        self._num_indexed = stop


def _slot(tokens: "array[int]", end: int) -> int:
    first, second, third = tokens[end - SHORTEST : end]
    mixed = first * _FACTORS[0] ^ second * _FACTORS[1] ^ third * _FACTORS[2]
    return (mixed ^ mixed >> 15) % _SLOTS


def _num_agreeing(tokens: "array[int]", end: int) -> int:
    """How many tokens before `end` are the same as those before the history's own end."""
    length = len(tokens)
    most = min(_LONGEST, end)
    return next((n for n in range(most) if tokens[end - 1 - n] != tokens[length - 1 - n]), most)
