"""A uvicorn server for the HTTP endpoint, on its own address and, for other members of a cluster, on a further one."""

import contextlib
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from holdfast.config import ServeConfig
from holdfast.errors import ConfigError
from holdfast.metrics import Metrics
from holdfast.serving.http.connections import Connections, HttpProtocol, Listener, default_max_connections
from holdfast.serving.http.middleware import HttpMiddleware
from holdfast.serving.keys import split_address
from holdfast.serving.running_calls import RunningCalls


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
class HttpServer:
    """A server that listens and does not answer yet. `peer_port`: for other members."""

    app: HttpMiddleware
    server: uvicorn.Server
    sockets: list[socket.socket]
    port: int
    peer_port: int

    @property
    def running(self) -> RunningCalls:
        return self.app.running

    async def serve(self) -> None:
        await self.server.serve(sockets=self.sockets)

    def stop(self) -> None:
        self.server.should_exit = True

    async def close(self) -> None:
        await self.app.close()
        for bound in self.sockets:
            bound.close()


def create_http_server(app: HttpMiddleware, config: ServeConfig, metrics: Metrics) -> HttpServer:
    """Binds at once; a port that is taken is a ConfigError."""
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
    bound = [_listen(config.http, "--http", is_shared=config.workers > 1)]
    if config.peer_http:
        bound.append(_listen(config.peer_http, "--peer-http"))
    listeners: list[socket.socket] = [Listener(one, connections) for one in bound]
    ports = [listener.getsockname()[1] for listener in listeners]
    return HttpServer(app, _Uvicorn(settings, connections), listeners, ports[0], ports[-1])


def _listen(address: str, flag: str, *, is_shared: bool = False) -> socket.socket:
    """`is_shared`: other processes listen on the same address, and each gets a part of the connections."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, reuse_port=is_shared)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {address}: {exc.strerror}; choose another {flag}") from exc
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small answers do not wait for an acknowledgement
    return bound
