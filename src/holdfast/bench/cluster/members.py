"""The members of a cluster as processes, each with a link of its own to the database, and someone who restarts them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from holdfast.bench.cluster.clients import MemberAddress
from holdfast.bench.cluster.link import Link
from holdfast.bench.cluster.postgres import PostgresProcess, free_port
from holdfast.bench.processes import START_TIMEOUT_S, ProcessFailed, ServerProcess

_POLL_S = 0.05
_READY_S = 1.0


@dataclass(frozen=True, slots=True)
class MemberExit:
    """A member that ended without being told to. `said` is its last sentence."""

    name: str
    code: int
    said: str


@dataclass(slots=True)
class ClusterMember:
    """`is_wanted`: whoever keeps the members starts it where it does not run. `lock`: one fault at a time."""

    address: MemberAddress
    link: Link
    flags: Sequence[str]
    server: ServerProcess | None = None
    is_wanted: bool = False
    is_known: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.address.name

    def start(self) -> None:
        assert self.server is None
        self.server = ServerProcess(*self.flags)

    def kill(self) -> None:
        """SIGKILL, whether it runs, is stopped or has ended."""
        if self.server is not None:
            self.server.kill()
            self.server = None

    async def stop(self) -> int:
        """SIGTERM, until it has ended; its exit code."""
        assert self.server is not None
        server, self.server = self.server, None
        return await asyncio.to_thread(server.stop)

    def signal(self, number: signal.Signals) -> None:
        if self.server is not None and self.server.exit_code is None:
            os.kill(self.server.pid, number)

    async def not_ready(self, http: aiohttp.ClientSession) -> str:
        """Why it does not accept requests; empty if it does."""
        try:
            async with asyncio.timeout(_READY_S), http.get(f"{self.address.http}/readyz") as reply:
                return "" if reply.status == 200 else f"{self.name}: {reply.status} {await reply.text()}"
        except (aiohttp.ClientError, TimeoutError) as exc:
            return f"{self.name}: {type(exc).__name__}"


class MemberProcesses:
    """The members that there are, and a further one that comes and goes. On one event loop."""

    def __init__(self, everyone: Sequence[ClusterMember], http: aiohttp.ClientSession) -> None:
        self.everyone = everyone
        self.exits: list[MemberExit] = []
        self._http = http

    @property
    def wanted(self) -> list[ClusterMember]:
        return [member for member in self.everyone if member.is_wanted]

    def addresses(self) -> list[MemberAddress]:
        """Of those that have been ready since they are wanted, whether or not they are now."""
        return [member.address for member in self.wanted if member.is_known]

    async def keep(self) -> None:
        """Start the members that are wanted and do not run, as a supervisor does; until it is cancelled."""
        while True:
            for member in self.wanted:
                if member.lock.locked():
                    continue  # a fault has it in its hands
                if member.server is not None and (code := member.server.exit_code) is not None:
                    self.exits.append(MemberExit(member.name, code, member.server.last_words()))
                    member.kill()
                if member.server is None:
                    member.start()
            await asyncio.sleep(_POLL_S)

    async def all_ready(self) -> None:
        """Returns when every wanted member accepts requests."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(found := await asyncio.gather(*(member.not_ready(self._http) for member in self.wanted))):
            if time.monotonic() > deadline:
                raise ProcessFailed(f"not ready after {START_TIMEOUT_S:g} s: {'; '.join(filter(None, found))}")
            await asyncio.sleep(_POLL_S)
        for member in self.wanted:
            member.is_known = True

    def kill_all(self) -> None:
        for member in self.everyone:
            member.kill()


@contextlib.asynccontextmanager
async def members_of(
    database: PostgresProcess, names: Sequence[str], flags: Sequence[str], http: aiohttp.ClientSession
) -> AsyncIterator[MemberProcesses]:
    """MemberProcesses on fixed ports, none of them wanted yet. All have ended when the context does."""
    async with contextlib.AsyncExitStack() as stack:
        everyone = []
        for name in names:
            link = await stack.enter_async_context(Link(database.port))
            http_at, grpc_at = (f"127.0.0.1:{free_port()}" for _ in range(2))
            own = ["--http", http_at, "--grpc", grpc_at, "--member", name, "--journal", database.url(link.port)]
            everyone.append(ClusterMember(MemberAddress(name, f"http://{http_at}", grpc_at), link, [*flags, *own]))
        members = MemberProcesses(everyone, http)
        try:
            yield members
        finally:
            members.kill_all()
