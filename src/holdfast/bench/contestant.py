"""Our engine as a contestant: decodes and prefills what it is told to, one step after the other. A process."""

import asyncio
import functools
import itertools
import sys
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.bench.processes import obey
from holdfast.config import DEFAULT_MODEL, EngineConfig
from holdfast.engine.embedded import build_engine
from holdfast.engine.run import Run
from holdfast.engine.sequences import Sequences
from holdfast.generation import SamplingParams
from holdfast.models import open_model


@dataclass(frozen=True, slots=True)
class EngineSetup:
    dtype: str
    deterministic: bool = False
    model: str = DEFAULT_MODEL
    recent: int = 4096
    sessions: int = 8


@dataclass(frozen=True, slots=True)
class EngineTask:
    """`decode`: `tokens` more for each of `batch` sequences of `history` tokens. `prefill`: `tokens` from nothing."""

    what: str
    tokens: int
    history: int = 0
    batch: int = 1


class Contestant:
    def __init__(self, setup: EngineSetup) -> None:
        config = EngineConfig(
            device="cpu",
            dtype=setup.dtype,
            deterministic=setup.deterministic,
            recent=setup.recent,
            sessions=setup.sessions,
        )
        self._engine = build_engine(open_model(setup.model), config)
        self._sequences = Sequences(self._engine, max_batch=64, max_recompute_tokens=0)
        self._ids = itertools.count(1)
        self._standing: tuple[int, list[int]] = (0, [])  # history, and the sequences that have it

    def obey(self, order: EngineTask) -> float:
        """How many seconds it took."""
        if order.what == "prefill":
            self._stand(0, 0)
            (sequence_id,) = self._opened(1, order.tokens)
            started = time.perf_counter()
            self._compute([sequence_id], max_tokens=1)
            took = time.perf_counter() - started
            self._sequences.close(sequence_id)
            return took
        self._stand(order.history, order.batch)
        ids = self._standing[1][: order.batch]
        started = time.perf_counter()
        self._compute(ids, max_tokens=order.tokens)
        took = time.perf_counter() - started
        for sequence_id in ids:
            self._sequences.rewind(sequence_id, order.history)
        return took

    def _stand(self, history: int, batch: int) -> None:
        """`batch` sequences of `history` tokens, all but the last computed; those that stand already may stay."""
        if self._standing[0] == history and len(self._standing[1]) >= batch:
            return
        for sequence_id in self._standing[1]:
            self._sequences.close(sequence_id)
        self._standing = history, self._opened(batch, history)
        for sequence_id in self._standing[1]:
            self._run([Run(self._sequences.get(sequence_id), lambda event: None)])

    def _opened(self, num: int, length: int) -> list[int]:
        ids = list(itertools.islice(self._ids, num))
        for sequence_id in ids:
            self._sequences.open(sequence_id, 4)
            self._sequences.get(sequence_id).append(_tokens(length, self._engine.info.vocab_size))
        return ids

    def _compute(self, ids: list[int], *, max_tokens: int) -> None:
        params = SamplingParams(seed=1, temperature=0, max_tokens=max_tokens, speculation=False)
        self._run([Run(self._sequences.get(sequence_id), lambda event: None, params) for sequence_id in ids])

    def _run(self, runs: list[Run]) -> None:
        for run in runs:
            self._sequences.start(run)
        while len(self._sequences.scheduler):
            self._sequences.end_finished()
            self._sequences.step()


@functools.cache
def _tokens(num: int, vocab_size: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, vocab_size, num).tolist()
    return tokens


def main() -> None:
    contestant = Contestant(msgspec.json.decode(sys.argv[1], type=EngineSetup))

    async def handle(line: bytes) -> float:
        return contestant.obey(msgspec.json.decode(line, type=EngineTask))

    asyncio.run(obey("ready", handle))


if __name__ == "__main__":
    main()
