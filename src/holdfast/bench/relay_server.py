"""A server in front of the canned upstream that decodes replies in one of three modes, and where its CPU time goes.

A process: it answers each order with what it has used so far.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, TypeVar, get_args

from holdfast.backends import validation
from holdfast.backends.passthrough import parse_routes
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import DecodeQueue, upstream_model_info
from holdfast.bench.machine import own_cpu_s, resident_bytes
from holdfast.bench.processes import obey, run_helper
from holdfast.chat.chat_model import load_chat
from holdfast.config import ChatConfig, ServeConfig, UpstreamConfig
from holdfast.metrics import Metrics
from holdfast.models import open_model
from holdfast.serving.http import Upstream
from holdfast.serving.lifecycle import Chat, running
from holdfast.sessions import record

T = TypeVar("T")

Mode = Literal["inline", "lane", "threads"]
MODES: tuple[Mode, ...] = get_args(Mode)

_SAMPLE_INTERVAL_S = 0.005  # of CPU time

# The innermost frame of the stack whose path holds one of these says which stage it was; the first match counts.
_STAGES = {
    "decode": [module.__name__.replace(".", "/") + ".py" for module in (validation, record)],
    "upstream": ["/holdfast/backends/", "/aiohttp/", "/yarl/"],
    "turn": ["/holdfast/chats/", "/holdfast/sessions/", "/holdfast/chat/", "/jinja2/", "/tokenizers/"],
    "client": ["/holdfast/serving/", "/starlette/", "/uvicorn/", "/h11/", "/httptools/"],
    "sockets": ["/asyncio/selector_events.py"],
    "loop": ["/asyncio/", "/selectors.py"],
}
STAGES = (*_STAGES, "other")


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What the process has used so far. `num_samples` counts stack samples of the main thread by stage."""

    cpu_s: float
    threads_cpu_s: float
    rss_bytes: int
    num_samples: dict[str, int]


class StageClock:
    """Samples the stack of the main thread at intervals of CPU time, and counts the samples by stage."""

    def __init__(self) -> None:
        self.num_samples: Counter[str] = Counter()
        self._known: dict[str, str | None] = {}

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_INTERVAL_S, _SAMPLE_INTERVAL_S)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in self._known:
                self._known[path] = stage_of(path)
            if (stage := self._known[path]) is not None:
                self.num_samples[stage] += 1
                return
            frame = frame.f_back
        self.num_samples["other"] += 1


def stage_of(path: str) -> str | None:
    """The stage that a source file belongs to."""
    return next((stage for stage, parts in _STAGES.items() if any(part in path for part in parts)), None)


class ThreadedQueue(DecodeQueue):
    """Decodes every reply in a thread, at most `num_threads` at a time; 0: one per core."""

    def __init__(self, num_threads: int = 0) -> None:
        super().__init__()
        self.cpu_s = 0.0
        self._free_threads = asyncio.Semaphore(num_threads or min(16, os.cpu_count() or 1))

    async def decode(self, work: Callable[[], T], num_bytes: int) -> T:
        async with self._free_threads:
            return await asyncio.to_thread(self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        started = time.thread_time()
        try:
            return work()
        finally:
            self.cpu_s += time.thread_time() - started  # not locked: a lost update costs one reply's share


def _queue(mode: Mode) -> DecodeQueue:
    if mode == "inline":
        return DecodeQueue(inline_bytes=sys.maxsize)
    return ThreadedQueue() if mode == "threads" else DecodeQueue()


async def _main(upstream_url: str, mode: Mode, model_name: str) -> None:
    source = open_model(model_name, tokenizer_only=True)
    chat = Chat(load_chat(source, ChatConfig(), source.vocab_size), ChatConfig())
    model = upstream_model_info(name=source.name, vocab_size=source.vocab_size, eos_token_ids=source.eos_token_ids)
    metrics = Metrics()
    config = UpstreamConfig(upstream=upstream_url, routing_replay="additional")
    backend = SGLangBackend(config, model, metrics=metrics)
    backend.decode_queue = queue = _queue(mode)
    clock = StageClock()

    async def usage(line: bytes) -> ServerUsage:
        threads_cpu_s = queue.cpu_s if isinstance(queue, ThreadedQueue) else 0.0
        return ServerUsage(own_cpu_s(), threads_cpu_s, resident_bytes(os.getpid()), dict(clock.num_samples))

    addresses = ServeConfig(grpc="127.0.0.1:0", http="127.0.0.1:0", drain_s=2.0)
    upstream = Upstream(backend, parse_routes(""))
    async with running(backend, addresses, metrics, replace(chat, upstream=upstream)) as at:
        clock.start()
        await obey(at.http, usage)


if __name__ == "__main__":
    run_helper(_main(*sys.argv[1:]))  # type: ignore[arg-type]
