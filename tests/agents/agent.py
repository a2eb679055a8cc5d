"""What an agent is to the harness: what to install, which scenarios it has, and the commands of a run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.agents.model import Script
from tests.agents.scripts import by_plan

NODE = "node@24.21.0"
OLDEST_NODE = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run happens. `url` is the session's: `url` + /v1 is what OpenAI's clients call the base URL.

    `server` is what `holdfast run` needs, which opens a session of its own. `home` and `work` are empty directories of
    the run's own; `key` is a dummy.
    """

    url: str
    server: str
    prefix: Path
    home: Path
    work: Path
    scenario: str
    slow_s: int
    model: str = "scripted"
    key: str = "dummy-key"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`env` comes on top of the few variables that every run has. `says`: what its output must contain, if anything.

    `typed`: runs in a terminal, where these are typed, each with Enter: the first when `says` was shown, the next ones
    a moment later. `writes`: a file of the working directory and what it must contain afterwards.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    says: str = ""
    typed: Sequence[str] = ()
    killed_after_s: float = 0.0
    writes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """`packages`: pinned, each NAME@VERSION for npm or NAME==VERSION for pip. `commands` run one after the other.

    `wheels`: what a pip agent installs by itself during a run, which has no network; they come to the folder `wheels`.

    `commands` may write files to the place's home and work directories.
    """

    name: str
    kind: Literal["npm", "pip"]
    packages: Sequence[str]
    dialect: str
    scenarios: Sequence[str]
    commands: Callable[[Place], Sequence[Command]]
    script: Script = by_plan
    limit_s: int = 240
    wheels: Sequence[str] = ()


def agents_folder() -> Path:
    return Path(os.environ.get("HOLDFAST_AGENTS_DIR") or Path.home() / ".cache/holdfast-agents")


def search_path(prefix: Path) -> str:
    """Where an agent finds programs: its own, our Node, the system's."""
    own = [prefix / "bin", prefix / "node_modules/.bin", agents_folder() / "node/node_modules/.bin"]
    node = shutil.which("node")
    return ":".join([*map(str, own), *([str(Path(node).parent)] if node else []), "/usr/local/bin", "/usr/bin", "/bin"])


def install(agent: Agent) -> None:
    """Install the pinned packages into a prefix of the agent's own."""
    prefix = agents_folder() / agent.name
    prefix.mkdir(parents=True, exist_ok=True)
    if agent.kind == "pip":
        if not (prefix / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(prefix)], check=True)
        pip = [str(prefix / "bin/python"), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *agent.packages], check=True)
        if agent.wheels:
            subprocess.run([*pip, "download", "-q", "-d", str(prefix / "wheels"), *agent.wheels], check=True)
        return
    npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix"]
    if _node_version() < OLDEST_NODE:
        subprocess.run([*npm, str(agents_folder() / "node"), NODE], check=True)
    subprocess.run([*npm, str(prefix), *agent.packages], check=True)


def _node_version() -> int:
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.lstrip("v").partition(".")[0])
