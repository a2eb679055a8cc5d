"""Debian's Chromium, driven by Playwright: a page that remembers every complaint, and how its frames came."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
expect.set_options(timeout=30_000)  # a machine may be busy
_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is of this run alone."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=list(_FLAGS), downloads_path=str(folder)
        )
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the console. `complaints`: errors and warnings of the browser; an answer that a test expects to be an
    error is named in `expected`."""

    def __init__(self, browser: Browser, server: str, **options: Any) -> None:
        self.server = server
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | options)
        self.context.add_init_script(_VIOLATIONS)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("console", self._noted)
        self.page.on("pageerror", lambda error: self.complaints.append(f"{error.name}: {error.message}"))

    def _noted(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, place: str = "#/") -> Page:
        self.page.goto(f"http://{self.server}/console{place}")
        return self.page

    def close(self) -> list[str]:
        """What the browser complained of."""
        found = self.page.evaluate("window.violations ?? []")
        self.context.close()
        return [*found, *(one for one in self.complaints if not any(text in one for text in self.expected))]
