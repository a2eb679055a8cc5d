"""This server's place in its cluster: it joins, renews its lease, and knows which member owns a session.

Knows nothing of HTTP and gRPC: a door that gets SessionElsewhere forwards the request to the member that it names.
"""

import asyncio
import contextlib
import logging
import math
import re
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from holdfast import __version__
from holdfast.config import ServeConfig
from holdfast.errors import ConfigError, Fenced, JournalFailed, NotServing, SessionElsewhere, StorageUnavailable
from holdfast.metrics import Metrics
from holdfast.serving.keys import split_address
from holdfast.sessions.journal.base import Member, Members, MemberState
from holdfast.sessions.runtime import Runtime

logger = logging.getLogger(__name__)

FORWARDED = "holdfast-forwarded"  # a request's header: the member that forwards it
MEMBER = "holdfast-member"  # a response's: the member that answered

# Whether the request that is being served was forwarded by another member: then it is answered here or refused.
is_forwarded: ContextVar[bool] = ContextVar("is_forwarded", default=False)

# What became of a forwarded request. Refused: the member did nothing of it. Unreached: it did not get the request.
# Lost: it stopped answering; the request changes nothing, so that it may be repeated.
Outcome = Literal["answered", "refused", "unreached", "lost"]

_PATIENCE_S = 2.0  # beyond the lease of a dead owner
_MAX_OWNERS = 100_000
_RETRY_S = 0.25  # between two looks at a member that does not answer
_WATCH_S = 1.0  # between two looks at members that are answering requests
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, eq=False)
class Peer:
    """Another member that is alive, as it was when last looked at. `gone` is done once it is not any more."""

    member: Member
    gone: "asyncio.Future[None]"
    room: int
    avoided_until: float = 0.0  # as a place for new sessions
    num_calls: int = 0  # that it is answering for us

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The members as they are told to clients. Without a cluster the server is the only one and has no lease."""

    this: str
    members: tuple[Member, ...]
    is_cluster: bool


Describe = Callable[[], Awaitable[ClusterView]]


class Attempts:
    """How often and how long a request is tried: until the lease of a dead owner must have ended."""

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s
        self._pause_s = 0.0

    async def pause(self, session_id: str) -> None:
        """Before the next attempt; the first one follows at once. Raises JournalFailed when time is up."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise JournalFailed(
                f"no member of the cluster could serve {session_id or 'the new session'} in time; try again"
            )
        await asyncio.sleep(min(self._pause_s, left_s))
        self._pause_s = _RETRY_S


