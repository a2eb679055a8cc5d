"""How quickly a server starts on a journal of many sessions at rest, and answers the first turn of one of them.

One session is made by a server in front of an upstream that replies at once, and its record is written to the journal
as often as there are sessions. Servers then start on few and on many of them: none of the figures may depend on that.
"""

import contextlib
import hashlib
import http.client
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.bench.cluster.postgres import PostgresProcess
from holdfast.bench.gates import Gate, all_right, median, median_at_most, percentile_at_most, within_budget
from holdfast.bench.machine import MIB, cpu_s_of, resident_bytes
from holdfast.bench.processes import ProcessFailed, RunningServer, ServerProcess, obey, run_helper, started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.upstreams import TEXT, Script
from holdfast.config import DEFAULT_MODEL, option
from holdfast.sessions.journal.base import (
    Entry,
    Journal,
    SessionRested,
    SessionSummary,
    StoredSession,
    TurnRecorded,
    num_bytes,
    with_bodies,
)
from holdfast.sessions.journal.copying import every_session
from holdfast.sessions.journal.places import existing, is_database, joined
from holdfast.sessions.record import TurnRecord

_WRITE_BYTES = 4 * 2**20  # in one commit
_CHECKED = 3  # sessions after each start whose whole record is read
_START_TIMES = 1.2  # the CPU time of a start, compared with that on an empty journal
_MEMORY_MIB = 32  # by which a server may grow with the journal
_TIMEOUT_S = 60.0
_FILL_S = 3600.0
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingSettings:
    sessions: int = option(20_000, "sessions at rest", least=1)
    few: int = option(2_000, "sessions at rest that the figures are compared with", least=1)
    turns: int = option(50, "turns of each session", least=1)
    tokens: int = option(16, "sampled tokens in each reply", least=1)
    starts: int = option(3, "starts of the server on each number of sessions", least=1)
    asked: int = option(100, "random sessions that get a turn after each start", least=1)
    fillers: int = option(1, "processes that write the sessions to a PostgreSQL database", least=1)
    journal: str = option("", "URL of an empty PostgreSQL database; own: one of the bench's; empty: SQLite")
    model: str = option(DEFAULT_MODEL, "model that provides the tokenizer and the chat template")


def measure(settings: RestingSettings, results: Results) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-resting-"))
        script = Script(settings.tokens)
        upstream = stack.enter_context(started("upstreams", "canned", script))
        url = upstream.read(str)
        journal = settings.journal
        if journal == "own":
            journal = stack.enter_context(PostgresProcess()).url()
        place = ["--journal", journal] if journal else ["--data-dir", folder]
        run = _RestingRun(
            settings,
            results,
            place=journal or folder,
            flags=(settings.model, "--backend", "sglang", "--upstream", url, *place),
            script=script,
        )
        results.step("a session")
        run.measure_upstream(url.removeprefix("http://"))
        run.make_first()
        results.on_round()
        for name, number in (("few", settings.few), ("many", settings.sessions)):
            results.step(f"filling up to {number:,} sessions")
            run.fill(number)
            results.on_round()
            for index in range(settings.starts):
                results.step(f"start {index + 1} on {number:,} sessions")
                run.measure_start(name)
                results.on_round()


