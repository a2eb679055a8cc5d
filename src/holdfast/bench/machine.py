"""What a bench ran on: machine, versions, commit. Whatever cannot be found out is left empty."""

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from holdfast import __version__

_TOLD = ("aiohttp", "grpcio", "httptools", "msgspec", "numpy", "starlette", "tokenizers", "torch", "uvicorn", "uvloop")


def hardware() -> dict[str, str | int]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    found = {"holdfast": __version__, "python": platform.python_version()}
    for name in _TOLD:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """Of the source tree that this runs from; `+` where files that git knows have changed since."""
    revision = _git("rev-parse", "HEAD")
    return revision + "+" * bool(revision and _git("status", "--porcelain", "--untracked-files=no"))


def load_averages() -> list[float]:
    with contextlib.suppress(OSError):
        return [round(value, 2) for value in os.getloadavg()]
    return []


def busy_cpu_s() -> float | None:
    """CPU time that the whole machine has used so far; None where it does not tell."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return ""
