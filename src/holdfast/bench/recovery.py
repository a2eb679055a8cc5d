"""Kills the server under load and restarts it: is every acknowledged turn on record, as the client received it?

First in front of an upstream that replies at once, then on the embedded engine; chats over HTTP and tokens over gRPC.
"""

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.bench.agents import Agent, ChatAgent, ServerClients, ServerGone, TokenAgent, UnexpectedResponse, connected
from holdfast.bench.gates import Gate, all_right, none_missing, under_load
from holdfast.bench.processes import ServerProcess, started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.config import DEFAULT_MODEL, option
from holdfast.errors import HoldfastError

Part = Literal["canned", "embedded"]
PARTS: tuple[Part, ...] = get_args(Part)

_DELAY_S = 0.001  # of the upstream, for each token
_INTERRUPTED_EVERY = 10  # kills after which the next start is killed too
_SLOWER = 4  # on the embedded engine a life lasts this many times as long, and sessions have fewer turns
_MAX_KILLS = 2  # for each required one: a kill without a turn in flight does not count
_CHECKED_RETIRED = 3  # sessions of retired agents that are checked after each restart
_CONCURRENT_CHECKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    kills: int = option(200, "kills in front of an upstream")
    embedded_kills: int = option(20, "kills on the embedded engine")
    chats: int = option(6, "concurrent chat sessions over HTTP", least=1)
    token_sessions: int = option(3, "concurrent sessions of raw tokens over gRPC", least=1)
    turns: int = option(30, f"turns of a session before a new one replaces it; embedded: 1/{_SLOWER} of it", least=1)
    least_s: float = option(0.05, "shortest time under load before a kill", least=0)
    most_s: float = option(0.8, f"longest time under load; embedded: {_SLOWER} times as long", least=0)
    reply_tokens: int = option(6, "sampled tokens in each reply", least=1)
    seed: int = option(0, "seed of the times of the kills and of the messages")
    model: str = option(DEFAULT_MODEL, "model that is served")

    def num_kills(self, part: Part) -> int:
        return self.kills if part == "canned" else self.embedded_kills


