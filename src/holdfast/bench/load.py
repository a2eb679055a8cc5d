"""Chat clients that send the next request as soon as the last one is answered, and polls of /health. A process.

Their HTTP is raw bytes on a socket: they share the cores with the server, and must not be what is measured.
"""

import asyncio
import json
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.bench.machine import own_cpu_s
from holdfast.bench.processes import Child, ProcessFailed, obey
from holdfast.bench.report import Results
from holdfast.bench.upstreams import JSON_HEADER, TEXT, TYPICAL_ROWS, Script, first_message

QUESTION = " sea" * 64  # 64 tokens of the default model
_TIMEOUT_S = 30.0
_SLACK_S = 120.0  # that a load may take beyond its duration
_HAMMER_CONNECTIONS = 8
_PAUSE_S = 0.1  # after a request that failed
_REFUSED = 300  # and above: a status that is no success


def request(method: str, path: str, body: bytes = b"") -> bytes:
    type_header = JSON_HEADER if body else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{type_header}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_CHAT = "/v1/chat/completions"
_HEALTH = request("GET", "/health")
_CREATE = request("POST", "/sessions")


class HttpReply(NamedTuple):
    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """The client's end of one connection: one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._transport: asyncio.WriteTransport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, sent: bytes) -> HttpReply:
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("the connection is closed")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        return await self._waiting

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (found := first_message(self._buffer)) is None:
            return
        start, end = found
        reply = HttpReply(int(self._buffer[9:12]), bytes(self._buffer[start:end]))
        del self._buffer[:end]
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("the server closed the connection"))


async def _connect(address: str) -> Connection:
    """A connection to HOST:PORT; the caller closes it."""
    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load to run. `is_straight`: without sessions, chats go to the upstream at `address` directly."""

    address: str
    script: Script
    num_sessions: int
    num_turns: int
    duration_s: float = 0.0  # clients open new sessions until then; 0: each has one session
    ramp_s: float = 0.0  # before that, under load but not counted, so that chats are in flight when counting begins
    health_interval_s: float = 0.0  # 0: /health is not polled
    is_straight: bool = False
    is_kept: bool = False  # sessions stay open
    opened_at: str = ""  # HOST:PORT that opens and closes the sessions; empty: `address`


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What came back. Times are in the order in which the requests ended."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_chats: int = 0  # all of them; only those that count have a time
    chat_ms: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)  # how late this process itself was with a poll
    num_wrong: int = 0  # replies other than the expected one
    wrong: str = ""  # the first of them


@dataclass(frozen=True, slots=True)
class LoadClient:
    """Runs loads in the process `child`, and records replies and stored turns that are wrong."""

    child: Child
    results: Results

    def run(self, plan: LoadPlan) -> LoadResult:
        return self.child.ask(plan, LoadResult, timeout_s=plan.duration_s + _SLACK_S)

    def count(self, result: LoadResult, contestant: str, prefix: str = "") -> None:
        """Add to the series `answered` and `wrong` (with `prefix`)."""
        self.results.count(f"{prefix}answered", result.num_chats)
        self.results.count(f"{prefix}wrong", result.num_wrong)
        if result.wrong:
            self.results.note(f"{contestant}: {result.wrong}")

    def check_record(self, address: str, script: Script, contestant: str, prefix: str = "") -> None:
        """Have one chat and add to the series `records_wrong` whether the server stored the upstream's reply."""
        session = ask("POST", address, "/sessions")["session_id"]
        try:
            ask("POST", address, f"/sessions/{session}{_CHAT}", body_of(0))
            stored = ask("GET", address, f"/sessions/{session}")
        finally:
            ask("DELETE", address, f"/sessions/{session}")
        problem = record_problem(stored["records"], stored["metadata"]["accumulated_token_ids"], script)
        if problem:
            self.results.note(f"{contestant}: {problem}")
        self.results.count(f"{prefix}records_wrong", bool(problem))


def record_problem(records: list[dict[str, Any]], token_ids: list[int], script: Script) -> str:
    """What is wrong with the record of one chat, payload included; empty if nothing is."""
    if len(records) != 1:
        return f"there are {len(records)} records of one turn"
    if records[0]["response"] != json.loads(script.reply(len(token_ids) - 1)):
        return "the record is not what the upstream sent"
    if token_ids[-script.num_tokens :] != script.token_ids:
        return "the recorded token ids are not the sampled ones"
    return ""


def ask(method: str, address: str, path: str, body: bytes = b"", *, timeout_s: float = _TIMEOUT_S) -> Any:
    """The JSON that a server answers a request with; None if that is empty."""
    headers = {"content-type": "application/json"} if body else {}
    sent = urllib.request.Request(f"http://{address}{path}", data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=timeout_s) as reply:
            content = reply.read()
    except OSError as exc:
        raise ProcessFailed(f"{method} {path} at {address} failed: {exc}") from exc
    return json.loads(content) if content else None


