"""A server in the test's own process: real sockets, a real worker, any engine."""

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.config import ServeConfig
from holdfast.engine.interface import Engine, Row
from holdfast.engine.slab import SlabShape
from holdfast.engine.worker import Worker
from holdfast.observability.metrics import Metrics
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.run import running
from holdfast.sessions.ports import ModelInfo
from holdfast.testing.engine import FakeEngine

SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8, rewind_tokens=8)
VOCABULARY = 64


class SlowEngine(FakeEngine):
    """A fake that takes a little while for each forward, as a device would, and counts them."""

    def __init__(self, *, num_slabs: int = 4, shape: SlabShape = SHAPE, forward_s: float = 0.002) -> None:
        super().__init__(num_slabs=num_slabs, shape=shape, vocab_size=VOCABULARY)
        self.forward_s = forward_s
        self.num_forwards = 0

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.num_forwards += 1
        time.sleep(self.forward_s)
        return super().forward(rows)


@dataclasses.dataclass
class Server:
    address: str
    http: str
    worker: Worker
    stub: Any
    channel: Any
    metrics: Metrics


def model_of(engine: Engine) -> ModelInfo:
    return ModelInfo(
        name="test",
        fingerprint=engine.info.fingerprint,
        vocab_size=engine.info.vocab_size,
        eos_token_ids=frozenset(),
        tokenizer_hash="",
        chat_template_hash="",
        sink=min(4, engine.shape.max_pin),
        recent=engine.shape.recent,
        max_pin=engine.shape.max_pin,
        context=engine.info.context,
    )


@contextlib.asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[Server]:
    metrics = Metrics()
    worker = Worker(engine, on_step=metrics.observe_step)
    config = ServeConfig(**{"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "drain_s": 2.0} | options)
    async with (
        running(EmbeddedBackend(worker, model_of(engine)), config, metrics) as doors,
        grpc.aio.insecure_channel(doors.grpc) as channel,
    ):
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        yield Server(doors.grpc, doors.http or "", worker, stub, channel, metrics)