class _RestingRun:
    def __init__(
        self, settings: RestingSettings, results: Results, *, place: str, flags: tuple[str, ...], script: Script
    ) -> None:
        self._settings = settings
        self._results = results
        self._place = place
        self._flags = flags
        self._reply = script.reply()
        self._fresh: list[bool] = []  # by the number of the copy: has it had no turn since it was written?
        self._chance = random.Random(0)

    def measure_upstream(self, address: str) -> None:
        """What a turn takes without a server in between."""
        with _connected(address) as client:
            times = [_timed(client, _CHAT, self._body(self._settings.turns))[0] for _ in range(self._settings.asked)]
        self._results.extend("upstream/turn_ms", "ms", times)

    def make_first(self) -> None:
        """The session of which the others are copies."""
        with self._serving("none") as client:
            session_id = _asked(client, "POST", "/sessions")["session_id"]
            for turn in range(self._settings.turns):
                self._turn(client, session_id, turn)

    def fill(self, number: int) -> None:
        """Write copies until there are so many sessions."""
        began = time.perf_counter()
        first, num = len(self._fresh), self._settings.fillers if is_database(self._place) else 1
        bounds = [first + (number - first) * index // num for index in range(num + 1)]
        with contextlib.ExitStack() as stack:
            fillers = [
                stack.enter_context(started("resting", self._place, *pair)) for pair in itertools.pairwise(bounds)
            ]
            for filler in fillers:
                filler.read(str, timeout_s=_FILL_S)
        num_turns = (number - first) * self._settings.turns
        self._results.figure("filled_turns_per_s", "1/s", num_turns / (time.perf_counter() - began), "higher")
        self._fresh += [True] * (number - first)

    def measure_start(self, name: str) -> None:
        """Start the server, let random sessions have a turn, then another, and stop it."""
        base_ms = median(self._results.report.values("upstream/turn_ms"))
        with self._serving(name) as client:
            fresh = [index for index, is_fresh in enumerate(self._fresh) if is_fresh]
            indexes = self._chance.sample(fresh, min(self._settings.asked, len(fresh)))
            chosen = [_id_of(index) for index in indexes]
            for which, turn in (("first", self._settings.turns), ("second", self._settings.turns + 1)):
                times = [self._turn(client, session_id, turn) - base_ms for session_id in chosen]
                self._results.extend(f"{name}/{which}_turn_added_ms", "ms", times)
                self._results.figure(f"{name}/{which}_turn_added_p50", "ms", median(times), "lower")
            for session_id in chosen[:_CHECKED]:
                self._results.count("records_wrong", not self._is_right(client, session_id))
            for index in indexes:
                self._fresh[index] = False

    @contextlib.contextmanager
    def _serving(self, name: str) -> Iterator[http.client.HTTPConnection]:
        server = ServerProcess(*self._flags)
        try:
            running, start_s = server.wait_until_served()
            self._results.figure(f"{name}/start_s", "s", start_s, "lower")
            self._results.figure(f"{name}/start_cpu", "s", cpu_s_of([running.pid]), "lower")
            if name != "none":
                self._results.ratio(f"{name}:none/start_cpu", f"{name}/start_cpu", "none/start_cpu", "lower")
            self._record_memory(f"{name}/rss_at_start", running)
            with _connected(running.http.removeprefix("http://")) as client:
                yield client
            self._record_memory(f"{name}/rss", running)
        finally:
            server.stop()

    def _record_memory(self, name: str, running: RunningServer) -> None:
        self._results.figure(name, "MiB", resident_bytes(running.pid) / MIB, "lower")

    def _turn(self, client: http.client.HTTPConnection, session_id: str, turn: int) -> float:
        took_ms, reply = _timed(client, f"/sessions/{session_id}{_CHAT}", self._body(turn))
        self._results.count("answered", 1)
        self._results.count("wrong", reply != self._reply)
        if reply != self._reply:
            self._results.note(f"turn {turn + 1} of session {session_id}: {reply[:200]!r}")
        return took_ms

    def _is_right(self, client: http.client.HTTPConnection, session_id: str) -> bool:
        records = _asked(client, "GET", f"/sessions/{session_id}")["records"]
        return [record["response"] for record in records] == [json.loads(self._reply)] * (self._settings.turns + 2)

    def _body(self, turn: int) -> bytes:
        """The whole conversation so far and the next question."""
        question, answer = {"role": "user", "content": "Go on."}, {"role": "assistant", "content": TEXT}
        messages = [question, answer] * turn + [question]
        return msgspec.json.encode({"model": "bench", "messages": messages, "max_tokens": 1 << 20, "temperature": 1.0})


def _id_of(index: int) -> str:
    return hashlib.md5(str(index).encode(), usedforsecurity=False).hexdigest()


async def _fill(place: str, first: int, last: int) -> None:
    """Write copies of the first session under the ids from `first` to before `last`."""
    async with existing(place) as journal, joined(journal):
        stored, turns = await _first(journal)
        given, sampled = sum(len(turn.given) for turn in turns), sum(len(turn.sampled) for turn in turns)
        num = len(turns)
        summary = SessionSummary(history_length=given + sampled, given=(num, given), sampled=(num, sampled))
        batch: list[Entry] = []
        size = 0
        for index in range(first, last):
            session_id = _id_of(index)
            copied = [TurnRecorded(session_id, turn) for turn in turns]
            batch.append(replace(stored.opened, session_id=session_id, number=await journal.next_number()))
            batch += [*copied, SessionRested(session_id, time.time(), summary)]
            size += sum(map(num_bytes, copied))
            if size > _WRITE_BYTES:
                await journal.write(*batch)
                batch, size = [], 0
        await journal.write(*batch)


async def _filler(place: str, first: str, last: str) -> None:
    """A process that fills, says so, and waits for the end of its stdin."""

    async def nothing(line: bytes) -> None:
        pass

    await _fill(place, int(first), int(last))
    await obey("filled", nothing)


async def _first(journal: Journal) -> tuple[StoredSession, list[TurnRecord]]:
    """The session with the lowest number, and its turns with their bodies."""
    async for listed in every_session(journal):
        session_id = listed.opened.session_id
        stored = await journal.read_session(session_id)
        return stored, [await with_bodies(turn, session_id, journal) for turn in stored.turns]
    raise ProcessFailed("the server has recorded nothing")


def _connected(address: str) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S))


