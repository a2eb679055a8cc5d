"""What this machine has: libraries, devices, memory. Plain facts: judges nothing."""

import contextlib
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """One of torch and MLX. `failure` says why it is installed but does not import."""

    version: str = ""
    failure: str = ""
    num_threads: int = 0
    default_device: str = ""
    cuda: tuple[CudaDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """None: the system does not tell."""

    total_bytes: int
    available_bytes: int | None


def is_apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def find_torch() -> Library:
    """Imports torch, which takes a second or two."""
    if not is_installed("torch"):
        return Library()
    try:
        import torch

        cuda = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            cuda.append(CudaDevice(torch.cuda.get_device_name(index), total_bytes, free_bytes))
        return Library(str(torch.__version__), num_threads=torch.get_num_threads(), cuda=tuple(cuda))
    except (ImportError, OSError, RuntimeError) as exc:  # a library that it links to is absent, a driver is broken
        return Library(_version("torch"), failure=_first_line(exc))


def find_mlx() -> Library:
    if not is_installed("mlx"):
        return Library()
    try:
        import mlx.core

        return Library(_version("mlx"), default_device=str(mlx.core.default_device().type).rpartition(".")[2])
    except (ImportError, OSError, RuntimeError) as exc:
        return Library(_version("mlx"), failure=_first_line(exc))


def find_memory() -> Memory:
    """What this process may use: a container's limit counts where it is the smaller one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available: int | None = None
    with contextlib.suppress(OSError):
        available = available_in_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if available is None:
            listing = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=10).stdout
            available = available_in_vm_stat(listing)
    with contextlib.suppress(OSError, ValueError):
        limit, used, stat = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        total = min(total, int(limit))
        left = left_in_cgroup(int(limit), int(used), stat)
        available = left if available is None else min(available, left)
    return Memory(total, available)


def available_in_meminfo(text: str) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def available_in_vm_stat(text: str) -> int | None:
    """macOS gives up inactive, speculative and purgeable pages to whoever asks."""
    size = re.search(r"page size of (\d+) bytes", text)
    kinds = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)\.", text, re.MULTILINE)
    return int(size[1]) * sum(map(int, kinds)) if size and kinds else None


def left_in_cgroup(limit: int, used: int, stat: str) -> int:
    """File pages that nobody touched lately count as used but are given up first."""
    found = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return max(0, limit - used + (int(found[1]) if found else 0))


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "of unknown version"


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
