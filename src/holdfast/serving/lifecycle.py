"""A whole server in one process: opens its data, builds and wires everything, starts both endpoints, drains, stops."""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.matching import load_matcher
from holdfast.chats.embedded_turn import generate_reply
from holdfast.chats.service import ChatService, Trajectories
from holdfast.chats.trajectory import HistoryRules
from holdfast.chats.turn import ChatSetup, TurnSource
from holdfast.chats.upstream_turn import generate_on, relay_to
from holdfast.config import ChatConfig, ServeConfig
from holdfast.errors import ConfigError, EngineDied, HoldfastError
from holdfast.metrics import Metrics
from holdfast.serving.grpc import GrpcServer, create_server
from holdfast.serving.http import Upstream, create_app
from holdfast.serving.http.connections import (
    Connections,
    HttpProtocol,
    Listener,
    default_max_connections,
    raise_file_limit,
)
from holdfast.serving.http.web_pages import read_origins
from holdfast.serving.keys import Keys, check_bind, read_keys, split_address
from holdfast.serving.running_calls import RunningCalls
from holdfast.serving.storage import Storage, open_storage
from holdfast.sessions.admission import Admission
from holdfast.sessions.ports import ServedBackend
from holdfast.sessions.quotas import OwnerQuotas
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.transfers import Transfers

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.25
_PURGE_INTERVAL_S = 3600.0
_END_S = 0.5  # for responses on their way, once nothing runs any more
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Where a running server listens."""

    grpc: str
    http: str | None


@dataclass(frozen=True, slots=True)
class Chat:
    """What the HTTP endpoint needs for chats."""

    model: ChatModel
    config: ChatConfig
    upstream: Upstream | None = None


async def serve(
    backend: ServedBackend,
    config: ServeConfig,
    metrics: Metrics,
    chat: Chat | None = None,
    on_ready: Callable[[ServerAddresses], None] = lambda addresses: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain: admit nothing new, let running work end, stop."""
    raise_file_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with running(backend, config, metrics, chat) as addresses:
        on_ready(addresses)
        await stopping.wait()
        logger.info("draining")


@contextlib.asynccontextmanager
async def running(
    backend: ServedBackend, config: ServeConfig, metrics: Metrics, chat: Chat | None = None
) -> AsyncIterator[ServerAddresses]:
    """A whole server for as long as the context lasts; leaving it drains."""
    keys = read_keys(config.keys_file)
    addresses = [address for address in (config.grpc, config.http) if address]
    for address in addresses:
        check_bind(address, keys, insecure=config.insecure)
    read_origins(config, keys)
    opening = open_storage(config, metrics, backend.model)
    storage = await asyncio.to_thread(opening.__enter__)
    try:
        trajectories = Trajectories()
        quotas = OwnerQuotas(
            max_sessions=config.owner_max_sessions,
            max_running=config.owner_max_running,
            max_queued=config.owner_max_queued,
            max_mb=config.owner_max_mb,
        )
        runtime = Runtime(
            backend,
            idle_ttl_s=config.idle_ttl_s,
            journal=storage.journal,
            snapshots=storage.snapshots,
            max_parked=config.max_parked,
            max_reply_tokens=config.reply_limit,
            quotas=quotas,
            metrics=metrics,
            on_loaded=trajectories.loaded,
            on_removed=trajectories.forget,
        )
        admission = Admission(
            config.max_concurrent or runtime.capacity,
            max_queue=config.queue_max if config.admission == "queue" else 0,
            max_wait_s=config.queue_max_wait_s,
            max_pause_s=config.pause_max_wait_s,
            quotas=quotas,
            metrics=metrics,
        )
        chats = None
        if chat and config.http:
            chats = ChatService(_chat_setup(runtime, admission, config, chat), trajectories)
        async with _endpoints(
            backend,
            runtime,
            admission,
            config,
            chats=chats,
            upstream=chat.upstream if chat else None,
            storage=storage,
            keys=keys,
        ) as served:
            yield served
    finally:
        await storage.journal.close()
        opening.__exit__(None, None, None)


