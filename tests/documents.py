"""Documents as a reader uses them: their code blocks run, their links followed."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_NOT_OURS = {"node_modules", "build", "dist"}
_START_S, _END_S, _BLOCK_S = 120, 30, 60


@dataclass(frozen=True)
class Block:
    """A fenced block; `shown` is the output that stands below it."""

    language: str
    text: str
    line: int
    shown: str


def documents() -> list[Path]:
    """Every document of this repository: nothing that was installed or built."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _NOT_OURS and not name.startswith(".")]
        found += [Path(folder) / name for name in files if name.endswith(".md")]
    return sorted(found)


def blocks_of(path: Path, *languages: str) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    blocks = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        shown = following[2] if following and following[1] == "text" else ""
        if fence[1] in languages:
            blocks.append(Block(fence[1], fence[2], text.count("\n", 0, fence.start()) + 2, shown))
    return blocks


def links_of(path: Path) -> list[str]:
    """Targets inside this repository, as they are written."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text(encoding="utf-8")))
    return [link for link in _LINK.findall(prose) if not re.match(r"[a-z]+:", link)]


def anchors_of(path: Path) -> set[str]:
    """What `#...` may name, spelled as GitHub does."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def flaw_of(path: Path, link: str) -> str | None:
    """What is wrong with a link of this document."""
    target, _, anchor = link.partition("#")
    there = (path.parent / target).resolve() if target else path
    if not there.is_relative_to(ROOT):
        return "leaves the repository"
    if not there.exists():
        return "does not exist"
    if anchor and (there.suffix != ".md" or anchor not in anchors_of(there)):
        return f"has no heading {anchor!r}"
    return None


def missing_in(output: str, shown: str) -> str | None:
    """The first line of `shown` that the output lacks, in order. Numbers may differ; `...` is anything."""
    position = 0
    for line in filter(None, map(str.strip, shown.splitlines())):
        pattern = re.sub(r"\\\.\\\.\\\.", ".*", re.escape(line))
        pattern = re.sub(r"\d(?:[\d,]|\\\.(?=\d))*", r"[\\d,.]+(?:e-\\d+)?", pattern)
        found = re.compile(pattern).search(output, position)
        if not found:
            return line
        position = found.end()
    return None


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class Reader:
    """Someone who types a document's blocks: a server in one terminal, a shell and an interpreter in others.

    The reader works in `folder`, where `.venv` and the examples are, and reads other ports than those in the text.
    """

    folder: Path
    http: str = field(default_factory=_free_address)
    grpc: str = field(default_factory=_free_address)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    _server: "subprocess.Popen[str] | None" = None

    def __post_init__(self) -> None:
        (self.folder / ".venv").symlink_to(sys.prefix)
        for name in (
            "Makefile",
            "constraints.txt",
            "hatch_build.py",
            "pyproject.toml",
            "examples",
            "sdks",
            "src",
            "tests",
        ):
            (self.folder / name).symlink_to(ROOT / name)

    def type(self, block: Block) -> str:
        """What comes of a block."""
        text = block.text.replace("127.0.0.1:8000", self.http).replace("127.0.0.1:50051", self.grpc)
        if block.language == "python":
            return self._interpreted(text, block.line)
        if "holdfast serve" in text:
            return self.serve(text)
        return self._run(text)

    def serve(self, command: str) -> str:
        """Start a server, after stopping the one that runs; its banner."""
        self.stop()
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {command.strip()}"],
            cwd=self.folder,
            env=self._environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._server.stderr
        banner = ""
        while "Ctrl-C" not in banner:
            line = self._server.stderr.readline()
            assert line, f"the server ended with {self._server.wait(_END_S)}: {banner}"
            banner += line
        return banner.replace(self.http, "127.0.0.1:8000").replace(self.grpc, "127.0.0.1:50051")

    def stop(self) -> None:
        """Ctrl-C, if there is a server."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            assert self._server.wait(_END_S) == 0
        finally:
            self._server.kill()
            self._server.wait()
            assert self._server.stderr
            self._server.stderr.close()
            self._server = None

    def _run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment() | {"MAKEFLAGS": "--dry-run"},  # the tests run in what `make setup` has made
            capture_output=True,
            text=True,
            timeout=_BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _interpreted(self, text: str, line: int) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.chdir(self.folder):
            exec(compile("\n" * (line - 1) + text, "<document>", "exec"), self.names)
        return output.getvalue()

    def _environment(self) -> dict[str, str]:
        doors = {"HOLDFAST_HTTP": self.http, "HOLDFAST_GRPC": self.grpc, "HOLDFAST_SESSIONS": "6"}
        return os.environ | doors | {"HOLDFAST_THREADS": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    reader = Reader(folder)
    try:
        yield reader
    finally:
        reader.stop()
