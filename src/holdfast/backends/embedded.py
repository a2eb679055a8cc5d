"""Sessions on our own engine. The only place above the engine that imports it."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.engine import snapshot as snapshots
from holdfast.engine.stream import Stream
from holdfast.engine.update import checked, open_weights_at
from holdfast.engine.worker import Worker
from holdfast.errors import Draining, SessionNotFound
from holdfast.generation import Done, SamplingParams
from holdfast.models import ModelSource
from holdfast.sessions.ports import BackendView, ModelInfo, WeightsLoaded
from holdfast.sessions.record import View


class EmbeddedBackend:
    """The engine's worker as the backend that sessions call. `start` it before use and `stop` it at the end."""

    def __init__(self, worker: Worker, model: ModelInfo) -> None:
        self._worker = worker
        self._model = model

    async def prepare(self) -> None:
        """Nothing to do: the model is known."""

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Blocks for at most one step."""
        self._worker.stop()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, if it was not stopped."""
        return self._worker.failure

    @property
    def not_ready(self) -> str | None:
        return None

    @property
    def num_busy_cores(self) -> int:
        return self._worker.num_busy_cores

    @property
    def model(self) -> ModelInfo:
        """Its fingerprint changes with the weights."""
        fingerprint = self._worker.engine.info.fingerprint
        if self._model.fingerprint != fingerprint:
            self._model = replace(self._model, fingerprint=fingerprint)
        return self._model

    @property
    def capacity(self) -> int:
        return self._worker.engine.num_slabs

    async def open(self, *, sink: int) -> int:
        return await self._worker.open(sink=sink)

    async def pin(self, handle: int, sink: int) -> None:
        await self._worker.pin(handle, sink)

    async def append(self, handle: int, tokens: Sequence[int]) -> Done:
        return await self._worker.append(handle, tokens)

    def generate(
        self, handle: int, params: SamplingParams, tokens: Sequence[int] = (), *, view: View | None = None
    ) -> Stream:
        assert view is None  # the window is the engine's own
        return self._worker.generate(handle, params, tokens)

    async def fork(self, handle: int) -> int:
        return await self._worker.fork(handle)

    async def snapshot(self, handle: int) -> bytes | None:
        taken = await self._worker.snapshot(handle)
        return await asyncio.to_thread(snapshots.encode, taken)

    async def restore(self, content: bytes, tokens: Sequence[int]) -> int:
        return await self._worker.restore(await asyncio.to_thread(snapshots.decode, content), tokens)

    async def rewind(self, handle: int, length: int, *, is_limited: bool = True) -> int:
        return (await self._worker.rewind(handle, length, is_limited=is_limited)).recomputed_tokens

    async def close(self, handle: int) -> int:
        return await self._worker.close(handle)

    def view(self, handle: int) -> BackendView:
        try:
            info = self._worker.info(handle)
        except SessionNotFound as exc:  # an open session keeps its handle until the engine stops
            raise Draining("the engine has stopped") from exc
        return BackendView(
            history_length=info.history_length,
            num_dropped=info.num_dropped,
            num_uncomputed=max(0, info.history_length - info.computed_length - 1),
            kv_live_bytes=info.kv_live_bytes,
            kv_reserved_bytes=info.kv_reserved_bytes,
            inv1_violations=info.inv1_violations,
            inv2_violations=info.inv2_violations,
            failure=info.failure,
        )

    async def label_weights(self, version: str) -> None:
        await self._worker.label_weights(version)

    @property
    def max_weight_bytes(self) -> int:
        return 4 * sum(map(math.prod, self._worker.engine.weight_shapes().values()))

    async def load_weights(self, path: Path, *, version: str, keeps_caches: bool) -> WeightsLoaded:
        """The tensors are read and checked in a thread, while generations go on; only writing them stops the engine."""
        started, engine = time.perf_counter(), self._worker.engine
        update = await asyncio.to_thread(lambda: checked(open_weights_at(path, engine), engine))
        await self._worker.load_weights(update, version=version, keeps_caches=keeps_caches)
        return WeightsLoaded(num_tensors=len(update.sums), duration_s=time.perf_counter() - started)


def describe(source: ModelSource, config: EngineConfig, worker: Worker) -> ModelInfo:
    """What clients are told about the model."""
    info = worker.engine.info
    return ModelInfo(
        name=source.name,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        eos_token_ids=source.eos_token_ids,
        tokenizer_hash=source.tokenizer_hash,
        chat_template_hash=source.chat_template_hash,
        sink=config.sink,
        recent=config.recent,
        max_pin=config.max_pin,
        context=info.context,
    )
