"""Drafts by a smaller model with the same vocabulary, on slabs of its own.

What it holds is never kept or copied: where a sequence has gone back, or was woken, the small model reads the visible
part of the history again, a chunk at a time, and drafts nothing until it has caught up.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

from holdfast.engine.interface import Engine, Row
from holdfast.engine.sampling import Pick
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import Slab, SlabPool
from holdfast.engine.speculative.proposer import EMPTY_DRAFT, Draft, DraftRequest
from holdfast.errors import ConfigError, NonFiniteLogits


@dataclass(slots=True)
class _DraftReader:
    """How far the small model has read one sequence: the tokens `skipped` were never shown to it."""

    slab: Slab
    num_rewinds: int
    skipped: range

    def position(self, index: int) -> int:
        """Which token of the history the small model reads at `index`."""
        return index if index < self.skipped.start else index + len(self.skipped)


class DraftModel:
    def __init__(self, engine: Engine, *, vocab_size: int) -> None:
        if engine.info.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model has a vocabulary of {engine.info.vocab_size}, the model one of {vocab_size}; "
                "choose a draft model of the same family"
            )
        self._engine = engine
        self._pool = SlabPool(engine.num_slabs, engine.shape)
        self._readers: dict[int, _DraftReader] = {}

    @property
    def num_strengths(self) -> int:
        return 1

    def propose(self, requests: List[DraftRequest]) -> list[Draft]:
        readers = [self._caught_up(request.sequence) for request in requests]
        ready = [(request, reader) for request, reader in zip(requests, readers, strict=True) if reader]
        drafts = iter(self._draft(ready))
        return [Draft(next(drafts)) if reader else EMPTY_DRAFT for reader in readers]

    def forget(self, sequence_id: int) -> None:
        if reader := self._readers.pop(sequence_id, None):
            self._pool.release(reader.slab)

    def _caught_up(self, sequence: Sequence) -> _DraftReader | None:
        """Its reader, once all but the last token is read; reads one more chunk where it is not."""
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

    def _opened(self, sequence: Sequence) -> _DraftReader:
        """From the sinks on to what is recent; what the model itself no longer sees is left out."""
        window = self._engine.shape.recent
        sink = min(sequence.slab.window.sink, self._engine.shape.max_pin)
        first_recent = max(sink, len(sequence.tokens) - window)
        return _DraftReader(self._pool.acquire(sink), sequence.num_rewinds, range(sink, first_recent))

    def _draft(self, ready: list[tuple[DraftRequest, _DraftReader]]) -> list[list[int]]:
        """One token for all at a time, each drawn with the noise of its own place."""
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

    def _read(self, rows: list[tuple[_DraftReader, list[int]]], *, num_logits: int) -> object:
        for reader, tokens in rows:
            reader.slab.begin_write(len(tokens))
        logits = self._engine.forward([Row(reader.slab, tokens, num_logits) for reader, tokens in rows])
        for reader, tokens in rows:
            reader.slab.end_write(len(tokens))
        return logits
