"""A crew of agents and the lives of the server that they work on: started, checked, killed in the middle of a turn."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from holdfast.bench.agents import Agent, ServerClients, ServerGone, UnexpectedResponse, connected
from holdfast.bench.server_process import ServerProcess
from holdfast.errors import HoldfastError

_RETIRED_CHECKED = 3
_CHECKED_AT_ONCE = 8


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """What one look at sessions found. `num_stuck`: their next turn was refused."""

    num_sessions: int = 0
    num_turns: int = 0
    num_lost: int = 0
    num_altered: int = 0
    num_stuck: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`in_flight` turns at the moment of the kill; `refused` are answers under load that were none."""

    start_s: float
    num_turns: int
    in_flight: int
    checked: CheckResult
    refused: tuple[str, ...]


class Crew:
    """`recruit` makes the agent with a number. One that has had `most_turns` retires: its session stays."""

    def __init__(
        self, recruit: Callable[[int], Agent], *, size: int, most_turns: int, flags: Sequence[str], seed: int
    ) -> None:
        self._recruits = map(recruit, itertools.count())
        self._active = [next(self._recruits) for _ in range(size)]
        self._retired: list[Agent] = []
        self._broken: list[Agent] = []  # what was found wrong once is counted once
        self._most_turns = most_turns
        self._flags = flags
        self._random = random.Random(seed)

    @property
    def num_turns(self) -> int:
        """All that were acknowledged so far."""
        return sum(agent.num_turns for agent in (*self._active, *self._retired, *self._broken))

    async def live(self, least_s: float, most_s: float) -> Life:
        """Start the server, look at what is there, work, and kill it after some time between the two."""
        async with self._started() as (server, doors, start_s):
            some = self._random.sample(self._retired, min(len(self._retired), _RETIRED_CHECKED))
            checked = await self._check([*self._active, *some], doors)
            before = self.num_turns
            working = [asyncio.ensure_future(self._work(place, doors)) for place in range(len(self._active))]
            try:
                await asyncio.sleep(self._random.uniform(least_s, most_s))
                in_flight = sum(agent.is_waiting for agent in self._active)
                early = [task.done() for task in working]
                server.kill()
                ends = await asyncio.gather(*working, return_exceptions=True)
            finally:
                for task in working:
                    task.cancel()
        pairs = zip(ends, early, strict=True)
        refused = [str(end) for end, is_early in pairs if is_early or not isinstance(end, ServerGone)]
        return Life(
            start_s=start_s,
            num_turns=self.num_turns - before,
            in_flight=in_flight,
            checked=checked,
            refused=tuple(refused),
        )

    async def die_at_start(self, most_s: float) -> None:
        """Kill the server while it starts: what it reads, or repairs, it finds again."""
        server = ServerProcess(*self._flags)
        try:
            await asyncio.sleep(self._random.uniform(0, most_s))
        finally:
            server.kill()

    async def last_look(self) -> tuple[CheckResult, int]:
        """Every session there ever was, and one more turn on each; then stop the server: its exit code."""
        async with self._started() as (server, doors, _):
            checked = await self._check([*self._active, *self._retired], doors)
            return checked, await asyncio.to_thread(server.stop)

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[tuple[ServerProcess, ServerClients, float]]:
        server = ServerProcess(*self._flags)
        try:
            served, start_s = await asyncio.to_thread(server.wait_until_served)
            async with connected(served) as doors:
                yield server, doors, start_s
        finally:
            server.kill()

    async def _work(self, place: int, doors: ServerClients) -> None:
        """Turn after turn, until the server is gone."""
        while True:
            agent = self._active[place]
            if agent.num_turns >= self._most_turns:
                self._retired.append(agent)
                agent = self._active[place] = next(self._recruits)
            await agent.turn(doors)

    async def _check(self, agents: Sequence[Agent], doors: ServerClients) -> CheckResult:
        checked = CheckResult()
        places = asyncio.Semaphore(_CHECKED_AT_ONCE)

        async def look(agent: Agent) -> None:
            async with places:
                await self._look(agent, doors, checked)

        await asyncio.gather(*(look(agent) for agent in agents if agent.session_id))
        return checked

    async def _look(self, agent: Agent, doors: ServerClients, checked: CheckResult) -> None:
        """Compare one session with what was acknowledged, then take its next turn."""
        checked.num_sessions += 1
        try:
            found = await agent.compare(doors)
        except UnexpectedResponse as exc:
            checked.num_turns += agent.num_turns
            checked.num_lost += max(1, agent.num_turns)
            self._give_up(agent, f"it cannot be read: {exc}", checked)
            return
        checked.num_turns += found.num_turns
        checked.num_lost += found.num_lost
        checked.num_altered += found.num_altered
        if found.problem:
            self._give_up(agent, found.problem, checked)
            return
        try:
            await agent.turn(doors)
        except HoldfastError as exc:
            checked.num_stuck += 1
            self._give_up(agent, f"its next turn: {exc}", checked)

    def _give_up(self, agent: Agent, problem: str, checked: CheckResult) -> None:
        checked.problems.append(f"session {agent.session_id}: {problem}")
        self._broken.append(agent)
        if agent in self._active:
            self._active[self._active.index(agent)] = next(self._recruits)
        else:
            self._retired.remove(agent)
