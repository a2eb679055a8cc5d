"""Runs many cases against a server in another process, and judges what it holds and has logged afterwards."""

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

from holdfast.serving.http.dialects import MESSAGES, dialect_of
from tests.fuzz.wire import Answer

START_S = 120.0
MAX_GROWTH_MB = 64
FLAT_CASES = 50_000  # with fewer, caches are still filling
SHOWN = 10
REPORT_S = 10.0
KIND_CHARACTERS = 40


class Wrong(Exception):
    """What the server did and must not do."""


class ServerProcess:
    """`python -m tests.fuzz.server` for as long as the context lasts."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz.server", *arguments]

    async def __aenter__(self) -> "ServerProcess":
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        self.addresses = await self._said()
        return self

    async def __aexit__(self, *caught: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(30):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            raise Wrong("the server did not stop within 30 s") from None

    async def state(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._said()

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    async def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        if not line:
            raise Wrong(f"the server ended with status {await self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said


class Campaign(ABC):
    """`num_workers` workers share `count` cases. `outcomes` counts what came of them."""

    def __init__(self, server: ServerProcess, *, count: int, seed: int, num_workers: int = 32) -> None:
        self.server = server
        self.count = count
        self.seed = seed
        self.num_left = count
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_wrong = 0
        self.kinds: Counter[str] = Counter()
        self._num_workers = num_workers
        self._rss_mb: list[float] = []

    @abstractmethod
    async def work(self, seed: int) -> None:
        """Take cases while `take()` allows it."""

    @abstractmethod
    async def settle(self) -> dict[str, Any]:
        """What the server holds after everything was given back; raises Wrong where that is not all."""

    def take(self) -> bool:
        self.num_left -= 1
        return self.num_left >= 0

    def note_wrong(self, what: str) -> None:
        self.num_wrong += 1
        self.kinds[what[:KIND_CHARACTERS]] += 1
        if len(self.wrong) < SHOWN:
            self.wrong.append(what)
            print(f"\n{what}", file=sys.stderr)

    async def run(self) -> dict[str, Any]:
        """The report. It is good where `wrong` is empty."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(started))
            workers = [group.create_task(self.work(self.seed * 1000 + number)) for number in range(self._num_workers)]
            await asyncio.wait(workers)
            watch.cancel()
        try:
            state = await self.settle()
            if state["num_errors"]:
                self.note_wrong(f"{state['num_errors']} errors in the server's log: {state['errors']}")
        except Wrong as exc:
            self.note_wrong(str(exc))
        growth = self._growth_mb()
        if growth > MAX_GROWTH_MB and self.count >= FLAT_CASES:
            self.note_wrong(f"the server grew by {growth:.0f} MB in the second half")
        return {
            "cases": self.count,
            "seed": self.seed,
            "duration_s": round(time.monotonic() - started, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "rss_mb": [round(size) for size in (self._rss_mb[0], max(self._rss_mb), self._rss_mb[-1])],
            "num_wrong": self.num_wrong,
            "kinds": dict(self.kinds.most_common(SHOWN)),
            "wrong": self.wrong,
        }

    def _growth_mb(self) -> float:
        """From the middle of the run, when pools and caches have filled, to its end."""
        self._rss_mb.append(self.server.rss_mb)
        return self._rss_mb[-1] - self._rss_mb[len(self._rss_mb) // 2]

    async def _watch(self, started: float) -> None:
        while True:
            self._rss_mb.append(self.server.rss_mb)
            done, seconds = self.count - max(0, self.num_left), time.monotonic() - started
            print(
                f"\r{done:,} of {self.count:,}, {done / max(seconds, 1e-3):.0f}/s, {self.num_wrong} wrong, "
                f"server {self._rss_mb[-1]:.0f} MB   ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(REPORT_S if not sys.stderr.isatty() else 1.0)


def check_refusal(answer: Answer, about: str, allowed: tuple[int, ...] = (), *, path: str = "") -> None:
    """An error in the envelope of the path's API, and no 5xx but those that are `allowed`."""
    if answer.status >= 500 and answer.status not in allowed:
        raise Wrong(f"{answer.status} {answer.body[:500]!r}: {about}")
    try:
        body = json.loads(answer.body)
        error = body["error"]
        if dialect_of(path.partition("?")[0]) is MESSAGES:
            is_whole = (
                body["type"] == "error" and bool(body["request_id"]) and all(error[k] for k in ("type", "message"))
            )
        else:
            is_whole = bool(error["message"]) and bool(error["code"]) and {"type", "param"} <= set(error)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole or "x-request-id" not in answer.headers:
        raise Wrong(f"{answer.status} without an envelope {answer.body[:500]!r}: {about}")
