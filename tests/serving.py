"""A server in the test's own process: real sockets, a real worker, any engine."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.chat.chat_model import load_chat
from holdfast.config import ChatConfig, ServeConfig
from holdfast.engine.interface import Engine, Row
from holdfast.engine.sampling import Pick
from holdfast.engine.slab import SlabShape
from holdfast.engine.worker import Worker
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Sampled
from holdfast.metrics import Metrics
from holdfast.models import open_model
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.lifecycle import Chat, running
from holdfast.sessions.ports import ModelInfo
from holdfast.testing.fake_engine import FakeEngine

SHAPE = SlabShape(recent=16, max_pin=4, prefill_chunk=8, rewind_tokens=8)
VOCABULARY = 64
HELD_S = 120  # the longest that anything is held: a test that fails still ends


class SlowEngine(FakeEngine):
    """A fake that takes a little while for each forward, as a device would, and counts them.

    While `may_run` is clear it stops in the middle of its next forward, which is counted already.
    """

    def __init__(
        self, *, num_slabs: int = 4, shape: SlabShape = SHAPE, forward_s: float = 0.002, vocab_size: int = VOCABULARY
    ) -> None:
        super().__init__(num_slabs=num_slabs, shape=shape, vocab_size=vocab_size)
        self.forward_s = forward_s
        self.num_forwards = 0
        self.may_run = threading.Event()
        self.may_run.set()

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.num_forwards += 1
        self.may_run.wait(HELD_S)
        time.sleep(self.forward_s)
        return super().forward(rows)


@contextlib.contextmanager
def held(engine: SlowEngine) -> Iterator[None]:
    """The engine gets no further than its next forward while the context lasts."""
    engine.may_run.clear()
    before = engine.num_forwards  # read after the event is clear: whatever is counted from here on is held
    try:
        yield
        assert engine.num_forwards <= before + 1  # the one in which it is held
    finally:
        engine.may_run.set()


class ScriptedEngine(SlowEngine):
    """A fake that says what it is told to: a request's seed names its script, at whose end it goes on by chance."""

    def __init__(self, scripts: dict[int, list[int]], **options: Any) -> None:
        super().__init__(**options)
        self.scripts = scripts

    def sample(self, logits: NDArray[np.float32], picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        outcomes = super().sample(logits, picks)
        for index, (pick, outcome) in enumerate(zip(picks, outcomes, strict=True)):
            script = self.scripts.get(pick.params.seed, [])
            if isinstance(outcome, Sampled) and len(pick.sampled) < len(script):
                outcomes[index] = dataclasses.replace(outcome, token=script[len(pick.sampled)])
        return outcomes


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


@cache
def _vocab_size() -> int:
    return open_model().architecture.vocab_size


@cache
def default_chat(**options: Any) -> Chat:
    """The default model's own way with text; options are those of ChatConfig."""
    config = ChatConfig(**options)
    source = open_model()
    return Chat(load_chat(source, config, source.architecture.vocab_size), config)


def wordy_engine(**options: Any) -> SlowEngine:
    """A slow fake with the default model's vocabulary: it can chat, talks nonsense and never ends by itself."""
    shape = SlabShape(recent=256, max_pin=64, prefill_chunk=64, rewind_tokens=256)
    return SlowEngine(**{"shape": shape, "vocab_size": _vocab_size()} | options)


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, chat: Chat | None = None, *, max_recompute: int = 65536, **options: Any
) -> AsyncIterator[Server]:
    metrics = Metrics()
    worker = Worker(engine, on_step=metrics.observe_step, max_recompute_tokens=max_recompute)
    config = ServeConfig(**{"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "drain_s": 2.0, "max_parked": 0} | options)
    async with (
        running(EmbeddedBackend(worker, model_of(engine)), config, metrics, chat) as doors,
        grpc.aio.insecure_channel(doors.grpc) as channel,
    ):
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        yield Server(doors.grpc, doors.http or "", worker, stub, channel, metrics)


@contextlib.contextmanager
def serving_aside(engine: Engine, chat: Chat | None = None, **options: Any) -> Iterator[Server]:
    """The same on a thread and an event loop of its own, for clients that block."""
    ready: Future[tuple[Server, asyncio.Event]] = Future()

    async def serve() -> None:
        async with serving(engine, chat, **options) as server:
            stopping = asyncio.Event()
            ready.set_result((server, stopping))
            await stopping.wait()

    with asyncio.Runner() as runner:
        thread = threading.Thread(target=runner.run, args=(serve(),))
        thread.start()
        try:
            server, stopping = ready.result(60)
            yield server
        finally:
            runner.get_loop().call_soon_threadsafe(stopping.set)
            thread.join()
