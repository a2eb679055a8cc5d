"""What this machine has: libraries, devices, memory, a data directory. Facts only; `checks.py` judges them."""

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from holdfast.sessions.journal.schema import MIGRATIONS

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """torch or MLX. `version` is empty if it is not installed, `failure` says why it cannot be imported."""

    version: str = ""
    failure: str = ""
    num_threads: int = 0
    default_device: str = ""
    cuda: tuple[CudaDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """`available_bytes` is None if the system does not report it."""

    total_bytes: int
    available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectory:
    """`damage` says why an existing journal cannot be used."""

    path: Path
    exists: bool = False
    is_writable: bool = False
    is_in_use: bool = False
    free_bytes: int = 0
    num_open: int = 0
    num_closed: int = 0
    damage: str = ""


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
    except (ImportError, OSError, RuntimeError) as exc:  # a missing shared library, a broken driver
        return Library(_version("torch"), failure=_first_line(exc))


def free_bytes(device: str) -> int | None:
    """Memory for a model and its slabs on cpu, cuda or mlx; None if the system does not report it."""
    if device != "cuda":
        return find_memory().available_bytes
    devices = find_torch().cuda
    return devices[0].free_bytes if devices else None


def find_mlx() -> Library:
    if not is_installed("mlx"):
        return Library()
    try:
        import mlx.core

        return Library(_version("mlx"), default_device=str(mlx.core.default_device().type).rpartition(".")[2])
    except (ImportError, OSError, RuntimeError) as exc:
        return Library(_version("mlx"), failure=_first_line(exc))


def find_memory() -> Memory:
    """What this process may use: a container's limit if that is smaller than the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available: int | None = None
    with contextlib.suppress(OSError):
        available = available_in_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if available is None:
            listing = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=10).stdout
            available = available_in_vm_stat(listing)
    with contextlib.suppress(OSError):
        for limit, left in cgroup_limits(Path("/proc/self/cgroup").read_text(encoding="utf-8"), _CGROUP):
            total = min(total, limit)
            available = left if available is None else min(available, left)
    return Memory(total, available)


def cgroup_limits(groups: str, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that this process is in, and what is left of it; `groups`: /proc/self/cgroup."""
    for line in groups.splitlines():
        _, kinds, inside = line.split(":", 2)
        if not kinds:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / inside.strip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base):
                with contextlib.suppress(OSError, ValueError):  # no limit, or a group that is not visible here
                    limit, used = (int((place / name).read_text()) for name in names)
                    yield limit, left_in_cgroup(limit, used, (place / "memory.stat").read_text())


def available_in_meminfo(text: str) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def available_in_vm_stat(text: str) -> int | None:
    """macOS reclaims inactive, speculative and purgeable pages on demand."""
    size = re.search(r"page size of (\d+) bytes", text)
    kinds = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)\.", text, re.MULTILINE)
    return int(size[1]) * sum(map(int, kinds)) if size and kinds else None


def left_in_cgroup(limit: int, used: int, stat: str) -> int:
    """Inactive file pages count as used, but are reclaimed first."""
    found = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return max(0, limit - used + (int(found[1]) if found else 0))


def find_data(path: Path) -> DataDirectory:
    """Changes nothing on disk. If `path` is missing, the directory that would contain it counts."""
    base = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    is_writable = base.is_dir() and os.access(base, os.W_OK | os.X_OK)
    free_bytes = shutil.disk_usage(base).free
    found = DataDirectory(path=path, exists=base == path, is_writable=is_writable, free_bytes=free_bytes)
    if not (found.exists and is_writable):
        return found
    num_open, num_closed, damage = 0, 0, ""
    database = path / "journal.db"
    if database.exists():
        try:
            with contextlib.closing(_read_only(database)) as connection:
                damage = _damage(connection)
                count = "SELECT count(*) - count(closed_at), count(closed_at) FROM sessions"
                num_open, num_closed = (0, 0) if damage else connection.execute(count).fetchone()
        except sqlite3.Error as exc:
            damage = str(exc)
    else:
        left_over = (name for name in ("journal.db-wal", "segments") if (path / name).exists())
        damage = next((f"journal.db is missing, but {name} exists" for name in left_over), "")
    is_in_use = _is_locked(path) or _is_locked(path / "lock")
    return replace(found, is_in_use=is_in_use, num_open=num_open, num_closed=num_closed, damage=damage)


def _read_only(database: Path) -> sqlite3.Connection:
    # Without a log nobody writes, and only `immutable` leaves no new files behind.
    has_log = database.with_name("journal.db-wal").exists()
    return sqlite3.connect(f"{database.absolute().as_uri()}?{'mode=ro' if has_log else 'immutable=1'}", uri=True)


def _damage(connection: sqlite3.Connection) -> str:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        return f"it has version {version}, and this Holdfast supports versions up to {len(MIGRATIONS)}"
    problem: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return "" if problem == "ok" else " ".join(problem.split())


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a network file system that locks only files
        return False
    finally:
        os.close(file)
    return False


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "of unknown version"


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