def body_of(turn: int) -> bytes:
    """The request of a session's turn, counted from 0: the whole conversation so far, as clients send it."""
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": TEXT}
    messages = [question, answer] * turn + [question]
    return msgspec.json.encode({"model": "bench", "messages": messages, "max_tokens": 1 << 20, "temperature": 1.0})


class _Load:
    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._result = LoadResult()
        self._bodies = [body_of(turn) for turn in range(plan.num_turns)]
        self._expected = plan.script.reply(TYPICAL_ROWS if plan.is_straight else 0)

    async def run(self) -> LoadResult:
        started, used_s = time.perf_counter(), own_cpu_s()
        self._counted_from = started + self._plan.ramp_s
        self._deadline = self._counted_from + self._plan.duration_s
        async with asyncio.TaskGroup() as clients:
            if self._plan.health_interval_s:
                clients.create_task(self._poll_health())
            for _ in range(self._plan.num_sessions):
                clients.create_task(self._client())
        self._result.wall_s = self._plan.duration_s or time.perf_counter() - started
        self._result.cpu_s = own_cpu_s() - used_s
        return self._result

    async def _client(self) -> None:
        """Sessions one after the other; a connection that fails is counted as a wrong reply and made again."""
        is_first = True
        while is_first or time.perf_counter() < self._deadline:
            is_first = False
            try:
                connection = await _connect(self._plan.address)
                opener = await _connect(self._plan.opened_at) if self._plan.opened_at else connection
                try:
                    await self._session(connection, opener)
                    while time.perf_counter() < self._deadline:
                        await self._session(connection, opener)
                finally:
                    connection.close()
                    opener.close()
            except OSError as exc:
                self._result.num_chats += 1
                self._count_wrong(str(exc))
                await asyncio.sleep(_PAUSE_S)

    def _count_wrong(self, problem: str) -> None:
        self._result.num_wrong += 1
        self._result.wrong = self._result.wrong or problem

    async def _session(self, connection: Connection, opener: Connection) -> None:
        base, result = "", self._result
        if not self._plan.is_straight:
            created = await opener.ask(_CREATE)
            if created.status >= _REFUSED:
                self._count_wrong(f"no session: status {created.status}: {created.body[:200]!r}")
                result.num_chats += 1
                await asyncio.sleep(_PAUSE_S)
                return
            base = f"/sessions/{msgspec.json.decode(created.body)['session_id']}"
        for body in self._bodies:
            started = time.perf_counter()
            reply = await connection.ask(request("POST", base + _CHAT, body))
            ended = time.perf_counter()
            if reply.status != 200 or reply.body != self._expected:
                self._count_wrong(f"status {reply.status}: {reply.body[:200]!r}")
            result.num_chats += 1
            if not self._plan.duration_s or self._counted_from <= ended < self._deadline:
                result.chat_ms.append((ended - started) * 1000)
            elif ended >= self._deadline:
                break
        if base and not self._plan.is_kept:
            await opener.ask(request("DELETE", base))

    async def _poll_health(self) -> None:
        """Polls at a steady pace, whether or not the last poll was answered, so that many polls notice a stall."""
        free: list[Connection] = []
        due = self._counted_from
        async with asyncio.TaskGroup() as polls:
            while (due := due + self._plan.health_interval_s) < self._deadline:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self._result.late_ms.append((time.perf_counter() - due) * 1000)
                polls.create_task(self._ask_health(free))
        for connection in free:
            connection.close()

    async def _ask_health(self, free: list[Connection]) -> None:
        while free and not free[-1].is_open:  # servers close a connection that was idle for some seconds
            free.pop()
        try:
            connection = free.pop() if free else await _connect(self._plan.address)
            started = time.perf_counter()
            reply = await connection.ask(_HEALTH)
        except OSError as exc:
            self._count_wrong(f"health: {exc}")
            return
        self._result.health_ms.append((time.perf_counter() - started) * 1000)
        if reply.status != 200:
            self._count_wrong(f"health: status {reply.status}")
        free.append(connection)


class _Hammer:
    """Eight ordinary HTTP clients that ask for the list of models as fast as they are answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []
        self._num_answers = 0

    async def obey(self, line: bytes) -> int:
        """`true` starts and `false` stops them; answers with the number of responses so far."""
        if msgspec.json.decode(line, type=bool):
            self._tasks = [asyncio.create_task(self._ask()) for _ in range(_HAMMER_CONNECTIONS)]
        else:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._num_answers

    async def _ask(self) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            while True:
                async with client.get(f"{self._url}/v1/models") as reply:
                    await reply.read()
                    self._num_answers += 1


async def _run(line: bytes) -> LoadResult:
    return await _Load(msgspec.json.decode(line, type=LoadPlan)).run()


if __name__ == "__main__":
    asyncio.run(obey("ready", _Hammer(sys.argv[2]).obey if sys.argv[1:] else _run))