class Cluster:
    """Used on one event loop. `join` before requests are taken; `keep` is a task of the server's."""

    def __init__(self, members: Members, runtime: Runtime, config: ServeConfig) -> None:
        self._members = members
        self._runtime = runtime
        self._lease_s = config.lease_s
        self._metrics: Metrics = runtime.metrics
        self._state: MemberState = "serving"
        self._owners: OrderedDict[tuple[str, str], str] = OrderedDict()  # owner and session -> member
        self._peers: dict[str, Peer] = {}
        self._seen: tuple[Member, ...] = ()
        self._seen_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.is_fenced = False

    @property
    def name(self) -> str:
        return self._members.name

    # Lease

    async def join(self, member: Member) -> None:
        """Take this server's place. From now on its lease runs."""
        await self._members.join(member)
        await self._look()

    async def keep(self) -> None:
        """Renew the lease, for ever. Raises Fenced where others have taken this member for dead."""
        renew_at = time.monotonic() + self._lease_s / 3
        while True:
            tick_s = min(_WATCH_S, self._lease_s / 3)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(tick_s, max(0.0, renew_at - time.monotonic()))):
                    await self._wake.wait()
                renew_at = 0.0
            self._wake.clear()
            if time.monotonic() >= renew_at:
                is_renewed = await self._renew()
                renew_at = time.monotonic() + (self._lease_s / 3 if is_renewed else tick_s / 2)
            is_busy = any(peer.num_calls for peer in self._peers.values())
            if is_busy or self._age_s >= self._lease_s / 3:
                with contextlib.suppress(StorageUnavailable):
                    await self.look(max_age_s=0.0)

    async def _renew(self) -> bool:
        try:
            async with asyncio.timeout(self._lease_s):
                await self._members.renew(
                    state=self._state, room=self._runtime.num_free_slabs, num_sessions=self._runtime.num_sessions
                )
        except Fenced:
            self.is_fenced = True
            self._metrics.cluster_fenced.set(1)
            raise
        except (StorageUnavailable, TimeoutError) as exc:
            logger.warning("the lease was not renewed: %s", exc or "the database does not answer")
            return False
        return True

    def suspect(self) -> None:
        """Something was refused as of a dead member: find out now whether this one is."""
        self._wake.set()

    @property
    def not_ready(self) -> str | None:
        """Why others may take this member for dead; None where they may not."""
        if time.monotonic() < self._members.lease_ends_at:
            return None
        return f"the lease of member {self.name} has expired, because the database could not be reached in time"

    def check_lease(self) -> None:
        """Raises NotServing where others may take this member for dead."""
        if reason := self.not_ready:
            raise NotServing(f"{reason}; send the request to another member, or again")

    async def begin_draining(self) -> bool:
        """Others give this member no new sessions; its requests are forwarded from now on. False where it is fenced."""
        self._state = "draining"
        with contextlib.suppress(Fenced):
            if not self.is_fenced and await self._renew():
                with contextlib.suppress(StorageUnavailable):
                    await self.look(max_age_s=0.0)
        return not self.is_fenced

    async def leave(self) -> None:
        """This member's sessions are free at once; if the database is away, when the lease has ended."""
        if self.is_fenced:
            raise Fenced(f"member {self.name} was taken for dead; others have its sessions")
        try:
            async with asyncio.timeout(self._lease_s):
                await self._members.leave()
        except (StorageUnavailable, TimeoutError) as exc:
            logger.warning("the cluster was not told that this member leaves: %s", exc)

    # Where a session is

    @contextlib.asynccontextmanager
    async def using(self, session_id: str, owner: str) -> AsyncIterator[None]:
        """As `Runtime.using`. A session that is known to be elsewhere is not looked for here."""
        self.check_lease()
        key = (owner, session_id)
        if is_forwarded.get():
            if self._state == "draining":
                raise NotServing
        elif member := self._owners.get(key) or self._successor(session_id):
            if key in self._owners:
                self._owners.move_to_end(key)
            raise SessionElsewhere(session_id, member)
        is_here = False
        try:
            async with self._runtime.using(session_id, owner):
                is_here = True
                self._owners.pop(key, None)
                yield
        except SessionElsewhere as exc:
            if is_here:  # it was taken from us meanwhile, and nothing of the request is on record
                self._metrics.sessions_lost.inc()
                raise JournalFailed(f"session {session_id} is with member {exc.member} now; try again") from exc
            self._owners[key] = exc.member
            if len(self._owners) > _MAX_OWNERS:
                self._owners.popitem(last=False)
            raise

    async def reconsider(self, elsewhere: SessionElsewhere, owner: str, outcome: Outcome, attempts: Attempts) -> None:
        """After a member did not answer: forget that it owns the session, unless it may only be out of reach, and wait
        a moment before it is looked for again. Raises JournalFailed when time is up."""
        peer = await self.peer(elsewhere.member)
        if peer is None or outcome != "unreached":
            self._owners.pop((owner, elsewhere.session_id), None)
        if peer is not None:
            peer.avoided_until = time.monotonic() + self._lease_s
        await attempts.pause(elsewhere.session_id)
        await self.look()

    async def check_room(self) -> None:
        """Raises SessionElsewhere where another member should take a new session."""
        self.check_lease()
        is_draining = self._state == "draining"
        if is_forwarded.get():
            if is_draining:
                raise NotServing
            return
        if not is_draining and self._runtime.num_free_slabs > 0:
            return
        await self.look()
        now = time.monotonic()
        serving = [p for p in self._peers.values() if p.member.state == "serving" and p.avoided_until < now]
        roomiest = max(serving, key=lambda peer: peer.room, default=None)
        if roomiest is not None and (roomiest.room > 0 or is_draining):
            roomiest.room -= 1  # until its row says otherwise
            raise SessionElsewhere("", roomiest.member.name)
        if is_draining:
            raise NotServing

    def _successor(self, session_id: str) -> str | None:
        """Who takes the session over while this member drains."""
        if self._state != "draining":
            return None
        serving = sorted(name for name, peer in self._peers.items() if peer.member.state == "serving")
        if not serving:
            raise NotServing
        return serving[hash(session_id) % len(serving)]

    # Others

    def attempts(self) -> Attempts:
        return Attempts(self._lease_s + _PATIENCE_S)

    def is_alive(self, name: str) -> bool:
        """As far as is known."""
        return name in self._peers

    async def peer(self, name: str) -> Peer | None:
        """The member, if it is alive."""
        if name not in self._peers:
            await self.look()
        return self._peers.get(name)

    async def view(self) -> "ClusterView":
        """All members, as they were a moment ago. Raises StorageUnavailable where the database does not answer."""
        await self.look()
        return ClusterView(self.name, self._seen, is_cluster=True)

    async def look(self, *, max_age_s: float = _RETRY_S) -> None:
        """See who is alive, unless that was seen a moment ago. Whoever asks meanwhile waits for the same look."""
        if self._age_s < max_age_s:
            return
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    def _looked(self, task: "asyncio.Task[None]") -> None:
        self._looking = None
        task.cancelled() or task.exception()  # whoever waited has it

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._seen_at

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self._lease_s):
                members = await self._members.all()
        except TimeoutError as exc:
            raise StorageUnavailable("the database does not answer") from exc
        self._seen, self._seen_at = tuple(members), time.monotonic()
        alive = {m.name: m for m in members if m.state != "dead" and m.lease_left_s > 0 and m.name != self.name}
        for name, peer in list(self._peers.items()):
            if name not in alive or alive[name].epoch != peer.member.epoch:
                peer.gone.set_result(None)
                del self._peers[name]
        for name, member in alive.items():
            peer = self._peers.setdefault(name, Peer(member, asyncio.get_running_loop().create_future(), 0))
            peer.member, peer.room = member, member.room


def new_member(config: ServeConfig, *, http_port: int | None, grpc_port: int, room: int) -> Member:
    """This server as a member; the ports are those on which others reach it.

    A name that nobody gave is the same after a restart on the same ports: the server has its sessions back at once.
    """
    name = config.member or f"{socket.gethostname()}:{grpc_port if http_port is None else http_port}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"member must be 1 to 128 letters, digits, dots, colons, hyphens or underscores, got {name!r}"
        )
    http = "" if http_port is None else _advertised(config, config.peer_http or config.http, http_port)
    return Member(
        name=name,
        epoch=0,
        http=http,
        grpc=_advertised(config, config.peer_grpc or config.grpc, grpc_port),
        has_tls=bool(config.tls_cert),
        version=__version__,
        room=room,
    )


def _advertised(config: ServeConfig, address: str, port: int) -> str:
    host = config.advertise or split_address(address)[0]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Using = Callable[[str, str], contextlib.AbstractAsyncContextManager[None]]  # by session id and owner
