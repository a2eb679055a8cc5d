"""The faults of a cluster: which come when, and how each is done. A fault ends when its cause is gone."""

import asyncio
import math
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.bench.cluster.members import ClusterMember, MemberProcesses
from holdfast.bench.cluster.postgres import PostgresProcess

FaultKind = Literal["kill", "pause", "cut", "deaf", "database", "roll", "join"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
PLANNED: tuple[FaultKind, ...] = ("roll", "join")  # a careful client notices them once at most
LOSING: tuple[FaultKind, ...] = ("kill", "pause", "cut", "deaf")  # a member loses its lease by it, if it lasts

_LONGER = 1.5  # leases that a member is away, at most, beyond the one that it loses
_OVERLAPPING_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """`member`: the index of the one that it hits, if it hits one. `lasts`: in leases. `waits`: the next fault comes
    when all members are there again; otherwise while this one lasts."""

    kind: FaultKind
    member: int
    lasts: float
    waits: bool


def plan_faults(num: int, num_members: int, seed: int, kinds: Sequence[FaultKind] = KINDS) -> list[PlannedFault]:
    """Every kind equally often, in an order of its own for each seed. Pure."""
    chance = random.Random(seed)
    planned: list[PlannedFault] = []
    while len(planned) < num:
        for kind in chance.sample(kinds, len(kinds)):
            # A pause always outlasts the lease; the others do sometimes.
            lasts = chance.uniform(1.1 if kind == "pause" else 0.05, 1 + _LONGER)
            waits = chance.random() >= _OVERLAPPING_SHARE
            planned.append(PlannedFault(kind, chance.randrange(num_members), lasts, waits))
    return planned[:num]


@dataclass(slots=True)
class FaultRun:
    """A fault as it happened, by `time.monotonic`. `sessions` are those of the member that it hit, if it hit one."""

    kind: FaultKind
    began_s: float
    over_s: float = 0.0  # when its cause was gone
    settled_s: float = math.inf  # when all members were ready after it
    sessions: frozenset[str] = frozenset()
    exit_codes: list[int] = field(default_factory=list)  # of members that were told to stop


class Saboteur:
    """Brings the faults about. On one event loop."""

    def __init__(
        self,
        members: MemberProcesses,
        database: PostgresProcess,
        lease_s: float,
        regulars: Sequence[ClusterMember],
        guest: ClusterMember,
    ) -> None:
        self._members = members
        self._database = database
        self._lease_s = lease_s
        self._regulars = regulars
        self._guest = guest
        self._alone = asyncio.Lock()  # faults that hit no single member: one at a time
        self.runs: list[FaultRun] = []

    async def cause(self, fault: PlannedFault) -> None:
        """Returns when the fault's cause is gone."""
        target = self._regulars[fault.member]
        lasts_s = fault.lasts * self._lease_s
        if fault.kind in ("database", "roll", "join"):
            async with self._alone:
                run = self._begin(fault.kind)
                do = {"database": self._lose_database, "roll": self._roll, "join": self._join}[fault.kind]
                await do(run, lasts_s)
        else:
            async with target.lock:
                sessions = await asyncio.to_thread(self._database.sessions_of, target.name)
                run = self._begin(fault.kind, sessions)
                hit = {"kill": self._kill, "pause": self._pause, "cut": self._cut, "deaf": self._deafen}[fault.kind]
                await hit(target, lasts_s)
        run.over_s = time.monotonic()

    def settle(self) -> None:
        """All members are ready again, as far as no fault lasts."""
        for run in self.runs:
            if run.over_s:
                run.settled_s = min(run.settled_s, time.monotonic())

    def _begin(self, kind: FaultKind, sessions: frozenset[str] = frozenset()) -> FaultRun:
        run = FaultRun(kind, time.monotonic(), sessions=sessions)
        self.runs.append(run)
        return run

    async def _kill(self, target: ClusterMember, lasts_s: float) -> None:
        target.kill()
        await asyncio.sleep(lasts_s)

    async def _pause(self, target: ClusterMember, lasts_s: float) -> None:
        target.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            target.signal(signal.SIGCONT)

    async def _cut(self, target: ClusterMember, lasts_s: float) -> None:
        target.link.cut()
        await asyncio.sleep(lasts_s)
        target.link.mend()

    async def _deafen(self, target: ClusterMember, lasts_s: float) -> None:
        target.link.deafen()
        await asyncio.sleep(lasts_s)
        target.link.mend()

    async def _lose_database(self, run: FaultRun, lasts_s: float) -> None:
        await asyncio.to_thread(self._database.kill)
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(self._database.start)

    async def _roll(self, run: FaultRun, lasts_s: float) -> None:
        """Restart one member after the other, each when the one before is there again."""
        for member in self._regulars:
            async with member.lock:
                if member.server is not None and member.server.exit_code is None:
                    run.exit_codes.append(await member.stop())
            await self._members.all_ready()

    async def _join(self, run: FaultRun, lasts_s: float) -> None:
        """A further member for a while."""
        self._guest.is_wanted = True
        await self._members.all_ready()
        await asyncio.sleep(lasts_s)
        async with self._guest.lock:
            self._guest.is_wanted = self._guest.is_known = False
            if self._guest.server is not None and self._guest.server.exit_code is None:
                run.exit_codes.append(await self._guest.stop())
            else:
                self._guest.kill()
