"""How fast the console is, and what it costs the server: `python -m tests.console.measure` prints a table.

The browser and the server share this machine. For what a console costs, the server has one core for itself, and the
browser and the client another.
"""

import asyncio
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
from holdfast_sdk import Client
from playwright.sync_api import Page

from tests.console.browser import Tab, chromium
from tests.console.conftest import SHAPE, fill
from tests.console.demo import real_server
from tests.serving import default_chat, serving_aside, wordy_engine

ROUNDS, TOKENS = 12, 160
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
FIRST = "performance.getEntriesByName('overview-first')[0].startTime"
COMPLETE = "performance.getEntriesByName('overview-complete')[0].startTime"
FRAMES = """async (step) => {
  const pane = document.querySelector(".token-pane");
  const frames = [];
  let before = null;
  pane.scrollTop = 0;
  await new Promise((done) => {
    const next = (now) => {
      if (before !== null) frames.push(now - before);
      before = now;
      pane.scrollTop += step;
      if (pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 1 || frames.length > 1500) return done();
      requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
  });
  return frames;
}"""


def row(name: str, value: str) -> None:
    print(f"{name:58} {value}", flush=True)


def pages(browser: Any, few: str, many: str, session: str) -> None:
    paints = []
    for _ in range(7):
        tab = Tab(browser, few)
        tab.open().locator("main[data-loaded]").wait_for()
        paints.append(tab.page.wait_for_function(PAINT).json_value())
        tab.close()
    row("first paint, ms: median, worst of 7 new profiles", f"{statistics.median(paints):.0f}, {max(paints):.0f}")
    first, full = [], []
    for _ in range(5):
        tab = Tab(browser, many)
        tab.open().locator("main[data-loaded='10000']").wait_for()
        first.append(tab.page.evaluate(FIRST))
        full.append(tab.page.evaluate(COMPLETE))
        tab.close()
    row("first 1,000 of 10,000 sessions, ms: median, worst of 5", f"{statistics.median(first):.0f}, {max(first):.0f}")
    row("all 10,000 sessions, ms: median, worst of 5", f"{statistics.median(full):.0f}, {max(full):.0f}")
    for step, words in ((120, "a wheel's step"), (900, "a page")):
        tab = Tab(browser, few)
        page = tab.open(f"#/s/{session}/tokens")
        page.locator(".token").first.wait_for()
        frames = page.evaluate(FRAMES, step)
        late = sum(one > 50 for one in frames)
        row(
            f"100,000 tokens, {words} each frame: median, worst, late",
            f"{statistics.median(frames):.1f} ms, {max(frames):.1f} ms, {late} of {len(frames)} over 50 ms",
        )
        tab.close()


def cost(folder: Path) -> None:
    """The same stream with and without a console that follows it, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    with real_server("--sessions", "4", "--threads", "1") as (server, pid):
        process = psutil.Process(pid)
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        with chromium(folder) as browser, httpx.Client(base_url=f"http://{server}", timeout=120) as client:
            tab = Tab(browser, server)
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(2 * ROUNDS + 2):
                is_open = number % 2 == 1
                session = client.post("/sessions").json()["session_id"]
                if is_open:
                    page: Page = tab.open(f"#/s/{session}")
                    page.locator(".connection.open").wait_for()
                else:
                    tab.page.goto("about:blank")
                measured = stream(client, session, number // 2, process)
                if number >= 2:  # the first of each warm up
                    found[is_open].append(measured)
            rates, work = (
                [
                    statistics.median(
                        one[index] / other[index] for one, other in zip(found[True], found[False], strict=True)
                    )
                ]
                for index in (0, 1)
            )
            row("tokens/s through HTTP with a console open / without", f"{rates[0]:.3f} (median of {ROUNDS} pairs)")
            row("CPU time of the server per token, with / without", f"{work[0]:.3f} (median of {ROUNDS} pairs)")
            tab.context.close()


def stream(client: httpx.Client, session: str, seed: int, process: psutil.Process) -> tuple[float, float]:
    """Tokens per second by the server's own record of the turn, and its CPU time for each."""
    body = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": TOKENS, "stream": True}
    body |= {"seed": seed, "logit_bias": {"2": -100}}
    began = sum(process.cpu_times()[:2])
    with client.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as response:
        for _ in response.iter_lines():
            pass
    used = sum(process.cpu_times()[:2]) - began
    (turn,) = client.get(f"/sessions/{session}?records=messages").json()["metadata"]["tree"]
    return turn["sampled_tokens"] / (turn["ended_at"] - turn["started_at"]), used / turn["sampled_tokens"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crowd = folder / "crowd"
        asyncio.run(fill(crowd, 10_000))
        numbers = random.Random(1)
        engine = wordy_engine(forward_s=0.0, num_slabs=4, shape=SHAPE)
        with (
            serving_aside(engine, default_chat(), max_recompute=10**7) as few,
            serving_aside(wordy_engine(), default_chat(), data_dir=str(crowd), max_parked=64) as many,
            Client(few.address) as client,
        ):
            session = client.create_session(label="long")
            session.append([numbers.randrange(20, 40_000) for _ in range(100_000)])
            with chromium(folder) as browser:
                pages(browser, few.http, many.http, session.id)
        cost(folder)


if __name__ == "__main__":
    main()
