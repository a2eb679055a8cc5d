"""The upstream servers: which of them are there, which one a session uses, and when a request is sent again.

Knows nothing of formats: the backend's probe says whether a server may be used.
"""

import asyncio
import contextvars
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.backends.transport import NotReached, Overloaded, Transport
from holdfast.config import UpstreamConfig
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    UpstreamAborted,
    UpstreamTimeout,
    UpstreamUnavailable,
    UpstreamUnreachable,
)
from holdfast.metrics import Metrics

T = TypeVar("T")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_PROBE_TIMEOUT_S = 30.0
_NO_HEALTH = (404, 405, 501)  # of a server that has no health check

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Server:
    """One upstream server. It counts as there until a probe or a request shows otherwise."""

    index: int
    transport: Transport
    is_ready: bool = True
    problem: str = ""  # why it is not used
    model: str = ""  # what it calls the model; known once it was probed
    unserved: set[str] = field(default_factory=set)  # paths that it was started without

    def rank(self, key: str) -> bytes:
        return hashlib.blake2b(f"{self.transport.url} {key}".encode(), digest_size=8).digest()


class Servers:
    """All servers of a backend, which serve the same model. Used on one event loop; `close` it there.

    A key (a session) always uses the server with the highest rank for it among those that are there: it moves when
    that one is gone, comes back with it, and nothing has to be kept for that.
    """

    def __init__(self, config: UpstreamConfig, probe: Callable[[Server], Awaitable[object]], metrics: Metrics) -> None:
        urls = config.upstreams
        if not urls:
            raise ConfigError("--upstream must be the URL of a server, such as http://127.0.0.1:30000")
        self.all = tuple(Server(index, Transport(config, url)) for index, url in enumerate(urls))
        self._wait_s = config.upstream_wait_s
        self._probe = probe
        self._metrics = metrics
        self._some_ready = asyncio.Event()
        self._some_ready.set()
        self._watches: set[asyncio.Task[None]] = set()
        for server in self.all:
            self._show(server)

    async def prepare(self) -> None:
        """Probe every server. One that answers but may not be used raises; one that is not there is waited for."""
        for server in self.all:
            try:
                await self._probe_in_time(server)
            except (UpstreamUnreachable, UpstreamTimeout, UpstreamAborted, TimeoutError) as exc:
                self.lost(server, exc)

    @property
    def problem(self) -> str | None:
        """Why no server can be used at this moment; None where one can."""
        if self._some_ready.is_set():
            return None
        return "no upstream is ready: " + "; ".join(dict.fromkeys(server.problem for server in self.all))

    async def run(self, key: str, work: Callable[[Server], Awaitable[T]], *, num_retries: int = 0) -> tuple[T, int]:
        """What `work` gives on the server of `key`, and how many times it was aborted or cut off before.

        Work that did not reach its server is done elsewhere, or waits until one is there. Work that was aborted or
        cut off is repeated `num_retries` times. Raises UpstreamUnavailable where no server is there in time.
        """
        loop = asyncio.get_running_loop()
        deadline, num_aborted, num_missed = loop.time() + self._wait_s, 0, 0
        while True:
            server = await self._pick(key, deadline)
            try:
                return await work(server), num_aborted
            except NotReached as exc:
                self.lost(server, exc)
                num_missed += 1
                if num_missed >= len(self.all) and loop.time() >= deadline:
                    raise _unavailable(str(exc)) from exc
            except Overloaded:
                raise
            except (UpstreamAborted, UpstreamUnreachable) as exc:
                if isinstance(exc, UpstreamUnreachable):
                    self.lost(server, exc)
                if num_aborted == num_retries:
                    raise
                num_aborted += 1
                self._metrics.upstream_sent_again.labels(exc.code).inc()
                await asyncio.sleep(_delay(num_aborted))
                deadline = loop.time() + self._wait_s

    async def confirm(self, server: Server, *, was_turned_away: bool) -> None:
        """Return if the server is healthy by its own account, or has no health check.

        Otherwise an error of the server is a gap: NotReached if it turned the request away, else UpstreamUnreachable.
        """
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                status = (await server.transport.request("GET", "/health")).status
            problem = f"the upstream's health check returned status {status}"
            is_healthy = status == 200 or status in _NO_HEALTH
        except (UpstreamUnreachable, TimeoutError) as exc:
            problem, is_healthy = str(exc) or "the upstream's health check takes too long", False
        if not is_healthy:
            raise (NotReached if was_turned_away else UpstreamUnreachable)(problem)

    def lost(self, server: Server, why: BaseException) -> None:
        """Do not use the server until a probe has succeeded."""
        if not server.is_ready:
            return
        self._set_problem(server, why)
        server.is_ready = False
        self._show(server)
        if not any(one.is_ready for one in self.all):
            self._some_ready.clear()
        # Without the context of the request that noticed it: its headers are not the probe's.
        watch = asyncio.get_running_loop().create_task(self._watch(server), context=contextvars.Context())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def close(self) -> None:
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for server in self.all:
            await server.transport.close()

    async def _pick(self, key: str, deadline: float) -> Server:
        try:
            async with asyncio.timeout_at(deadline):
                while not (ready := [server for server in self.all if server.is_ready]):
                    await self._some_ready.wait()
        except TimeoutError:
            raise _unavailable(self.problem) from None
        return max(ready, key=lambda server: server.rank(key))

    async def _watch(self, server: Server) -> None:
        """Probe until the server is there again, ever more rarely."""
        since, num_failed = time.monotonic(), 0
        while not server.is_ready:
            try:
                await self._probe_in_time(server)
                server.is_ready = True
            except (HoldfastError, TimeoutError) as exc:
                self._set_problem(server, exc)
                num_failed += 1
                await asyncio.sleep(_delay(num_failed))
        server.problem = ""
        self._show(server)
        self._some_ready.set()
        logger.warning("upstream %s is there again after %.1f s", server.transport.url, time.monotonic() - since)

    async def _probe_in_time(self, server: Server) -> None:
        server.unserved.clear()  # it may have been started otherwise
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await self._probe(server)

    def _set_problem(self, server: Server, why: BaseException) -> None:
        problem = str(why) or "it does not answer in time"
        if problem != server.problem:
            server.problem = problem
            logger.warning("upstream %s is not used until a probe succeeds: %s", server.transport.url, problem)

    def _show(self, server: Server) -> None:
        self._metrics.upstream_ready.labels(str(server.index)).set(server.is_ready)


def _unavailable(problem: str | None) -> UpstreamUnavailable:
    return UpstreamUnavailable(f"{problem or 'no upstream is ready'}; try again later")


def _delay(num_failed: int) -> float:
    """Seconds until the next try: twice as long each time, up to a limit, with jitter."""
    longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(num_failed, 16))
    return random.uniform(longest / 2, longest)
