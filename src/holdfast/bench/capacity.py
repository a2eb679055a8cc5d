"""How many sessions one server holds, few of them live and the others parked, and what it costs to wake one.

Sessions are woken alternately from the most and the least recently used: the former have a snapshot, the latter only
their tokens.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from holdfast.bench.agents import ServerClients, connected
from holdfast.bench.gates import Gate, all_right, faster, median, none_missing, percentile_at_most, within_budget
from holdfast.bench.machine import MIB, resident_bytes
from holdfast.bench.processes import ProcessFailed, RunningServer, serving
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.config import DEFAULT_MODEL, option
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast_sdk import AsyncSession

How = Literal["live", "snapshot", "recomputed"]
HOWS: tuple[How, ...] = get_args(How)

_CHECKPOINTS = 20
_MAX_FAILED = 10  # turns in a row
_APPENDED = 4
_SESSION_KIB = 64  # tokens, spans and bookkeeping of a session without a slab
_WORKING_MB = 64  # snapshots that are being written or read
_WOKEN = 'holdfast_session_woken_total{how="'


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    sessions: int = option(2000, "sessions to open", least=2)
    tokens: int = option(300, "tokens in each session at the beginning", least=1)
    slabs: int = option(4, "live sessions of the server", least=2)
    snapshot_mb: int = option(2048, "space for snapshots, in memory and on disk together", least=1)
    disk_mb: int = option(1024, "part of the space for snapshots that is on disk")
    reply_tokens: int = option(2, "sampled tokens in each turn", least=1)
    live_every: int = option(4, "sessions to wake for each that gets a second turn while it is live", least=1)
    recent: int = option(512, "window of the server", least=1)
    dtype: str = option("auto", "weights of the server")
    model: str = option(DEFAULT_MODEL, "model that is served")

    def __post_init__(self) -> None:
        if self.disk_mb > self.snapshot_mb:
            raise ConfigError(f"--disk-mb {self.disk_mb} must not exceed --snapshot-mb {self.snapshot_mb}")


def measure(settings: CapacitySettings, results: Results) -> None:
    from holdfast_sdk import HoldfastError as SdkError

    results.step("starting the server")
    with tempfile.TemporaryDirectory(prefix="holdfast-capacity-") as folder:
        sizes = {"sessions": settings.slabs, "recent": settings.recent, "max-pin": 64, "rewind-tokens": 64}
        sizes |= {"snapshot-memory-mb": settings.snapshot_mb - settings.disk_mb, "snapshot-disk-mb": settings.disk_mb}
        sizes |= {"max-parked": settings.sessions}
        flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        with serving(settings.model, *flags, "--dtype", settings.dtype, "--data-dir", folder) as server:
            try:
                asyncio.run(_run(settings, results, server, Path(folder)))
            except SdkError as exc:
                raise ProcessFailed(f"the server answered with an error: {exc.code}: {exc}") from exc


async def _run(settings: CapacitySettings, results: Results, server: RunningServer, folder: Path) -> None:
    async with connected(server) as clients:
        vocabulary = range(100, (await clients.sdk.model_info()).vocabulary_size)
        await _CapacityRun(
            settings=settings, results=results, pid=server.pid, folder=folder, clients=clients, vocabulary=vocabulary
        ).run()


@dataclass(slots=True, kw_only=True)
class _CapacityRun:
    settings: CapacitySettings
    results: Results
    pid: int
    folder: Path
    clients: ServerClients
    vocabulary: range
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    num_done: int = 0
    num_saved: int = 0
    num_failed: int = 0  # in a row

    async def run(self) -> None:
        self.results.step("warming up")
        first = [await self._open() for _ in range(self.settings.slabs)]
        for session in first:
            await self._turn(session)
        self._record_memory("base_rss")
        info = await first[-1].info()
        self.results.figure("slab", "MiB", (info.kv_reserved_bytes or 0) / MIB)
        self.results.figure("snapshot", "MiB", (info.kv_live_bytes or 0) / MIB)
        sessions = first + await self._fill(self.settings.sessions - len(first))
        self._record_disk()
        await self._wake(sessions)
        await self._use_all_slabs(sessions[-self.settings.slabs :])
        self._summarize()

    async def _fill(self, num: int) -> "list[AsyncSession]":
        """Open sessions, a few at a time: a slab in use cannot be taken away."""
        free = asyncio.Semaphore(max(1, self.settings.slabs // 2))

        async def fill() -> "AsyncSession":
            async with free:
                session = await self._open()
                await self._turn(session)
                self._record_memory("rss")
                self._advance(f"opening, {self.num_done} of {num}")
                return session

        started = time.perf_counter()
        sessions = await asyncio.gather(*(fill() for _ in range(num)))
        self.results.figure("opened_per_s", "1/s", num / (time.perf_counter() - started), "higher")
        return sessions

    async def _wake(self, sessions: "Sequence[AsyncSession]") -> None:
        before = await self._num_woken()
        for number, session in enumerate(_from_both_ends(sessions), 1):
            times = await self._turn(session)
            after = await self._num_woken()
            how = next((how for how in ("snapshot", "recomputed") if after[how] > before[how]), "live")
            before = after
            self._record(how, times)
            if number % self.settings.live_every == 0:
                self._record("live", await self._turn(session))
            self._record_memory("rss")
            self._advance(f"waking, {number} of {len(sessions)}")

    async def _use_all_slabs(self, sessions: "Sequence[AsyncSession]") -> None:
        """Turns on all live sessions at the same time."""
        for session in sessions:
            await self._turn(session)
        for _ in range(3):
            found = await asyncio.gather(*(self._turn(session) for session in sessions))
            self.results.extend("active/turn_ms", "ms", [times[0] for times in found if times])

    def _record(self, how: str, times: tuple[float, float] | None) -> None:
        if times is None:
            return
        self.results.extend(f"{how}/turn_ms", "ms", [times[0]])
        self.results.extend(f"{how}/first_token_ms", "ms", [times[1]])

    def _summarize(self) -> None:
        values, figure = self.results.report.values, self.results.figure
        for name in (*(f"{how}/{kind}" for how in HOWS for kind in ("turn_ms", "first_token_ms")), "active/turn_ms"):
            if values(name):
                figure(f"{name}_p50", "ms", median(values(name)), "lower")
        for how in ("snapshot", "recomputed"):
            turns_ms, live_ms = values(f"{how}/turn_ms"), values("live/turn_ms")
            figure(f"{how}/woken", "sessions", len(turns_ms))
            if turns_ms and live_ms:
                figure(f"{how}/wake_ms", "ms", median(turns_ms) - median(live_ms), "lower")
        figure("rss_most", "MiB", max(values("rss")), "lower")

    async def _open(self) -> "AsyncSession":
        tokens = self.chance.choices(self.vocabulary, k=self.settings.tokens)
        return await self.clients.sdk.create_session(token_ids=tokens)

    async def _turn(self, session: "AsyncSession") -> tuple[float, float] | None:
        """The times of a turn; None if it failed, which is counted. Raises if many in a row do: the server is gone."""
        from holdfast_sdk import HoldfastError as SdkError

        try:
            times = await self._timed_turn(session)
        except SdkError as exc:
            self.num_failed += 1
            self.results.count("wrong", True)
            self.results.note(f"a turn failed: {exc.code}: {exc}")
            if self.num_failed == _MAX_FAILED:
                raise
            return None
        self.num_failed = 0
        return times

    async def _timed_turn(self, session: "AsyncSession") -> tuple[float, float]:
        """Milliseconds of the turn and to its first token. Counts a turn with a wrong length as wrong."""
        before = session.history_length or 0
        appended = self.chance.choices(self.vocabulary, k=_APPENDED)
        first_s, started = 0.0, time.perf_counter()
        generation = await session.turn(appended, max_tokens=self.settings.reply_tokens, temperature=1.0, seed=before)
        async for _ in generation:
            first_s = first_s or time.perf_counter() - started
        turn_s = time.perf_counter() - started
        expected = before + _APPENDED + len(generation.tokens)
        is_wrong = not generation.tokens or generation.done.history_length != expected
        self.results.count("wrong", is_wrong)
        return turn_s * 1000, first_s * 1000

    async def _num_woken(self) -> dict[str, float]:
        async with self.clients.http.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = dict.fromkeys(("snapshot", "recomputed"), 0.0)
        for line in lines:
            if line.startswith(_WOKEN):
                how, _, count = line.removeprefix(_WOKEN).partition('"} ')
                found[how] = float(count)
        return found

    def _record_memory(self, name: str) -> None:
        self.results.extend(name, "MiB", [resident_bytes(self.pid) / MIB])

    def _record_disk(self) -> None:
        with os.scandir(self.folder / "snapshots") as files:
            size = sum(file.stat().st_size for file in files)
        self.results.extend("disk", "MiB", [size / MIB])
        self.results.figure("snapshots_on_disk", "MiB", size / MIB)

    def _advance(self, what: str) -> None:
        self.num_done += 1
        self.results.step(what)
        if self.num_done * _CHECKPOINTS // (2 * self.settings.sessions) > self.num_saved:
            self.num_saved += 1
            self.results.on_round()


def _from_both_ends(sessions: "Sequence[AsyncSession]") -> "Iterator[AsyncSession]":
    """The last, the first, the last but one, the second, and so on."""
    for number in range(len(sessions)):
        yield sessions[number // 2] if number % 2 else sessions[-1 - number // 2]


def judge(report: Report) -> list[Gate]:
    wrong = report.values("wrong")
    snapshots, recomputed = report.values("snapshot/turn_ms"), report.values("recomputed/turn_ms")
    num_woken = len(snapshots) + len(recomputed)
    num_parked = report.settings["sessions"] - report.settings["slabs"]
    disk_mb = report.settings["disk_mb"]
    budget_mb = report.settings["snapshot_mb"] - disk_mb
    budget_mb += report.settings["sessions"] * _SESSION_KIB / 1024 + _WORKING_MB
    base = (report.values("base_rss") or [0.0])[0]
    return [
        none_missing("all_parked_sessions_woke", min(num_woken, num_parked), num_parked),
        all_right("every_turn_answered", len(wrong), int(sum(wrong))),
        within_budget("memory_within_budget", report.values("rss"), base, budget_mb, "MiB"),
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
    about="many parked sessions on a few slabs: all of them answer, memory stays within its budget, the cost of waking",
    settings=CapacitySettings,
    quick={"sessions": 24, "tokens": 200, "slabs": 2, "snapshot_mb": 60, "disk_mb": 30, "live_every": 2},
    quick_s=35,
    num_rounds=lambda settings: _CHECKPOINTS,
    needs=lambda settings: ("holdfast_sdk",),
    measure=measure,
    judge=judge,
    charts=charts,
)