@contextlib.asynccontextmanager
async def _endpoints(
    backend: ServedBackend,
    runtime: Runtime,
    admission: Admission,
    config: ServeConfig,
    *,
    chats: ChatService | None,
    upstream: Upstream | None,
    storage: Storage,
    keys: Keys,
) -> AsyncIterator[ServerAddresses]:
    is_draining = False

    def not_ready() -> str | None:
        return "draining" if is_draining else storage.journal.health or backend.not_ready

    http = None
    calls: list[RunningCalls] = []
    backend.start()
    try:
        await backend.prepare()  # it may learn more about the model, which both endpoints report
        await backend.label_weights(config.weight_version)
        transfers = Transfers(runtime, chats)
        grpc_server = create_server(runtime, transfers, admission, config, keys)
        calls.append(grpc_server.running)
        if config.http:
            served: dict[str, Any] = {"chats": chats, "transfers": transfers, "upstream": upstream, "keys": keys}
            app = create_app(runtime, config, not_ready=not_ready, **served)
            http = _http_server(app, config, runtime.metrics)
            calls.append(app.running)
        gc.collect()
        gc.freeze()  # what was loaded stays: collections need not walk through it
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(runtime.reap()),
                group.create_task(_watch(backend, grpc_server, runtime.metrics)),
                group.create_task(_purge(runtime, config.retain_days)),
            ]
            if http:
                group.create_task(http.server.serve(sockets=[http.socket]))
            await grpc_server.start()
            try:
                yield ServerAddresses(_shown(config.grpc, grpc_server.port), http.address if http else None)
            finally:
                is_draining = True
                if chats is not None:
                    chats.setup.admission.drain()
                await _drain(runtime, grpc_server, calls, config.drain_s)
                if http:
                    http.server.should_exit = True
                for task in tasks:
                    task.cancel()
        if storage.journal.keeps_bodies:
            await runtime.hand_over()
    finally:
        if http:
            http.socket.close()
        await asyncio.to_thread(backend.stop)


def _chat_setup(runtime: Runtime, admission: Admission, config: ServeConfig, chat: Chat) -> ChatSetup:
    rules = HistoryRules(
        matcher=load_matcher(chat.config.matcher),
        max_rollback=chat.config.max_rollback,
        may_edit_replies=chat.config.edited_reply == "branch",
    )
    return ChatSetup(
        runtime=runtime,
        chat=chat.model,
        source=_source(chat.upstream),
        rules=rules,
        admission=admission,
        weight_version=config.weight_version,
        stream_stall_s=config.stream_stall_s,
        is_forest=chat.config.history == "forest",
        max_conversations=chat.config.max_conversations,
        expert_shape=chat.upstream.chat.expert_shape if chat.upstream else lambda: None,
    )


def _source(upstream: Upstream | None) -> TurnSource:
    if upstream is None:
        return generate_reply
    return relay_to(upstream.chat) if upstream.relays_chats else generate_on(upstream.chat)


async def _purge(runtime: Runtime, retain_days: int) -> None:
    """Forget closed sessions in due time."""
    while retain_days:
        with contextlib.suppress(HoldfastError):  # readiness reports a journal that cannot be written
            if await runtime.journal.purge(time.time() - retain_days * _DAY_S):
                await runtime.recount_bytes()
        await asyncio.sleep(_PURGE_INTERVAL_S)


async def _drain(runtime: Runtime, grpc_server: GrpcServer, calls: list[RunningCalls], drain_s: float) -> None:
    """Take no more calls, let those that run end in time, and tell the others that the server is going away."""
    for running_calls in calls:
        running_calls.drain()
    await grpc_server.set_serving(False)
    if not await runtime.drain(drain_s):
        logger.warning("some generations were still running after %g s and are cancelled", drain_s)
    await asyncio.gather(*(running_calls.end(_END_S) for running_calls in calls))
    await runtime.drain(_END_S)  # what was cut off is rolled back
    await grpc_server.stop(_END_S)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process that serves both endpoints, and closes idle connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def on_tick(self, counter: int) -> bool:
        self._connections.close_idle()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class _HttpServer:
    server: uvicorn.Server
    socket: socket.socket
    address: str


def _http_server(app: ASGIApp, config: ServeConfig, metrics: Metrics) -> _HttpServer:
    host, port = split_address(config.http)
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {config.http}: {exc.strerror}; choose another --http") from exc
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small answers do not wait for an acknowledgement
    connections = Connections(config.max_connections or default_max_connections(), config.connection_timeout_s, metrics)
    protocol: Any = partial(HttpProtocol, connections, config.stream_stall_s)
    settings = uvicorn.Config(
        app,
        http=protocol,  # of h11: another parser would refuse other requests, and not in our words
        timeout_keep_alive=math.ceil(config.connection_timeout_s),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,  # draining is over by then
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )
    listener = Listener(bound, connections)
    return _HttpServer(_Uvicorn(settings, connections), listener, _shown(config.http, listener.getsockname()[1]))


def _shown(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


async def _watch(backend: ServedBackend, grpc_server: GrpcServer, metrics: Metrics) -> None:
    """Measure how late the loop runs; tell gRPC's health service whether the backend is ready; end the server where
    its engine has died, for a supervisor to restart."""
    was_ready = True
    while True:
        if (is_ready := backend.not_ready is None) != was_ready:
            await grpc_server.set_serving(is_ready)
            was_ready = is_ready
        started = time.perf_counter()
        await asyncio.sleep(_WATCH_INTERVAL_S)
        metrics.event_loop_lag.observe(max(0.0, time.perf_counter() - started - _WATCH_INTERVAL_S))
        if backend.failure is not None:
            raise EngineDied(f"the engine died: {type(backend.failure).__name__}: {backend.failure}")
