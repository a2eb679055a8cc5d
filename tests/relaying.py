"""A server in front of an upstream, in the test's own process."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx

from holdfast.backends.passthrough import parse_routes
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import UpstreamBackend, upstream_model_info
from holdfast.config import ServeConfig, UpstreamConfig
from holdfast.metrics import Metrics
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.http import Upstream
from holdfast.serving.lifecycle import Chat, running

_UPSTREAM = {field.name for field in dataclasses.fields(UpstreamConfig)}


@dataclasses.dataclass
class Relay:
    http: httpx.AsyncClient
    address: str
    grpc: str
    backend: UpstreamBackend
    stub: Any
    metrics: Metrics


@contextlib.asynccontextmanager
async def relaying(
    url: str, chat: Chat, vocab_size: int, *, kind: type[UpstreamBackend] = SGLangBackend, **options: Any
) -> AsyncIterator[Relay]:
    """`options` are those of ServeConfig and of UpstreamConfig."""
    metrics = Metrics()
    config = UpstreamConfig(upstream=url, **{key: options.pop(key) for key in list(options) if key in _UPSTREAM})
    model = upstream_model_info(name="relayed", vocab_size=vocab_size, eos_token_ids=chat.model.tokenizer.eos_token_ids)
    backend = kind(config, model, metrics=metrics)
    door = Upstream(backend, parse_routes(config.passthrough), config.upstream_api == "chat", config.context_budget)
    doors = ServeConfig(**{"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "drain_s": 2.0} | options)
    async with (
        running(backend, doors, metrics, dataclasses.replace(chat, upstream=door)) as at,
        grpc.aio.insecure_channel(at.grpc) as channel,
        httpx.AsyncClient(base_url=f"http://{at.http}", timeout=30) as http,
    ):
        stub = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        yield Relay(http, at.http or "", at.grpc, backend, stub, metrics)
