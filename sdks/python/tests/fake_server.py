"""The fake runtime behind a real grpc.aio server, on a thread and an event loop of its own."""

import asyncio
import threading

import grpc

from fake_runtime import FakeRuntime
from faults import Faults
from holdfast_sdk.gen.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server


class FakeServer:
    """`address` is a free port of 127.0.0.1; `stop` waits until it is closed. Members of a cluster share a runtime."""

    def __init__(self, tls: tuple[bytes, bytes] | None = None, runtime: FakeRuntime | None = None) -> None:
        self._tls = tls  # private key, certificate
        self.runtime = runtime or FakeRuntime()
        self.faults = Faults()
        self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> "FakeServer":
        self._thread.start()
        if not self._ready.wait(timeout=30):
            raise RuntimeError("the fake server did not start")
        return self

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout=30)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(interceptors=[self.faults])
        add_RuntimeServiceServicer_to_server(self.runtime, server)
        if self._tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([self._tls]))
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._ready.set()
        await self._stopping.wait()
        await server.stop(grace=None)
