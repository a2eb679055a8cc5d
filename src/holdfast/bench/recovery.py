"""Kill the server in the middle of load, start it again: is every acknowledged turn there, as the client got it?

First in front of an upstream whose replies are ready at once, then on the embedded engine. Both doors are at work.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.bench.agents import Agent, ChatAgent, TokenAgent
from holdfast.bench.crew import CheckResult, Crew
from holdfast.bench.gates import Gate, all_right, none_missing, under_load
from holdfast.bench.page import Chart
from holdfast.bench.processes import started
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.config import DEFAULT_MODEL, option

Part = Literal["canned", "embedded"]
PARTS: tuple[Part, ...] = get_args(Part)

_START_S = 120.0
_DELAY_S = 0.001  # of the upstream, for each token
_INTERRUPTED_EVERY = 10  # kills after which one start is interrupted too
_SLOWER = 4  # lives are so much longer on the embedded engine, and sessions shorter
_FRUITLESS = 2  # kills for each that is wanted, before those without load are too many


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    kills: int = option(200, "kills in front of a canned upstream")
    embedded_kills: int = option(20, "kills on the embedded engine")
    chats: int = option(6, "chat sessions over HTTP at a time", least=1)
    token_sessions: int = option(3, "sessions of raw tokens over gRPC at a time", least=1)
    turns: int = option(30, f"turns of a session before another takes its place; embedded: 1/{_SLOWER}", least=1)
    least_s: float = option(0.05, "shortest time under load before a kill", least=0)
    most_s: float = option(0.8, f"longest; on the embedded engine {_SLOWER} times as long", least=0)
    reply_tokens: int = option(6, "sampled tokens in each reply", least=1)
    seed: int = option(0, "of the moments at which it is killed, and of what is said")
    model: str = option(DEFAULT_MODEL, "what is served")

    def wanted(self, part: Part) -> int:
        return self.kills if part == "canned" else self.embedded_kills


def measure(settings: RecoverySettings, results: Results) -> None:
    for part in PARTS:
        if settings.wanted(part):
            with tempfile.TemporaryDirectory(prefix="holdfast-recovery-") as folder, _flags(part, settings) as flags:
                crew = Crew(
                    lambda number: recruited(settings, number),
                    size=settings.chats + settings.token_sessions,
                    most_turns=settings.turns if part == "canned" else max(1, settings.turns // _SLOWER),
                    flags=[*flags, "--data-dir", folder],
                    seed=settings.seed,
                )
                asyncio.run(Trial(part, settings, results, crew).run())


@contextlib.contextmanager
def _flags(part: Part, settings: RecoverySettings) -> Iterator[list[str]]:
    """Of a server, and for as long as they are good."""
    if part == "embedded":
        # Few slabs and hardly any memory for snapshots: sessions are parked to disk while it is killed.
        slabs = settings.chats + settings.token_sessions
        sizes = ["--sessions", str(slabs), "--recent", "256", "--max-pin", "64", "--rewind-tokens", "256"]
        yield [settings.model, *sizes, "--snapshot-memory-mb", "1"]
        return
    with started("prompted_upstream", str(_DELAY_S)) as upstream:
        yield [settings.model, "--backend", "sglang", "--upstream", upstream.read(str, timeout_s=_START_S)]


def recruited(settings: RecoverySettings, number: int) -> Agent:
    is_chat = number % (settings.chats + settings.token_sessions) < settings.chats
    kind = ChatAgent if is_chat else TokenAgent
    return kind(reply_tokens=settings.reply_tokens, seed=settings.seed * 1_000_003 + number)


class Trial:
    """One part: kill until enough kills met turns in flight, then look at everything once more."""

    def __init__(self, part: Part, settings: RecoverySettings, results: Results, crew: Crew) -> None:
        self._part = part
        self._settings = settings
        self._results = results
        self._crew = crew
        self._start_s = 0.0

    async def run(self) -> None:
        wanted, num_loaded, num_tried = self._settings.wanted(self._part), 0, 0
        while num_loaded < wanted and num_tried < _FRUITLESS * wanted:
            num_tried += 1
            self._results.step(f"{self._part}, kill {num_loaded + 1} of {wanted}, {self._crew.num_turns} turns")
            is_loaded = await self._kill()
            if is_loaded:
                num_loaded += 1
                self._results.on_round()
            if num_tried % _INTERRUPTED_EVERY == 0:
                await self._crew.die_at_start(self._start_s)
                self._results.extend(f"{self._part}/interrupted_starts", "", [1.0])
        self._results.step(f"{self._part}, all sessions once more")
        before = self._crew.num_turns
        checked, code = await self._crew.last_look()
        self._note(checked)
        self._extend("compared_at_the_end", [checked.num_turns])
        self._extend("acknowledged_at_the_end", [before])
        self._extend("exit_codes", [code])
        self._results.figure(f"{self._part}/sessions", "", checked.num_sessions)
        self._results.figure(f"{self._part}/acknowledged_turns", "", before)

    async def _kill(self) -> bool:
        """One life. Whether turns were in flight at its end."""
        factor = 1 if self._part == "canned" else _SLOWER
        life = await self._crew.live(self._settings.least_s * factor, self._settings.most_s * factor)
        self._start_s = life.start_s
        self._results.figure(f"{self._part}/restart_s", "s", life.start_s, "lower")
        self._results.figure(f"{self._part}/turns_per_life", "", life.num_turns)
        self._results.figure(f"{self._part}/in_flight_at_kill", "", life.in_flight)
        self._note(life.checked, *life.refused)
        self._extend("refused", [len(life.refused)])
        return life.in_flight > 0

    def _note(self, checked: CheckResult, *problems: str) -> None:
        self._extend("compared", [checked.num_turns])
        self._extend("lost", [checked.num_lost])
        self._extend("altered", [checked.num_altered])
        self._extend("continued", [checked.num_sessions])
        self._extend("stuck", [checked.num_stuck])
        self._results.report.notes += [f"{self._part}: {problem}" for problem in (*checked.problems, *problems)]

    def _extend(self, name: str, values: list[int]) -> None:
        self._results.extend(f"{self._part}/{name}", "", values)


def judge(report: Report) -> list[Gate]:
    wanted: dict[Part, int] = {"canned": report.settings["kills"], "embedded": report.settings["embedded_kills"]}
    return [gate for part in PARTS if wanted[part] for gate in _judge(report, part, wanted[part])]


def _judge(report: Report, part: Part, wanted: int) -> list[Gate]:
    def total(name: str) -> int:
        return int(sum(report.values(f"{part}/{name}")))

    codes = report.values(f"{part}/exit_codes")
    return [
        under_load(f"{part}/killed_under_load", report.values(f"{part}/in_flight_at_kill"), wanted),
        all_right(f"{part}/nothing_lost", total("compared"), total("lost")),
        all_right(f"{part}/nothing_altered", total("compared"), total("altered")),
        none_missing(f"{part}/all_compared_at_the_end", total("compared_at_the_end"), total("acknowledged_at_the_end")),
        all_right(f"{part}/every_session_goes_on", total("continued"), total("stuck") + total("refused")),
        all_right(f"{part}/stops_cleanly_at_the_end", len(codes), sum(map(bool, codes))),
    ]


def charts(settings: RecoverySettings) -> list[Chart]:
    return [
        Chart("seconds until it serves again, by kill", "course", tuple(f"{part}/restart_s" for part in PARTS), "s"),
        Chart(
            "turns acknowledged between two kills", "course", tuple(f"{part}/turns_per_life" for part in PARTS), "turns"
        ),
        Chart("turns in flight at the kill", "course", tuple(f"{part}/in_flight_at_kill" for part in PARTS), "turns"),
    ]


SCENARIO = Scenario(
    name="recovery",
    about="kill -9 in the middle of load on both doors, again and again: nothing acknowledged is lost or altered",
    settings=RecoverySettings,
    quick={"kills": 3, "embedded_kills": 1, "turns": 8},
    num_rounds=lambda settings: settings.kills + settings.embedded_kills,
    measure=measure,
    judge=judge,
    charts=charts,
)
