"""Agents at work: sessions that chat as fast as they are answered, and a poll of /health beside them. A process."""

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from holdfast.bench.canned_upstream import TEXT, Script
from holdfast.bench.processes import cpu_s, obey
from holdfast.bench.wire import Connection, opened, request

QUESTION = " sea" * 64  # 64 tokens of the default model
_CHAT = "/v1/chat/completions"
_HEALTH = request("GET", "/health")
_CREATE = request("POST", "/sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is to be done. `is_straight`: no sessions, the same chats go to `address` as they are."""

    address: str
    script: Script
    num_sessions: int
    num_turns: int
    duration_s: float = 0.0  # new sessions until then; 0: each agent has one session
    ramp_s: float = 0.0  # before that, at work but not counted: who is in flight at its end was so at its beginning
    health_interval_s: float = 0.0  # 0: nobody asks
    is_straight: bool = False
    is_kept: bool = False  # sessions stay open


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What came of it. Times of chats and of /health are in the order in which they ended."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_chats: int = 0  # all of them; those that count have a time
    chat_ms: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)  # how late our own loop was with a poll
    num_wrong: int = 0  # replies other than the expected
    wrong: str = ""  # the first of them


class _Load:
    def __init__(self, order: LoadPlan) -> None:
        self.order = order
        self.outcome = LoadResult()
        self._bodies = [body_of(turn) for turn in range(order.num_turns)]
        self._expected = order.script.reply(with_payload=order.is_straight)

    async def run(self) -> LoadResult:
        started, used = time.perf_counter(), cpu_s()
        self._counted_from = started + self.order.ramp_s
        self._deadline = self._counted_from + self.order.duration_s
        polling = asyncio.ensure_future(self._poll()) if self.order.health_interval_s else None
        await asyncio.gather(*(self._agent() for _ in range(self.order.num_sessions)))
        if polling is not None:
            await polling
        self.outcome.wall_s = self.order.duration_s or time.perf_counter() - started
        self.outcome.cpu_s = cpu_s() - used
        return self.outcome

    async def _agent(self) -> None:
        connection = await opened(self.order.address)
        try:
            await self._session(connection)
            while time.perf_counter() < self._deadline:
                await self._session(connection)
        finally:
            connection.close()

    async def _session(self, connection: Connection) -> None:
        base = ""
        if not self.order.is_straight:
            created = await connection.ask(_CREATE)
            base = f"/sessions/{msgspec.json.decode(created.body)['session_id']}"
        for body in self._bodies:
            started = time.perf_counter()
            reply = await connection.ask(request("POST", base + _CHAT, body))
            ended = time.perf_counter()
            if reply.status != 200 or reply.body != self._expected:
                self.outcome.num_wrong += 1
                self.outcome.wrong = self.outcome.wrong or f"status {reply.status}: {reply.body[:200]!r}"
            self.outcome.num_chats += 1
            if not self.order.duration_s or self._counted_from <= ended < self._deadline:
                self.outcome.chat_ms.append((ended - started) * 1000)
            elif ended >= self._deadline:
                break
        if base and not self.order.is_kept:
            await connection.ask(request("DELETE", base))

    async def _poll(self) -> None:
        """Asks at a steady pace, whether or not the last answer is there, so that a stall is seen by many."""
        free: list[Connection] = []
        due = self._counted_from
        async with asyncio.TaskGroup() as asking:
            while (due := due + self.order.health_interval_s) < self._deadline:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self.outcome.late_ms.append((time.perf_counter() - due) * 1000)
                asking.create_task(self._ask_health(free))
        for connection in free:
            connection.close()

    async def _ask_health(self, free: list[Connection]) -> None:
        while free and not free[-1].is_open:  # servers close what was idle for some seconds
            free.pop()
        connection = free.pop() if free else await opened(self.order.address)
        started = time.perf_counter()
        reply = await connection.ask(_HEALTH)
        self.outcome.health_ms.append((time.perf_counter() - started) * 1000)
        self.outcome.num_wrong += reply.status != 200
        free.append(connection)


def body_of(turn: int) -> bytes:
    """The request of a session's `turn`-th turn: the whole conversation so far, as clients send it."""
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": TEXT}
    messages = [question, answer] * turn + [question]
    return msgspec.json.encode({"model": "bench", "messages": messages, "max_tokens": 64, "temperature": 1.0})


async def _main() -> None:
    async def handle(line: bytes) -> LoadResult:
        return await _Load(msgspec.json.decode(line, type=LoadPlan)).run()

    await obey("ready", handle)


if __name__ == "__main__":
    asyncio.run(_main())
