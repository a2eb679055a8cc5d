"""The machine and its processes: hardware, versions, commit, load, CPU time and memory. Unknown facts stay empty.

Standard library only: the GPU bench runs on machines without our other dependencies.
"""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from holdfast import __version__

MIB = 1 << 20
_LIBS = ("aiohttp", "grpcio", "httptools", "msgspec", "numpy", "starlette", "tokenizers", "torch", "uvicorn", "uvloop")


def hardware() -> dict[str, str | int]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    found = {"holdfast": __version__, "python": platform.python_version()}
    for name in _LIBS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """The commit of the source tree, with `+` if tracked files have changed since."""
    revision = _git("rev-parse", "HEAD")
    return revision + "+" * bool(revision and _git("status", "--porcelain", "--untracked-files=no"))


def load_averages() -> list[float]:
    with contextlib.suppress(OSError):
        return [round(value, 2) for value in os.getloadavg()]
    return []


def busy_cpu_s() -> float | None:
    """CPU time that the whole machine has used so far; None if the system does not report it."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return None


def own_cpu_s() -> float:
    """CPU time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s_of(pids: Iterable[int]) -> float:
    """CPU time of these processes so far; 0 if the system does not report it."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory that a process holds in RAM now."""
    statm = Path(f"/proc/{pid}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(listed.stdout) * 1024


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
