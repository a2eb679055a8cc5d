"""The pictures of docs/console.md: `python -m tests.console.shots` takes them of a server with the real model."""

import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page

from tests.console.browser import Tab, chromium
from tests.console.demo import branches, museum, others, real_server
from tests.documents import ROOT

FOLDER = ROOT / "docs/images/console"
SIZE = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}


def nothing(page: Page) -> None:
    pass


def unlikely(page: Page) -> None:
    """Colours by logprob, and the card of a token that surprises."""
    page.keyboard.press("c")
    look_at(page, ".token.heat-5")


def lasting(page: Page) -> None:
    """A sampled token's card."""
    look_at(page, ".token.kind-sampled")


def look_at(page: Page, selector: str) -> None:
    """Point at the first such token in the upper half of the pane."""
    page.wait_for_timeout(300)
    left, top = page.evaluate(
        """(selector) => {
            const pane = document.querySelector(".token-pane").getBoundingClientRect();
            const boxes = [...document.querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
            const fitting = boxes.filter((box) => box.top > pane.top + 60 && box.left > pane.left + pane.width * 0.4);
            const box = fitting.sort((one, other) => one.top - other.top)[0];
            return [box.left + 4, box.top + 8];
        }""",
        selector,
    )
    page.mouse.move(left, top)


def busy(client: httpx.Client, session: str, stopping: threading.Event) -> None:
    """Somebody talks all the time."""
    body = {"messages": [{"role": "user", "content": "Tell me everything about ships."}], "max_tokens": 4000}
    while not stopping.is_set():
        with client.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body | {"stream": True}) as reply:
            for _ in reply.iter_lines():
                if stopping.is_set():
                    break


def talking(page: Page) -> None:
    """In the middle of a reply."""
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Most tokens").fill("2000")
    text = page.get_by_role("textbox", name="Message")
    text.fill("Tell me about a night at the lighthouse, with every detail.")
    text.press("Enter")
    page.wait_for_function(
        "() => (document.querySelector('article.pending .role-assistant .said > .text')?.textContent.length ?? 0) > 220"
    )


def take(server: str, folder: Path) -> None:
    with httpx.Client(base_url=f"http://{server}", timeout=120) as client:
        others(client)
        tree, guide = branches(client), museum(client)
        at_work = client.post("/sessions", json={"label": "Review the patch 9", "group": "support"}).json()[
            "session_id"
        ]
        stopping = threading.Event()
        agent = threading.Thread(target=busy, args=(client, at_work, stopping))
        agent.start()
        views: list[tuple[str, str, dict[str, int], Callable[[Page], None]]] = [
            ("overview", "#/", SIZE, nothing),
            ("session", f"#/s/{guide}", SIZE, lasting),
            ("tokens", f"#/s/{guide}/tokens?turn=7", SIZE, unlikely),
            ("tree", f"#/s/{tree}/tree?turn=9", SIZE, nothing),
            ("compare", f"#/s/{tree}/compare/9/11", SIZE, nothing),
            ("samples", f"#/s/{tree}/samples", SIZE, nothing),
            ("talk", f"#/s/{guide}/talk", SIZE, talking),
            ("phone", f"#/s/{guide}", PHONE, nothing),
        ]
        with chromium(folder) as browser:
            for name, place, size, act in views:
                for scheme in ("light", "dark"):
                    tab = Tab(browser, server, viewport=size, color_scheme=scheme)
                    page = tab.open(place)
                    page.locator("main[data-loaded]").wait_for()
                    page.wait_for_timeout(
                        4000 if name == "overview" else 1200
                    )  # ticks of the server's events, and fonts
                    act(page)
                    page.wait_for_timeout(300)
                    shrink(page.screenshot(), FOLDER / f"{name}-{scheme}.png")
                    assert not tab.close()
                if name == "overview":
                    stopping.set()
                    agent.join()


def shrink(png: bytes, path: Path) -> None:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path.name, path.stat().st_size // 1024, "KB")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        real_server("--recent", "512", "--sessions", "12", "--max-rollback", "-1", "--data-dir", f"{folder}/data") as (
            server,
            _,
        ),
    ):
        take(sys.argv[1] if len(sys.argv) > 1 else server, Path(folder))


if __name__ == "__main__":
    main()
