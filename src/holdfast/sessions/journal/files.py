"""What the journal asks of a file system: data that is really on disk, and a directory that is ours alone. Blocks."""

import fcntl
import os
from pathlib import Path

from holdfast.errors import ConfigError

_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS fsync stops at the drive's own cache


def sync(file: int) -> None:
    """What was written to the descriptor survives a loss of power."""
    if _FULL_SYNC is not None:
        fcntl.fcntl(file, _FULL_SYNC)
    else:
        os.fsync(file)


def sync_directory(directory: Path) -> None:
    """Names made or removed in the directory survive a loss of power."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class DirectoryLock:
    """A data directory for one process. The system frees it however the process ends."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"cannot write to the data directory {directory}: {exc.strerror}; "
                "make it writable, or choose another --data-dir"
            ) from exc
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise ConfigError(
                f"the data directory {directory} is in use by another Holdfast, process {holder}; "
                "stop that process, or choose another --data-dir"
            ) from exc
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # only a courtesy to whoever reads the message above; a full disk must not stop a start

    def release(self) -> None:
        os.close(self._file)
