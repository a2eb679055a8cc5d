"""A Chromium for all tests of the console, and servers to look at: one on a fake engine, one with keys, a real one."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from holdfast.engine.slab import SlabShape
from holdfast.serving.keys import LOCAL_OWNER
from holdfast.sessions.journal.base import SessionOpened, SessionRested, SessionSummary
from holdfast.sessions.journal.sqlite import SqliteJournal
from tests.console.browser import Tab, chromium
from tests.serving import Server, SlowEngine, default_chat, serving_aside, wordy_engine

SHAPE = SlabShape(recent=512, max_pin=64, prefill_chunk=512, rewind_tokens=256)

Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def engine() -> SlowEngine:
    """A fake that chats nonsense in the default model's vocabulary, and can be held in the middle of a reply."""
    return wordy_engine(forward_s=0.0, num_slabs=6, shape=SHAPE)


@pytest.fixture(scope="module")
def server(engine: SlowEngine) -> Iterator[Server]:
    with serving_aside(engine, default_chat(), max_parked=20_000, max_recompute=10**7) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys, of two owners."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("ann:secret-a\nbob:secret-b\n")
    with serving_aside(wordy_engine(forward_s=0.0), default_chat(), keys_file=str(path), max_parked=100) as served:
        yield served


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with 10,000 sessions at rest."""
    folder = tmp_path_factory.mktemp("crowd")
    asyncio.run(fill(folder, 10_000))
    with serving_aside(wordy_engine(forward_s=0.0), default_chat(), data_dir=str(folder), max_parked=64) as served:
        yield served


async def fill(folder: Path, number: int) -> None:
    """Sessions at rest in a new data directory, with the summaries that a server notes when it lets them go."""
    journal = SqliteJournal(folder)
    sessions = [
        SessionOpened(
            session_id=f"{index:032x}",
            number=index + 1,
            owner=LOCAL_OWNER,
            created_at=time.time() - number + index,
            kind="chat",
            label=f"crowd {index}",
            group=f"group {index % 9}",
            sink=4,
        )
        for index in range(number)
    ]
    nothing = SessionSummary(history_length=0, given=(0, 0), sampled=(0, 0), num_turns=0)
    rests = [SessionRested(session.session_id, session.created_at, nothing) for session in sessions]
    await journal.write(*sessions, *rests)
    await journal.close()


@pytest.fixture(scope="module")
def browser(
    server: Server, guarded: Server, crowded: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    """It starts after the servers and ends before them: while it runs, this thread has its event loop."""
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def open_tab(browser: Browser, server: Server) -> Iterator[Open]:
    """Open tabs of the console. At the end none of them may have had anything to complain of."""
    tabs: list[Tab] = []

    def opened(place: str = "#/", *, at: str = server.http, **options: object) -> Tab:
        tabs.append(Tab(browser, at, **options))
        tabs[-1].open(place)
        return tabs[-1]

    yield opened
    assert [tab.close() for tab in tabs] == [[] for _ in tabs]
