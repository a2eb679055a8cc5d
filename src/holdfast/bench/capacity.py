"""How many sessions one machine holds: few with a slab, many parked. What does it cost to wake one?

Sessions are visited from both ends, those that were used last and those that were used first in turns: the former have
a snapshot, the latter only their tokens.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from holdfast.bench.agents import ServerClients, connected
from holdfast.bench.gates import Gate, all_right, faster, none_missing, percentile_at_most, within_budget
from holdfast.bench.page import Chart
from holdfast.bench.processes import resident_bytes
from holdfast.bench.report import Report
from holdfast.bench.results import Results
from holdfast.bench.runner import Scenario
from holdfast.bench.server_process import ServerAddress, serving
from holdfast.bench.summary import median
from holdfast.config import DEFAULT_MODEL, option
from holdfast.errors import ConfigError
from holdfast.serving.grpc.gen import runtime_pb2 as pb

How = Literal["live", "snapshot", "recomputed"]
HOWS: tuple[How, ...] = get_args(How)

_MIB = 1 << 20
_CHECKPOINTS = 20
_GIVEN = 4
_SESSION_KIB = 64  # tokens, spans and bookkeeping of a session without a slab
_WORKING_MB = 64  # snapshots on their way
_WOKEN = 'holdfast_session_woken_total{how="'


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    sessions: int = option(2000, "sessions", least=2)
    tokens: int = option(300, "tokens in each at the beginning", least=1)
    slabs: int = option(4, "slabs of the server", least=2)
    snapshot_mb: int = option(2048, "for snapshots, in memory and on disk", least=1)
    disk_mb: int = option(1024, "how much of it is on disk")
    reply_tokens: int = option(2, "sampled tokens in each turn", least=1)
    live_every: int = option(4, "sessions woken for each that has a second turn, live by then", least=1)
    recent: int = option(512, "window of the server", least=1)
    dtype: str = option("auto", "its weights")
    model: str = option(DEFAULT_MODEL, "what is served")

    def __post_init__(self) -> None:
        if self.disk_mb > self.snapshot_mb:
            raise ConfigError(f"of {self.snapshot_mb} MB for snapshots no {self.disk_mb} can be on disk")

    @property
    def memory_mb(self) -> int:
        return self.snapshot_mb - self.disk_mb


def measure(settings: CapacitySettings, results: Results) -> None:
    results.step("starting the server")
    with tempfile.TemporaryDirectory(prefix="holdfast-capacity-") as folder:
        sizes = {"sessions": settings.slabs, "recent": settings.recent, "max-pin": 64, "rewind-tokens": 64}
        sizes |= {"snapshot-memory-mb": settings.memory_mb, "snapshot-disk-mb": settings.disk_mb}
        sizes |= {"max-parked": settings.sessions}
        flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        with serving(settings.model, *flags, "--dtype", settings.dtype, "--data-dir", folder) as served:
            asyncio.run(_run(settings, results, served, Path(folder)))


async def _run(settings: CapacitySettings, results: Results, served: ServerAddress, folder: Path) -> None:
    async with connected(served) as doors:
        model = await doors.stub.GetModelInfo(pb.GetModelInfoRequest())
        await _CapacityRun(settings, results, doors, _Watched(served.pid, folder), model.vocabulary_size).run()


@dataclass(frozen=True, slots=True)
class _Watched:
    """The server from outside: its process and what it keeps."""

    pid: int
    folder: Path


@dataclass(slots=True)
class _FilledSession:
    id: str
    length: int


class _CapacityRun:
    def __init__(
        self, settings: CapacitySettings, results: Results, doors: ServerClients, watched: "_Watched", vocab_size: int
    ) -> None:
        self._settings = settings
        self._results = results
        self._doors = doors
        self._watched = watched
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._num_done = self._num_saved = 0

    async def run(self) -> None:
        self._results.step("warming up")
        first = [await self._open() for _ in range(self._settings.slabs)]
        for session in first:
            await self._turn(session)
        self._watch("base_rss")
        info = await self._info(first[-1])
        self._results.figure("slab", "MiB", info.kv_reserved_bytes / _MIB)
        self._results.figure("snapshot", "MiB", info.kv_live_bytes / _MIB)
        sessions = first + await self._fill(self._settings.sessions - len(first))
        self._watch_disk()
        await self._wake(sessions)
        await self._all_slabs(sessions[-self._settings.slabs :])
        self._sum_up()

    async def _fill(self, num: int) -> list[_FilledSession]:
        """Some at a time: a slab that is at work cannot be had."""
        free = asyncio.Semaphore(max(1, self._settings.slabs // 2))

        async def fill() -> _FilledSession:
            async with free:
                session = await self._open()
                await self._turn(session)
                self._watch("rss")
                self._advance(f"opening, {self._num_done} of {num}")
                return session

        started = time.perf_counter()
        sessions = await asyncio.gather(*(fill() for _ in range(num)))
        seconds = time.perf_counter() - started
        self._results.figure("opened_per_s", "1/s", num / seconds, "higher")
        return sessions

    async def _wake(self, sessions: Sequence[_FilledSession]) -> None:
        before = await self._woken()
        for number, session in enumerate(_from_both_ends(sessions), 1):
            took = await self._turn(session)
            after = await self._woken()
            how = next((how for how in ("snapshot", "recomputed") if after[how] > before[how]), "live")
            before = after
            self._record(how, took)
            if number % self._settings.live_every == 0:
                self._record("live", await self._turn(session))
            self._watch("rss")
            self._advance(f"waking, {number} of {len(sessions)}")

    async def _all_slabs(self, sessions: Sequence[_FilledSession]) -> None:
        """All of them at work at once."""
        for session in sessions:
            await self._turn(session)
        for _ in range(3):
            took = await asyncio.gather(*(self._turn(session) for session in sessions))
            self._results.extend("active/turn_ms", "ms", [turn_ms for turn_ms, _ in took])

    def _record(self, how: str, took: tuple[float, float]) -> None:
        self._results.extend(f"{how}/turn_ms", "ms", [took[0]])
        self._results.extend(f"{how}/first_token_ms", "ms", [took[1]])

    def _sum_up(self) -> None:
        for name in (*(f"{how}/{kind}" for how in HOWS for kind in ("turn_ms", "first_token_ms")), "active/turn_ms"):
            if values := self._results.report.values(name):
                self._results.figure(f"{name}_p50", "ms", median(values), "lower")
        for how in ("snapshot", "recomputed"):
            num = len(self._results.report.values(f"{how}/turn_ms"))
            self._results.figure(f"{how}/woken", "sessions", num)
            if num and (live := self._results.report.values("live/turn_ms")):
                own = median(self._results.report.values(f"{how}/turn_ms")) - median(live)
                self._results.figure(f"{how}/wake_ms", "ms", own, "lower")
        rss = self._results.report.values("rss")
        self._results.figure("rss_most", "MiB", max(rss), "lower")

    async def _open(self) -> _FilledSession:
        tokens = self._random.choices(range(100, self._vocab_size), k=self._settings.tokens)
        made = await self._doors.stub.CreateSession(pb.CreateSessionRequest(token_ids=tokens))
        return _FilledSession(made.session_id, made.history_length)

    async def _turn(self, session: _FilledSession) -> tuple[float, float]:
        """Milliseconds of the turn, and to its first token. What is not answered as it should is counted."""
        given = self._random.choices(range(100, self._vocab_size), k=_GIVEN)
        options = pb.SamplingOptions(temperature=1.0, seed=session.length)
        request = pb.TurnRequest(
            session_id=session.id, token_ids=given, max_tokens=self._settings.reply_tokens, sampling=options
        )
        first_s, num_tokens, length, started = 0.0, 0, 0, time.perf_counter()
        async for event in self._doors.stub.Turn(request):
            if event.HasField("token"):
                first_s = first_s or time.perf_counter() - started
                num_tokens += 1
            elif event.HasField("done"):
                length = event.done.history_length
        turn_s = time.perf_counter() - started
        session.length += _GIVEN + num_tokens
        self._results.extend("wrong", "", [float(not num_tokens or length != session.length)])
        return turn_s * 1000, first_s * 1000

    async def _info(self, session: _FilledSession) -> Any:
        return await self._doors.stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session.id))

    async def _woken(self) -> dict[str, float]:
        async with self._doors.http.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = dict.fromkeys(("snapshot", "recomputed"), 0.0)
        for line in lines:
            if line.startswith(_WOKEN):
                how, _, count = line.removeprefix(_WOKEN).partition('"} ')
                found[how] = float(count)
        return found

    def _watch(self, name: str) -> None:
        self._results.extend(name, "MiB", [resident_bytes(self._watched.pid) / _MIB])

    def _watch_disk(self) -> None:
        with os.scandir(self._watched.folder / "snapshots") as files:
            size = sum(file.stat().st_size for file in files)
        self._results.extend("disk", "MiB", [size / _MIB])
        self._results.figure("snapshots_on_disk", "MiB", size / _MIB)

    def _advance(self, what: str) -> None:
        self._num_done += 1
        self._results.step(what)
        if self._num_done * _CHECKPOINTS // (2 * self._settings.sessions) > self._num_saved:
            self._num_saved += 1
            self._results.on_round()


def _from_both_ends(sessions: Sequence[_FilledSession]) -> Iterator[_FilledSession]:
    """The last, the first, the last but one, the second, and so on."""
    for number in range(len(sessions)):
        yield sessions[number // 2] if number % 2 else sessions[-1 - number // 2]


def judge(report: Report) -> list[Gate]:
    wrong = report.values("wrong")
    woken = sum(len(report.values(f"{how}/turn_ms")) for how in ("snapshot", "recomputed"))
    num_parked = report.settings["sessions"] - report.settings["slabs"]
    disk_mb = report.settings["disk_mb"]
    memory_mb = report.settings["snapshot_mb"] - disk_mb
    own_mb = report.settings["sessions"] * _SESSION_KIB / 1024 + _WORKING_MB
    base = (report.values("base_rss") or [0.0])[0]
    snapshots, recomputed = report.values("snapshot/turn_ms"), report.values("recomputed/turn_ms")
    return [
        none_missing("all_parked_sessions_woke", min(woken, num_parked), num_parked),
        all_right("every_turn_answered", len(wrong), int(sum(wrong))),
        within_budget("memory_within_budget", report.values("rss"), base, memory_mb + own_mb, "MiB"),
        faster("a_snapshot_wakes_faster", snapshots, recomputed),
        *([percentile_at_most("disk_within_budget", report.values("disk"), 100, disk_mb, "MiB")] if disk_mb else []),
    ]


def charts(settings: CapacitySettings) -> list[Chart]:
    return [
        Chart("a turn on a session", "distribution", tuple(f"{how}/turn_ms" for how in HOWS), "ms", is_log=True),
        Chart("memory of the server", "course", ("rss",), "MiB"),
        Chart("what waking adds to a turn", "bars", ("snapshot/wake_ms", "recomputed/wake_ms"), "ms"),
    ]


SCENARIO = Scenario(
    name="capacity",
    about="many parked sessions on a few slabs: all answer, memory stays within its budget, and what waking costs",
    settings=CapacitySettings,
    quick={"sessions": 24, "tokens": 200, "slabs": 2, "snapshot_mb": 60, "disk_mb": 30, "live_every": 2},
    num_rounds=lambda settings: _CHECKPOINTS,
    measure=measure,
    judge=judge,
    charts=charts,
)
