"""Speculative decoding: drafts of the next tokens, which the engine verifies in one forward.

What the model samples always decides; a draft only saves time. `NGram` drafts from the history itself, `DraftModel`
with a smaller model, and `Speculator` decides which run gets a draft and how long it is. All of them are owned by the
thread that steps the engine.
"""

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.engine.interface import Engine, Row
from holdfast.engine.run import Run
from holdfast.engine.sampling import Pick
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import Slab, SlabPool
from holdfast.errors import ConfigError, NonFiniteLogits
from holdfast.generation import SamplingParams

MAX_ROWS = 8  # tokens of all sequences that one forward verifies at little more than the cost of one token

_START = 0.5  # the probability that a drafted token is right, before anything is known
_SPEED = 0.12  # how fast that estimate moves
_RETRY = 24  # a sequence that stopped drafting tries one token again after this many steps

SHORTEST = 3  # tokens that must match before a draft is made
_LONGEST = 16  # matching tokens that are counted
_STRONG = (5, 9)  # from this many matching tokens on, a draft has the next strength
_SLOTS = 1 << 15
_AT_ONCE = 4096  # runs that are indexed between two steps, which takes some milliseconds
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class DraftRequest(NamedTuple):
    """Asks for at most `limit` tokens that may follow the sequence's history, drawn as `params` would draw them."""

    sequence: Sequence
    params: SamplingParams
    limit: int


class Draft(NamedTuple):
    """`strength` says how much evidence there is for the draft; the acceptance rate is tracked for each strength."""

    tokens: list[int]
    strength: int = 0


EMPTY_DRAFT = Draft([])


class Proposer(Protocol):
    @property
    def num_strengths(self) -> int: ...

    @property
    def max_ahead(self) -> int:
        """How many tokens may be decoded before it is asked again, so that it misses little."""

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        """One draft per request, of at most `limit` tokens; empty where it has no proposal. Mutates itself."""

    def forget(self, sequence_id: int) -> None:
        """The sequence is closed."""


class Speculator:
    """Decides which runs get a draft, and how long it is."""

    def __init__(self, proposer: Proposer, *, draft_length: int, row_cost: float) -> None:
        self._proposer = proposer
        self._draft_length = draft_length
        self._row_cost = row_cost
        self._paces: dict[int, list[Pace]] = {}

    def drafts(self, runs: List[Run]) -> list[list[int]]:
        """One draft for each of `runs`, which are about to compute their last token; empty for runs without one."""
        room = MAX_ROWS // max(1, len(runs)) - 1
        limits = [self._limit(run, room) for run in runs]
        requests = [
            DraftRequest(run.sequence, run.params, limit)
            for run, limit in zip(runs, limits, strict=True)
            if limit and run.params
        ]
        proposed = iter(self._proposer.propose(requests) if requests else ())
        return [self._paced(run, next(proposed)) if limit else [] for run, limit in zip(runs, limits, strict=True)]

    def max_ahead(self, runs: List[Run]) -> int | None:
        """How many tokens may be decoded for all `runs` before drafts are looked for again; None: any number."""
        is_drafting = any(run.params is not None and run.params.speculation for run in runs)
        return self._proposer.max_ahead if is_drafting else None

    def learn(self, run: Run, num_proposed: int, num_accepted: int) -> None:
        self._pace(run).learn(num_proposed, num_accepted)

    def forget(self, sequence_id: int) -> None:
        self._proposer.forget(sequence_id)
        self._paces.pop(sequence_id, None)

    def _limit(self, run: Run, room: int) -> int:
        """The longest draft that can be of use to this run."""
        if run.params is None or not run.params.speculation or run.num_to_compute != 1:
            return 0
        left = run.params.max_tokens - len(run.sampled) - 1
        return max(0, min(self._draft_length, room, left, run.sequence.slab.max_write - 1))

    def _paced(self, run: Run, draft: Draft) -> list[int]:
        tokens, run.strength = draft
        return tokens[: self._pace(run).length(len(tokens))]

    def _pace(self, run: Run) -> "Pace":
        paces = self._paces.setdefault(
            run.sequence.id, [Pace(self._row_cost) for _ in range(self._proposer.num_strengths)]
        )
        return paces[run.strength]


