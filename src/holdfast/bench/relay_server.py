"""Holdfast in front of a canned upstream, with replies decoded in one of the ways that are compared. A process."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import msgspec

from holdfast.backends.decode_queue import DecodeQueue
from holdfast.backends.passthrough import parse_routes
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import upstream_model_info
from holdfast.bench.processes import cpu_s, obey, resident_bytes
from holdfast.bench.stage_clock import StageClock
from holdfast.chat.chat_model import load_chat
from holdfast.config import DEFAULT_MODEL, ChatConfig, ServeConfig, UpstreamConfig
from holdfast.models import open_model
from holdfast.observability.metrics import Metrics
from holdfast.serving.http import Upstream
from holdfast.serving.lifecycle import Chat, running

T = TypeVar("T")

Mode = Literal["inline", "lane", "threads"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class RelaySetup:
    upstream: str
    mode: Mode = "lane"
    model: str = DEFAULT_MODEL
    cpu_workers: int = 0


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What the process has used so far. `looks` are samples of the main thread by stage."""

    cpu_s: float
    threads_cpu_s: float
    rss_bytes: int
    looks: dict[str, int]


class _Threads(DecodeQueue):
    """Every large reply is decoded in the pool of threads."""

    cpu_s = 0.0

    async def decode(self, work: Callable[[], T], num_bytes: int) -> T:
        return await self.offload(lambda: self._timed(work))

    def _timed(self, work: Callable[[], T]) -> T:
        started = time.thread_time()
        try:
            return work()
        finally:
            self.cpu_s += time.thread_time() - started  # a lost update would cost one reply's share


def _lane(setup: RelaySetup) -> DecodeQueue:
    if setup.mode == "inline":
        return DecodeQueue(setup.cpu_workers, inline_bytes=sys.maxsize)
    return _Threads(setup.cpu_workers) if setup.mode == "threads" else DecodeQueue(setup.cpu_workers)


async def _main(setup: RelaySetup) -> None:
    source = open_model(setup.model)
    chat = Chat(load_chat(source, ChatConfig(), source.architecture.vocab_size), ChatConfig())
    model = upstream_model_info(
        name=source.name, vocab_size=source.architecture.vocab_size, eos_token_ids=source.eos_token_ids
    )
    metrics = Metrics()
    config = UpstreamConfig(upstream=setup.upstream, routing_replay="full")
    backend = SGLangBackend(config, model, observe=metrics.observe_upstream)
    backend.lane = lane = _lane(setup)
    clock = StageClock()

    async def usage(line: bytes) -> ServerUsage:
        threads_cpu_s = lane.cpu_s if isinstance(lane, _Threads) else 0.0
        return ServerUsage(cpu_s(), threads_cpu_s, resident_bytes(os.getpid()), dict(clock.looks))

    doors = ServeConfig(grpc="127.0.0.1:0", http="127.0.0.1:0", drain_s=2.0)
    upstream = Upstream(backend, backend.transport, parse_routes(""))
    async with running(backend, doors, metrics, replace(chat, upstream=upstream)) as at:
        clock.start()
        await obey(at.http, usage)


if __name__ == "__main__":
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=RelaySetup)))
