"""A grpc.aio server over a runtime, with health checking and reflection."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from holdfast.config import ServeConfig
from holdfast.errors import ConfigError
from holdfast.serving.cluster.grpc_forward import GrpcForwarder
from holdfast.serving.cluster.membership import Cluster, Describe
from holdfast.serving.grpc.gen import runtime_pb2
from holdfast.serving.grpc.gen import runtime_pb2_grpc as rpc
from holdfast.serving.grpc.interceptor import Guard
from holdfast.serving.grpc.service import RuntimeService
from holdfast.serving.keys import Keys
from holdfast.serving.logs import hide_metadata
from holdfast.serving.pacing import Pacing
from holdfast.serving.running_calls import RunningCalls
from holdfast.sessions.admission import Admission
from holdfast.sessions.runtime import Runtime
from holdfast.sessions.transfers import Transfers
from holdfast.sessions.view import Search

SERVICE: str = runtime_pb2.DESCRIPTOR.services_by_name["RuntimeService"].full_name
_MAX_REQUEST_BYTES = 64 * 1024 * 1024
_HANDSHAKE_MS = 10_000
_IDLE_MS = 300_000
_MAX_CALLS = 1024  # on one connection; further ones wait at the client
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A server that is not started yet, the ports it got, its health and its calls. `peer_port`: for other members."""

    server: Any
    port: int
    peer_port: int
    health: Any
    running: RunningCalls
    forwarder: GrpcForwarder | None

    async def start(self) -> None:
        await self.server.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        for service in ("", SERVICE):
            await self.health.set(service, _SERVING if is_serving else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)
        if self.forwarder:
            await self.forwarder.close()


def create_server(
    runtime: Runtime,
    transfers: Transfers,
    admission: Admission,
    config: ServeConfig,
    keys: Keys | None = None,
    *,
    cluster: Cluster | None = None,
    describe: Describe | None = None,
    search: Search | None = None,
    pacing: Pacing | None = None,
) -> GrpcServer:
    """Binds at once; a port that is taken is a ConfigError."""
    options = [
        ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
        ("grpc.so_reuseport", int(config.workers > 1)),  # otherwise two servers would share calls at random
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),  # without a call; clients connect again by themselves
        ("grpc.keepalive_time_ms", _IDLE_MS),  # so that a peer that is gone is noticed
        ("grpc.max_concurrent_streams", _MAX_CALLS),
    ]
    hide_metadata()
    forwarder = GrpcForwarder(cluster, config, runtime.metrics) if cluster else None
    guard = Guard(
        SERVICE,
        keys or Keys(),
        runtime.metrics,
        cluster.using if cluster else runtime.using,
        stall_s=config.stream_stall_s,
        cluster=cluster,
        forwarder=forwarder,
        pacing=pacing,
    )
    server = grpc.aio.server(interceptors=[guard], options=options)
    service = RuntimeService(
        runtime, transfers, admission, max_session_mb=config.max_session_mb, describe=describe, search=search
    )
    rpc.add_RuntimeServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    ports = [_bind(server, address, config) for address in (config.grpc, config.peer_grpc) if address]
    return GrpcServer(server, ports[0], ports[-1], servicer, guard.running, forwarder)


def _bind(server: Any, address: str, config: ServeConfig) -> int:
    try:
        if not config.tls_cert and not config.tls_key:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(config)))
    except RuntimeError as exc:
        flag = "--grpc" if address == config.grpc else "--peer-grpc"
        raise ConfigError(
            f"cannot listen on {address}: the address is in use or not available; choose another {flag}"
        ) from exc


def _credentials(config: ServeConfig) -> grpc.ServerCredentials:
    if not (config.tls_cert and config.tls_key):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    try:
        key, chain = (Path(path).read_bytes() for path in (config.tls_key, config.tls_cert))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
    except ssl.SSLError as exc:
        raise ConfigError(f"{config.tls_cert} and {config.tls_key} are not a certificate and its private key") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {exc.filename}: {exc.strerror}") from exc
    return grpc.ssl_server_credentials([(key, chain)])
