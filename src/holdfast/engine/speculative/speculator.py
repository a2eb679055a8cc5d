"""Decides who gets a draft, and how long: bookkeeping between the runs and a proposer."""

from collections.abc import Sequence as List

from holdfast.engine.run import Run
from holdfast.engine.speculative.pace import Pace
from holdfast.engine.speculative.proposer import DraftRequest, Proposer

MAX_ROWS = 8  # tokens of all sequences that one verifying forward takes at little more than the price of one


class Speculator:
    """Owned by the thread that steps the engine."""

    def __init__(self, proposer: Proposer, *, draft_length: int, row_cost: float) -> None:
        self._proposer = proposer
        self._draft_length = draft_length
        self._row_cost = row_cost
        self._paces: dict[int, list[Pace]] = {}

    def drafts(self, runs: List[Run]) -> list[list[int]]:
        """One draft for each of `runs`, which are about to compute their last token; empty for those who get none."""
        room = MAX_ROWS // max(1, len(runs)) - 1
        limits = [self._limit(run, room) for run in runs]
        requests = [
            DraftRequest(run.sequence, run.params, limit)
            for run, limit in zip(runs, limits, strict=True)
            if limit and run.params
        ]
        proposed = iter(self._proposer.propose(requests) if requests else ())
        return [self._paced(run, next(proposed)) if limit else [] for run, limit in zip(runs, limits, strict=True)]

    def learn(self, run: Run, num_proposed: int, num_accepted: int) -> None:
        self._pace(run).learn(num_proposed, num_accepted)

    def forget(self, sequence_id: int) -> None:
        self._proposer.forget(sequence_id)
        self._paces.pop(sequence_id, None)

    def _limit(self, run: Run, room: int) -> int:
        """The longest draft that could be of use to this run."""
        if run.params is None or not run.params.speculation or run.num_to_compute != 1:
            return 0
        left = run.params.max_tokens - len(run.sampled) - 1
        return max(0, min(self._draft_length, room, left, run.sequence.slab.max_write - 1))

    def _paced(self, run: Run, draft: tuple[list[int], int]) -> list[int]:
        tokens, run.strength = draft
        return tokens[: self._pace(run).length(len(tokens))]

    def _pace(self, run: Run) -> Pace:
        paces = self._paces.setdefault(
            run.sequence.id, [Pace(self._row_cost) for _ in range(self._proposer.num_strengths)]
        )
        return paces[run.strength]