class Pace:
    """How long the drafts of one sequence and strength should be, judged by how many tokens were accepted so far.

    `row_cost` is the time that one more row adds to a forward, relative to a forward of one row.
    """

    def __init__(self, row_cost: float) -> None:
        self._row_cost = row_cost
        self._chance = _START
        self._skipped = 0

    def length(self, limit: int) -> int:
        """How many tokens to draft now, at most `limit`. Mutates: counts the steps without a draft."""
        best = max(range(limit + 1), key=self._speed, default=0)
        if best or not limit:
            return best
        self._skipped += 1
        if self._skipped < _RETRY:
            return 0
        self._skipped = 0
        return 1

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Every accepted token raises the estimate, the first refused one lowers it."""
        for _ in range(num_accepted):
            self._chance += _SPEED * (1 - self._chance)
        if num_accepted < num_proposed:
            self._chance -= _SPEED * self._chance

    def _speed(self, length: int) -> float:
        """Expected tokens divided by the cost of the forward that verifies them."""
        tokens = sum(self._chance**i for i in range(length + 1))
        return tokens / (1 + self._row_cost * length)


class NGram:
    """Proposes what followed the last time that the history ended with the same tokens.

    Searches the whole history, also the part that has left the window. The index has a fixed size, so a session's
    memory stays flat: later positions overwrite earlier ones, and every find is checked against the history.
    """

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    @property
    def num_strengths(self) -> int:
        return len(_STRONG) + 1

    @property
    def max_ahead(self) -> int:
        return SHORTEST  # after a token that no draft had, so many must match again

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        return [self._of(request.sequence).draft(request.sequence.tokens, request.limit) for request in requests]

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _of(self, sequence: Sequence) -> "_Index":
        return self._indexes.setdefault(sequence.id, _Index())


class _Index:
    """Where each run of three tokens was last seen, by a hash that may collide."""

    def __init__(self) -> None:
        self._ends = array("q", [0]) * _SLOTS  # one past the run
        self._num_indexed = 0  # runs that end before this position are indexed

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
        """Index all runs but the last, which would only find itself.

        A long history is indexed in parts, because other streams wait meanwhile. After a rewind some runs are indexed
        twice.
        """
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
    """How many tokens before `end` are the same as those at the end of the history. None where a rewind has removed
    the position."""
    length = len(tokens)
    most = min(_LONGEST, end) if end <= length else 0
    return next((n for n in range(most) if tokens[end - 1 - n] != tokens[length - 1 - n]), most)


class DraftModel:
    """Drafts with a smaller model of the same vocabulary, on slabs of its own.

    Its slabs are never kept or copied: after a rewind or a restore, the small model reads the visible part of the
    history again, one chunk per step, and drafts nothing until it has caught up.
    """

    def __init__(self, engine: Engine, *, vocab_size: int) -> None:
        if engine.info.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model has a vocabulary of {engine.info.vocab_size} tokens, the model one of {vocab_size}; "
                "choose a draft model of the same family"
            )
        self._engine = engine
        self._pool = SlabPool(engine.num_slabs, engine.shape)
        self._readers: dict[int, _DraftReader] = {}

    @property
    def num_strengths(self) -> int:
        return 1

    @property
    def max_ahead(self) -> int:
        return 1

    @property
    def num_free_slabs(self) -> int:
        return self._pool.num_free

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        readers = [self._caught_up(request.sequence) for request in requests]
        ready = [(request, reader) for request, reader in zip(requests, readers, strict=True) if reader]
        drafts = iter(self._draft(ready))
        return [Draft(next(drafts)) if reader else EMPTY_DRAFT for reader in readers]

    def forget(self, sequence_id: int) -> None:
        if reader := self._readers.pop(sequence_id, None):
            self._pool.release(reader.slab)

    def _caught_up(self, sequence: Sequence) -> "_DraftReader | None":
        """The sequence's reader once it has read all but the last token; else reads one more chunk."""
        reader = self._readers.get(sequence.id)
        if reader is None or reader.num_rewinds != sequence.num_rewinds:
            self.forget(sequence.id)
            if not self._pool.num_free:
                return None
            reader = self._readers[sequence.id] = self._opened(sequence)
        slab, target = reader.slab, len(sequence.tokens) - 1 - len(reader.skipped)
        if slab.length > target:  # drafted tokens that were refused
            slab.rewind(target)
        if slab.length < target:
            chunk = range(slab.length, min(target, slab.length + self._engine.shape.prefill_chunk))
            self._read([(reader, [sequence.tokens[reader.position(index)] for index in chunk])], num_logits=0)
        return reader if slab.length == target else None

    def _opened(self, sequence: Sequence) -> "_DraftReader":
        """Reads the sinks and then the recent tokens, without those that have left the model's own window."""
        window = self._engine.shape.recent
        sink = min(sequence.slab.window.sink, self._engine.shape.max_pin)
        first_recent = max(sink, len(sequence.tokens) - window)
        return _DraftReader(self._pool.acquire(sink), sequence.num_rewinds, range(sink, first_recent))

    def _draft(self, ready: "list[tuple[DraftRequest, _DraftReader]]") -> list[list[int]]:
        """One token for all sequences at a time, each drawn with the noise of its own position."""
        drafts: list[list[int]] = [[] for _ in ready]
        active = list(range(len(ready)))
        while active:
            rows = [(ready[i][1], [drafts[i][-1] if drafts[i] else ready[i][0].sequence.tokens[-1]]) for i in active]
            logits = self._read(rows, num_logits=1)
            picks = [
                Pick(row=row, position=len(ready[i][0].sequence.tokens) + len(drafts[i]), params=ready[i][0].params)
                for row, i in enumerate(active)
            ]
            going = []
            for i, outcome in zip(active, self._engine.sample(logits, picks), strict=True):
                if not isinstance(outcome, NonFiniteLogits):
                    drafts[i].append(outcome.token)
                    if len(drafts[i]) < ready[i][0].limit:
                        going.append(i)
            active = going
        return drafts

    def _read(self, rows: "list[tuple[_DraftReader, list[int]]]", *, num_logits: int) -> object:
        for reader, tokens in rows:
            reader.slab.begin_write(len(tokens))
        logits = self._engine.forward([Row(reader.slab, tokens, num_logits) for reader, tokens in rows])
        for reader, tokens in rows:
            reader.slab.end_write(len(tokens))
        return logits


@dataclass(slots=True)
class _DraftReader:
    """How far the small model has read one sequence. It never reads the tokens in `skipped`."""

    slab: Slab
    num_rewinds: int
    skipped: range

    def position(self, index: int) -> int:
        """Which token of the history the small model reads at `index`."""
        return index if index < self.skipped.start else index + len(self.skipped)
