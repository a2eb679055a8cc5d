"""Which tokens go into the next step. Pure Python: no tensors, no threads, no clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.run import Run


class Work(NamedTuple):
    """`num_tokens` of a run's uncomputed tokens for one forward, followed by a draft of the next ones."""

    run: Run
    num_tokens: int
    draft: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the decoding rows, then one prefill chunk with parts of one or more prompts."""

    decode: list[Work]
    prefill: list[Work]
    max_ahead: int | None = None  # tokens that may be decoded in one call; None: as many as the engine likes


class Scheduler:
    """Every decoding run gets one token per step. Prompts share one chunk per step and take turns to be first in it.

    A prompt that was begun and fits into the next chunk keeps its place, so that short ones end in the order in which
    they came. A run whose caller does not keep up with reading waits until it does."""

    def __init__(self, *, prefill_chunk: int, max_batch: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._runs: deque[Run] = deque()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> list[Run]:
        return list(self._runs)

    def add(self, run: Run) -> None:
        self._runs.append(run)

    def remove(self, run: Run) -> None:
        self._runs.remove(run)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute now."""
        return not any(run.has_room() for run in self._runs)

    def plan(self) -> Plan:
        decoding = [run for run in self._runs if run.is_decoding and run.has_room()][: self._max_batch]
        prefilling: list[Work] = []
        budget = self._prefill_chunk
        for run in [run for run in self._runs if not run.is_decoding]:
            num = min(budget, run.num_to_compute)
            if num > 0:
                prefilling.append(Work(run, num))
                budget -= num
        long = [run for run, num, _ in prefilling if not 0 < run.num_to_compute - num <= self._prefill_chunk]
        self._rotate(decoding + long)
        return Plan([Work(run, 1) for run in decoding], prefilling)

    def _rotate(self, served: list[Run]) -> None:
        """Move the runs that were served to the back, so that no run waits forever."""
        if len(served) == len(self._runs):
            return
        for run in served:
            self._runs.remove(run)
            self._runs.append(run)