def _timed(client: http.client.HTTPConnection, path: str, body: bytes) -> tuple[float, bytes]:
    """Milliseconds until the whole response was there, and its body."""
    began = time.perf_counter()
    client.request("POST", path, body, {"content-type": "application/json"})
    content = client.getresponse().read()
    return (time.perf_counter() - began) * 1000, content


def _asked(client: http.client.HTTPConnection, method: str, path: str) -> dict[str, Any]:
    client.request(method, path)
    response = client.getresponse()
    content = response.read()
    if response.status >= 300:
        raise ProcessFailed(f"{method} {path} failed with status {response.status}: {content[:200]!r}")
    found: dict[str, Any] = json.loads(content)
    return found


def judge(report: Report) -> list[Gate]:
    few_mib = report.values("few/rss")
    return [
        all_right("replies", report.total("answered"), report.total("wrong")),
        all_right("records", len(report.values("records_wrong")), report.total("records_wrong")),
        median_at_most("starts_within_2_s", report.values("many/start_s"), 2.0, "s"),
        median_at_most(
            "start_costs_the_same", report.values("many:none/start_cpu"), _START_TIMES, "times an empty one"
        ),
        percentile_at_most("first_turn_within_100_ms", report.values("many/first_turn_added_ms"), 95, 100.0, "ms"),
        within_budget(
            "memory_does_not_grow_with_the_journal",
            report.values("many/rss"),
            median(few_mib) if few_mib else 0.0,
            _MEMORY_MIB,
            "MiB",
        ),
    ]


def charts(settings: RestingSettings) -> list[Chart]:
    turns = tuple(f"{name}/{which}_turn_added_ms" for name in ("few", "many") for which in ("first", "second"))
    return [
        Chart("a turn, beyond the upstream's time", "distribution", turns, "ms", is_log=True),
        Chart("start of the server", "bars", ("none/start_s", "few/start_s", "many/start_s"), "s"),
        Chart("memory after the turns", "bars", ("none/rss", "few/rss", "many/rss"), "MiB"),
    ]


SCENARIO = Scenario(
    name="resting",
    about="start time, first turn and memory of a server whose journal has many sessions at rest",
    settings=RestingSettings,
    quick={"sessions": 1000, "few": 100, "turns": 20, "starts": 2, "asked": 30},
    quick_s=60,
    num_rounds=lambda settings: 3 + 2 * settings.starts,
    measure=measure,
    judge=judge,
    charts=charts,
)

if __name__ == "__main__":
    run_helper(_filler(*sys.argv[1:]))
