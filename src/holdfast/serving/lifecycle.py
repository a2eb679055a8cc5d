"""A whole server in one process: opens its data, builds and wires everything, starts both endpoints, drains, stops."""

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.matching import load_matcher
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.embedded_turn import generate_reply
from holdfast.chats.recall import RecallLimits
from holdfast.chats.search import HistorySearch
from holdfast.chats.service import ChatService, Trajectories
from holdfast.chats.trajectory import HistoryRules
from holdfast.chats.turn import ChatSetup, TurnSource
from holdfast.chats.upstream_turn import generate_on, relay_to
from holdfast.config import ChatConfig, ServeConfig
from holdfast.errors import EngineDied, HoldfastError
from holdfast.metrics import Metrics
from holdfast.serving.cluster.membership import Cluster, ClusterView, new_member
from holdfast.serving.grpc import GrpcServer, create_server
from holdfast.serving.http import Upstream, create_app
from holdfast.serving.http.connections import raise_file_limit
from holdfast.serving.http.server import HttpServer, create_http_server
from holdfast.serving.http.web_pages import read_origins
from holdfast.serving.keys import Keys, check_bind, read_keys
from holdfast.serving.pacing import Pacing
from holdfast.serving.running_calls import RunningCalls
from holdfast.serving.storage import Storage, open_storage
from holdfast.sessions.admission import Admission
from holdfast.sessions.journal.base import MemberState
from holdfast.sessions.ports import ServedBackend
from holdfast.sessions.quotas import OwnerQuotas
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.transfers import Transfers

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.25
_PURGE_INTERVAL_S = 3600.0
_COUNT_S = 0.5  # for which a start waits until it is known what owners have on record
_RECOUNT_S = 30.0
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
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain: admit nothing new, let running work end, stop."""
    raise_file_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with running(backend, config, metrics, chat, tokenizer=tokenizer) as addresses:
        on_ready(addresses)
        await stopping.wait()
        logger.info("draining")


@contextlib.asynccontextmanager
async def running(
    backend: ServedBackend,
    config: ServeConfig,
    metrics: Metrics,
    chat: Chat | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> AsyncIterator[ServerAddresses]:
    """A whole server for as long as the context lasts; leaving it drains. `tokenizer`: by which sessions are searched,
    where there is no `chat`."""
    keys = read_keys(config.keys_file)
    addresses = [address for address in (config.grpc, config.http, config.peer_grpc, config.peer_http) if address]
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
        tokenizer = chat.model.tokenizer if chat else tokenizer
        if chat and config.http:
            chats = ChatService(_chat_setup(runtime, admission, config, chat), trajectories)
        async with _endpoints(
            backend,
            runtime,
            admission,
            config,
            chats=chats,
            upstream=chat.upstream if chat else None,
            search=HistorySearch(runtime, trajectories, tokenizer) if tokenizer else None,
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
    search: HistorySearch | None,
    storage: Storage,
    keys: Keys,
) -> AsyncIterator[ServerAddresses]:
    cluster = Cluster(members, runtime, config) if (members := storage.journal.members) else None
    drain = _Drain(runtime, admission if chats else None, cluster, config.drain_s)

    def not_ready() -> str | None:
        if drain.has_begun:
            return "draining"
        return storage.journal.health or (cluster and cluster.not_ready) or backend.not_ready

    async def describe() -> ClusterView:
        if cluster is not None:
            return await cluster.view()
        state: MemberState = "draining" if drain.has_begun else "serving"
        this = replace(member, state=state, room=runtime.num_free_slabs, num_sessions=runtime.num_sessions)
        return ClusterView(member.name, (this,), is_cluster=False)

    backend.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, backend.stop)
        await backend.prepare()  # it may learn more about the model, which both endpoints report
        await backend.label_weights(config.weight_version)
        transfers = Transfers(runtime, chats)
        shared: dict[str, Any] = {"keys": keys, "cluster": cluster, "describe": describe, "search": search}
        shared["pacing"] = Pacing(lambda: backend.num_busy_cores)
        grpc_server = create_server(runtime, transfers, admission, config, **shared)
        http = None
        if config.http:
            shared |= {"chats": chats, "transfers": transfers, "upstream": upstream}
            app = create_app(runtime, config, not_ready=not_ready, **shared)
            http = create_http_server(app, config, runtime.metrics)
            stack.push_async_callback(http.close)
        member = new_member(
            config,
            http_port=http.peer_port if http else None,
            grpc_port=grpc_server.peer_port,
            room=runtime.num_free_slabs,
        )
        if cluster is not None:
            await cluster.join(member)
        gc.collect()
        gc.freeze()  # what was loaded stays: collections need not walk through it
        async with _upkeep(backend, runtime, grpc_server, cluster, config.retain_days) as group:
            if http:
                group.create_task(http.serve())
            await grpc_server.start()
            try:
                shown = _shown(config.http, http.port) if http else None
                yield ServerAddresses(_shown(config.grpc, grpc_server.port), shown)
            finally:
                await drain(grpc_server, http)
        if storage.journal.keeps_bodies:
            await runtime.hand_over()
        if cluster is not None:
            await cluster.leave()


@contextlib.asynccontextmanager
async def _upkeep(
    backend: ServedBackend, runtime: Runtime, grpc_server: GrpcServer, cluster: Cluster | None, retain_days: int
) -> AsyncIterator[asyncio.TaskGroup]:
    """What goes on beside the requests for as long as the context lasts, in a group: if one of it fails, all end."""
    async with asyncio.TaskGroup() as group:
        counting = group.create_task(_count(runtime))
        tasks = [
            counting,
            group.create_task(runtime.reap()),
            group.create_task(_watch(backend, grpc_server, runtime.metrics)),
            group.create_task(_purge(runtime, retain_days)),
            *([group.create_task(cluster.keep())] if cluster else []),
        ]
        await asyncio.wait([counting], timeout=_COUNT_S)
        try:
            yield group
        finally:
            for task in tasks:
                task.cancel()


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
        recall=RecallLimits(chat.config.recall_tokens),
        context_budget=chat.upstream.context_budget if chat.upstream else 0,
        stream_stall_s=config.stream_stall_s,
        is_forest=chat.config.history == "forest",
        max_conversations=chat.config.max_conversations,
        expert_shape=chat.upstream.chat.expert_shape if chat.upstream else lambda: None,
    )


def _source(upstream: Upstream | None) -> TurnSource:
    if upstream is None:
        return generate_reply
    return relay_to(upstream.chat) if upstream.relays_chats else generate_on(upstream.chat)


async def _count(runtime: Runtime) -> None:
    """Count what owners have on record, again until that succeeds."""
    while True:
        try:
            return await runtime.recount_bytes()
        except HoldfastError as exc:
            logger.warning("what owners have on record could not be counted for --owner-max-mb: %s", exc)
        await asyncio.sleep(_RECOUNT_S)


async def _purge(runtime: Runtime, retain_days: int) -> None:
    """Forget closed sessions in due time."""
    while retain_days:
        with contextlib.suppress(HoldfastError):  # readiness reports a journal that cannot be written
            if await runtime.journal.purge(time.time() - retain_days * _DAY_S):
                await runtime.recount_bytes()
        await asyncio.sleep(_PURGE_INTERVAL_S)


class _Drain:
    """Ends the work of a server: takes no more calls, lets those that run end in time, tells the others that the server
    is going away. A member of a cluster forwards what still comes, while it hands its sessions over."""

    def __init__(self, runtime: Runtime, admission: Admission | None, cluster: Cluster | None, drain_s: float) -> None:
        self._runtime = runtime
        self._admission = admission
        self._cluster = cluster
        self._drain_s = drain_s
        self.has_begun = False

    async def __call__(self, grpc_server: GrpcServer, http: HttpServer | None) -> None:
        self.has_begun = True
        doors = [grpc_server.running, *([http.running] if http else [])]
        await grpc_server.set_serving(False)
        try:
            grace_s = await self._finish(doors)
        finally:
            for door in doors:
                door.drain()
        self._runtime.watch.close()
        await asyncio.gather(*(door.end(grace_s) for door in doors))
        if grace_s:
            await self._runtime.drain(grace_s)  # what was cut off is rolled back
        await grpc_server.stop(grace_s)
        if http:
            http.stop()

    async def _finish(self, doors: list[RunningCalls]) -> float:
        """Let what runs end. Returns how long responses may take after that: no time where others have the sessions of
        this server, of which nothing may be told any more."""
        if self._cluster is None:
            for door in doors:
                door.drain()
        elif not await self._cluster.begin_draining():
            return 0.0
        if self._admission:
            self._admission.drain()
        ended, _ = await asyncio.gather(
            self._runtime.drain(self._drain_s),
            self._runtime.hand_over(self._drain_s) if self._cluster is not None else asyncio.sleep(0),
        )
        if not ended:
            logger.warning("some generations were still running after %g s and are cancelled", self._drain_s)
        return _END_S


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