def measure(settings: RecoverySettings, results: Results) -> None:
    for part in PARTS:
        if settings.num_kills(part):
            with tempfile.TemporaryDirectory(prefix="holdfast-recovery-") as folder, _flags(part, settings) as flags:
                crew = Crew(
                    lambda number: make_agent(settings, number),
                    size=settings.chats + settings.token_sessions,
                    max_turns=settings.turns if part == "canned" else max(1, settings.turns // _SLOWER),
                    flags=[*flags, "--data-dir", folder],
                    seed=settings.seed,
                )
                asyncio.run(Trial(part, settings, results, crew).run())


@contextlib.contextmanager
def _flags(part: Part, settings: RecoverySettings) -> Iterator[list[str]]:
    """Flags of a server, and the upstream that they name for as long as the context lasts."""
    if part == "embedded":
        # Few slabs and hardly any memory for snapshots: sessions are being parked to disk at a kill.
        slabs = settings.chats + settings.token_sessions
        sizes = ["--sessions", str(slabs), "--recent", "256", "--max-pin", "64", "--rewind-tokens", "256"]
        yield [settings.model, *sizes, "--snapshot-memory-mb", "1"]
        return
    with started("upstreams", "prompted", str(_DELAY_S)) as upstream:
        yield [settings.model, "--backend", "sglang", "--upstream", upstream.read(str)]


def make_agent(settings: RecoverySettings, number: int) -> Agent[Any]:
    is_chat = number % (settings.chats + settings.token_sessions) < settings.chats
    kind = ChatAgent if is_chat else TokenAgent
    return kind(reply_tokens=settings.reply_tokens, seed=settings.seed * 1_000_003 + number)


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """What checking sessions found. `num_stuck`: sessions whose next turn failed."""

    num_sessions: int = 0
    num_turns: int = 0
    num_lost: int = 0
    num_altered: int = 0
    num_stuck: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The server from one start to the next kill. `in_flight`: turns at the kill; `refused`: errors under load."""

    start_s: float
    num_turns: int
    in_flight: int
    check: CheckResult
    refused: tuple[str, ...]


class Crew:
    """Agents, and the servers that they use one after the other.

    `make_agent` makes the agent with a number. One that has had `max_turns` retires; its session stays.
    """

    def __init__(
        self, make_agent: Callable[[int], Agent[Any]], *, size: int, max_turns: int, flags: Sequence[str], seed: int
    ) -> None:
        self._new_agents = map(make_agent, itertools.count())
        self._active = [next(self._new_agents) for _ in range(size)]
        self._retired: list[Agent[Any]] = []
        self._broken: list[Agent[Any]] = []  # so that a problem is counted once
        self._max_turns = max_turns
        self._flags = flags
        self._random = random.Random(seed)

    @property
    def num_turns(self) -> int:
        """All turns that were acknowledged so far."""
        return sum(agent.num_turns for agent in (*self._active, *self._retired, *self._broken))

    async def live(self, least_s: float, most_s: float) -> Life:
        """Start the server, check its sessions, put it under load, and kill it after a time between the two."""
        async with self._started() as (server, clients, start_s):
            some = self._random.sample(self._retired, min(len(self._retired), _CHECKED_RETIRED))
            check = await self._check([*self._active, *some], clients)
            before = self.num_turns
            working = [asyncio.ensure_future(self._work(place, clients)) for place in range(len(self._active))]
            try:
                await asyncio.sleep(self._random.uniform(least_s, most_s))
                in_flight = sum(agent.is_waiting for agent in self._active)
                ended_early = [task.done() for task in working]
                server.kill()
                ends = await asyncio.gather(*working, return_exceptions=True)
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
        pairs = zip(ends, ended_early, strict=True)
        refused = [str(end) for end, is_early in pairs if is_early or not isinstance(end, ServerGone)]
        num_turns = self.num_turns - before
        return Life(start_s=start_s, num_turns=num_turns, in_flight=in_flight, check=check, refused=tuple(refused))

    async def die_at_start(self, most_s: float) -> None:
        """Kill the server while it starts, perhaps while it reads or repairs its data."""
        server = ServerProcess(*self._flags)
        try:
            await asyncio.sleep(self._random.uniform(0, most_s))
        finally:
            server.kill()

    async def check_all(self) -> tuple[CheckResult, int]:
        """Check every session there ever was and have one more turn on each; also the exit code of the server."""
        async with self._started() as (server, clients, _):
            check = await self._check([*self._active, *self._retired], clients)
            return check, await asyncio.to_thread(server.stop)

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[tuple[ServerProcess, ServerClients, float]]:
        server = ServerProcess(*self._flags)
        try:
            running, start_s = await asyncio.to_thread(server.wait_until_served)
            async with connected(running) as clients:
                yield server, clients, start_s
        finally:
            server.kill()

    async def _work(self, place: int, clients: ServerClients) -> None:
        """Turn after turn until the server is gone."""
        while True:
            agent = self._active[place]
            if agent.num_turns >= self._max_turns:
                self._retired.append(agent)
                agent = self._active[place] = next(self._new_agents)
            await agent.turn(clients)

    async def _check(self, agents: Sequence[Agent[Any]], clients: ServerClients) -> CheckResult:
        result = CheckResult()
        free = asyncio.Semaphore(_CONCURRENT_CHECKS)

        async def check(agent: Agent[Any]) -> None:
            async with free:
                await self._check_agent(agent, clients, result)

        await asyncio.gather(*(check(agent) for agent in agents if agent.session_id))
        return result

    async def _check_agent(self, agent: Agent[Any], clients: ServerClients, result: CheckResult) -> None:
        """Compare one session with what was acknowledged, then have its next turn."""
        result.num_sessions += 1
        try:
            found = await agent.compare(clients)
        except UnexpectedResponse as exc:
            result.num_turns += agent.num_turns
            result.num_lost += max(1, agent.num_turns)
            self._give_up(agent, f"cannot be read: {exc}", result)
            return
        result.num_turns += found.num_turns
        result.num_lost += found.num_lost
        result.num_altered += found.num_altered
        if found.problem:
            self._give_up(agent, found.problem, result)
            return
        try:
            await agent.turn(clients)
        except HoldfastError as exc:
            result.num_stuck += 1
            self._give_up(agent, f"next turn failed: {exc}", result)

    def _give_up(self, agent: Agent[Any], problem: str, result: CheckResult) -> None:
        result.problems.append(f"session {agent.session_id}: {problem}")
        self._broken.append(agent)
        if agent in self._active:
            self._active[self._active.index(agent)] = next(self._new_agents)
        else:
            self._retired.remove(agent)


class Trial:
    """One part of the bench: kill the server until enough kills met turns in flight, then check every session."""

    def __init__(self, part: Part, settings: RecoverySettings, results: Results, crew: Crew) -> None:
        self._part = part
        self._settings = settings
        self._results = results
        self._crew = crew
        self._start_s = 0.0

    async def run(self) -> None:
        num_required, num_loaded, num_tried = self._settings.num_kills(self._part), 0, 0
        while num_loaded < num_required and num_tried < _MAX_KILLS * num_required:
            num_tried += 1
            step = f"{self._part}, kill {num_loaded + 1} of {num_required}, {self._crew.num_turns} turns"
            self._results.step(step)
            if await self._kill():
                num_loaded += 1
                self._results.on_round()
            if num_tried % _INTERRUPTED_EVERY == 0:
                await self._crew.die_at_start(self._start_s)
                self._count("interrupted_starts", 1)
        self._results.step(f"{self._part}, checking all sessions")
        before = self._crew.num_turns
        check, code = await self._crew.check_all()
        self._record(check)
        self._count("compared_at_the_end", check.num_turns)
        self._count("acknowledged_at_the_end", before)
        self._count("exit_codes", code)
        self._results.figure(f"{self._part}/sessions", "", check.num_sessions)
        self._results.figure(f"{self._part}/acknowledged_turns", "", before)

    async def _kill(self) -> bool:
        """One life of the server. Whether turns were in flight at its end."""
        factor = 1 if self._part == "canned" else _SLOWER
        life = await self._crew.live(self._settings.least_s * factor, self._settings.most_s * factor)
        self._start_s = life.start_s
        self._results.figure(f"{self._part}/restart_s", "s", life.start_s, "lower")
        self._results.figure(f"{self._part}/turns_per_life", "", life.num_turns)
        self._results.figure(f"{self._part}/in_flight_at_kill", "", life.in_flight)
        self._record(life.check, *life.refused)
        self._count("refused", len(life.refused))
        return life.in_flight > 0

    def _record(self, check: CheckResult, *problems: str) -> None:
        self._count("compared", check.num_turns)
        self._count("lost", check.num_lost)
        self._count("altered", check.num_altered)
        self._count("continued", check.num_sessions)
        self._count("stuck", check.num_stuck)
        for problem in (*check.problems, *problems):
            self._results.note(f"{self._part}: {problem}")

    def _count(self, name: str, value: int) -> None:
        self._results.count(f"{self._part}/{name}", value)


def judge(report: Report) -> list[Gate]:
    num_kills: dict[Part, int] = {"canned": report.settings["kills"], "embedded": report.settings["embedded_kills"]}
    return [gate for part in PARTS if num_kills[part] for gate in _judge(report, part, num_kills[part])]


def _judge(report: Report, part: Part, num_kills: int) -> list[Gate]:
    def total(name: str) -> int:
        return report.total(f"{part}/{name}")

    codes = report.values(f"{part}/exit_codes")
    return [
        under_load(f"{part}/killed_under_load", report.values(f"{part}/in_flight_at_kill"), num_kills),
        all_right(f"{part}/nothing_lost", total("compared"), total("lost")),
        all_right(f"{part}/nothing_altered", total("compared"), total("altered")),
        none_missing(f"{part}/all_compared_at_the_end", total("compared_at_the_end"), total("acknowledged_at_the_end")),
        all_right(f"{part}/every_session_goes_on", total("continued"), total("stuck") + total("refused")),
        all_right(f"{part}/stops_cleanly_at_the_end", len(codes), sum(map(bool, codes))),
    ]


def charts(settings: RecoverySettings) -> list[Chart]:
    def by_kill(title: str, name: str, label: str) -> Chart:
        return Chart(title, "course", tuple(f"{part}/{name}" for part in PARTS), label)

    return [
        by_kill("time to serve again after each kill", "restart_s", "s"),
        by_kill("turns acknowledged between two kills", "turns_per_life", "turns"),
        by_kill("turns in flight at the kill", "in_flight_at_kill", "turns"),
    ]


SCENARIO = Scenario(
    name="recovery",
    about="kill -9 under load over HTTP and gRPC, again and again: no acknowledged turn is lost or altered",
    settings=RecoverySettings,
    quick={"kills": 3, "embedded_kills": 1, "turns": 8},
    quick_s=45,
    num_rounds=lambda settings: settings.kills + settings.embedded_kills,
    needs=lambda settings: ("holdfast_sdk",),
    measure=measure,
    judge=judge,
    charts=charts,
)
