"""How quickly a server starts on a journal of many sessions at rest, and answers the first turn of one of them.

One session is made by a server in front of an upstream that replies at once, and its rows are copied as often as there
are sessions. Servers then start on few and on many of them: none of the figures may depend on that.
"""

import contextlib
import hashlib
import http.client
import json
import queue
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.bench.cluster.postgres import PostgresProcess
from holdfast.bench.gates import Gate, all_right, median, median_at_most, percentile_at_most, within_budget
from holdfast.bench.machine import MIB, cpu_s_of, resident_bytes
from holdfast.bench.processes import Child, ProcessFailed, RunningServer, ServerProcess, obey, run_helper, started
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.bench.upstreams import TEXT, Script
from holdfast.config import DEFAULT_MODEL, option
from holdfast.sessions.journal import rows, schema
from holdfast.sessions.journal.base import SessionSummary
from holdfast.sessions.journal.database import Database, SqliteDatabase
from holdfast.sessions.journal.places import is_database
from holdfast.sessions.record import Stored

_WRITE_BYTES = 8 * 2**20  # in one commit
_CHECKED = 3  # sessions after each start whose whole record is read
_START_TIMES = 1.2  # the CPU time of a start, compared with that on an empty journal
_MEMORY_MIB = 32  # by which a server may grow with the journal
_TIMEOUT_S = 60.0
_COMMIT_S = 600.0
_CHAT = "/v1/chat/completions"
_BODY_FIELDS = ("segment", "start", "length", "checksum", "content")


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
        """The session of which the others are copies; and starts with that one alone."""
        with self._serving("none") as client:
            session_id = _asked(client, "POST", "/sessions")["session_id"]
            for turn in range(self._settings.turns):
                self._turn(client, session_id, turn)
        for _ in range(self._settings.starts - 1):
            with self._serving("none"):
                pass

    def fill(self, number: int) -> None:
        """Write copies until there are so many sessions."""
        began = time.perf_counter()
        first = len(self._fresh)
        with contextlib.ExitStack() as stack:
            num = self._settings.fillers if is_database(self._place) else 1
            fillers = [stack.enter_context(started("resting", self._place)) for _ in range(num)]
            size = max([filler.read(int) for filler in fillers])
            idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
            for filler in fillers:
                idle.put(filler)

            def write(start: int) -> int:
                filler = idle.get()
                try:
                    return filler.ask((start, min(start + size, number)), int, timeout_s=_COMMIT_S)
                finally:
                    idle.put(filler)

            pool = ThreadPoolExecutor(num)
            stack.callback(pool.shutdown, cancel_futures=True)
            for last in pool.map(write, range(first, number, size)):
                self._results.step(f"filling: {last:,} of {number:,} sessions")
        num_turns = (number - first) * self._settings.turns
        self._results.figure("filled_turns_per_s", "1/s", num_turns / (time.perf_counter() - began), "higher")
        self._results.step("vacuum")
        _settle(self._place)
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
            cpu_s = cpu_s_of([running.pid])
            self._results.figure(f"{name}/start_cpu", "s", cpu_s, "lower")
            none_s = median(self._results.report.values("none/start_cpu"))
            if name != "none" and none_s:
                self._results.figure(f"{name}:none/start_cpu", "times", cpu_s / none_s, "lower")
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


class _Copier:
    """Writes copies of the session with the lowest number: its rows with other ids, numbers, steps and sums."""

    def __init__(self, db: Database) -> None:
        found = db.select("SELECT * FROM sessions ORDER BY number LIMIT 1")
        if not found or not found[0]["summary"]:
            raise ProcessFailed("no session has come to rest")
        [self._session] = found
        session_id = self._session["id"]
        self._summary = msgspec.msgpack.decode(self._session["summary"], type=tuple[int, SessionSummary])[1]
        self._turns = [
            (
                {name: turn[name] for name in rows.TURN_FIELDS},
                [turn[name] for name in rows.TURN_STATE],
                [rows.body_row(db, session_id, turn["number"], which) for which in ("request", "response")],
            )
            for turn in db.select("SELECT * FROM turns WHERE session = ?1 ORDER BY number", session_id)
        ]

    @property
    def num_bytes(self) -> int:
        """Of one copy, roughly."""
        return sum(1024 + sum(body["length"] for body in bodies) for _, _, bodies in self._turns)

    def write(self, db: Database, first: int, last: int) -> None:
        """Write the copies from `first` to before `last`. Their turns are in turn, as of sessions that run together."""
        indexes = {_id_of(index): index for index in range(first, last)}
        bodies: list[list[Stored]] = []
        turns: list[list[Stored]] = []
        steps: dict[str, int] = {}
        for turn, state, own_bodies in self._turns:
            state_sum = rows.checksum_of(*state)
            for session_id in indexes:
                ids = [db.next_body() for _ in own_bodies]
                bodies += [
                    [id, *(body[name] for name in _BODY_FIELDS)] for id, body in zip(ids, own_bodies, strict=True)
                ]
                steps[session_id] = step = db.next_step()
                own = turn | {"session": session_id, "step": step, "request": ids[0], "response": ids[1]}
                turns.append([*own.values(), rows.checksum_of(*own.values()) ^ state_sum, *state])
        sessions = [self._opened(session_id, index, steps[session_id]) for session_id, index in indexes.items()]
        db.insert({"sessions": sessions, "bodies": bodies, "turns": turns})

    def _opened(self, session_id: str, index: int, last_step: int) -> list[Stored]:
        found = self._session
        own = {name: found[name] for name in rows.SESSION_FIELDS}
        own |= {"id": session_id, "number": found["number"] + 1 + index}
        state = [found[name] for name in rows.SESSION_STATE]
        summary = msgspec.msgpack.encode((last_step, self._summary))
        return [
            *own.values(),
            rows.row_checksum([*own.values()], state),
            *state,
            *(summary, found["rested_at"], None, None),
        ]


async def _filler(place: str) -> None:
    """A process that says how many copies it writes at once, then writes those that it is told to."""
    with _committed(place) as db:
        copier = _Copier(db)

    async def write(line: bytes) -> int:
        first, last = msgspec.json.decode(line, type=tuple[int, int])
        with _committed(place) as db:
            copier.write(db, first, last)
        return last

    await obey(max(1, _WRITE_BYTES // copier.num_bytes), write)


@contextlib.contextmanager
def _committed(place: str) -> Iterator[Database]:
    """A transaction in the journal's tables. No server has them open."""
    if is_database(place):
        from holdfast.sessions.journal.postgres_connection import PostgresDatabase, connect

        with contextlib.closing(connect(place)) as connection, connection.statements as statements:
            statements.send(b"BEGIN")
            database = PostgresDatabase(statements)
            database.begin_commit(database.select("SELECT nextval('steps') AS base")[0]["base"])
            yield database
            statements.send(b"COMMIT")
        return
    with contextlib.closing(schema.connect(Path(place) / "journal.db")) as own:
        own.execute("BEGIN IMMEDIATE")
        yield SqliteDatabase(own)
        own.execute("COMMIT")


def _settle(place: str) -> None:
    """Leave a database as one that has been there for a while: with statistics, and without work that is overdue."""
    if is_database(place):
        import psycopg

        from holdfast.sessions.journal.postgres_connection import connect

        with contextlib.closing(connect(place)) as connection:
            connection.execute("VACUUM (ANALYZE) sessions, turns, bodies, members, leases")
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute("CHECKPOINT")


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
