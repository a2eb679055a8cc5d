"""Files that survive a loss of power and that only their owner may read. Knows nothing of what is in them. Blocks."""

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS fsync stops at the drive's own cache
_OURS = ("journal.db*", "model.json*", "lock", "segments/*.segment", "snapshots/*.snapshot")


def sync(file: int) -> None:
    """What was written to the descriptor survives a loss of power."""
    if _FULL_SYNC is not None:
        fcntl.fcntl(file, _FULL_SYNC)
    else:
        os.fdatasync(file)  # with its length, without its times


def sync_directory(directory: Path) -> None:
    """Names made or removed in the directory survive a loss of power."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def open_private(path: Path, flags: int) -> int:
    """A descriptor; a file that is made here can be read by its owner alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file. Whenever the power fails, it has all of `content` or what it had before."""
    new = path.with_name(f"{path.name}.new")
    file = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        sync(file)
    finally:
        os.close(file)
    os.replace(new, path)
    sync_directory(path.parent)


def make_directory(directory: Path) -> None:
    """Make a directory, for its owner alone; one that is there keeps its mode. Its name survives a loss of power."""
    directory = directory.absolute()
    missing = [parent for parent in directory.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        sync_directory(parent.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # somebody else's directory, in which ours has long been
        sync_directory(directory.parent)


def make_private(directory: Path) -> None:
    """Nobody but the owner may read the files of a data directory that were made with a wider mode.

    A directory with the setgid bit is shared with its group on purpose: there the group keeps what it has.
    """
    wider = 0o007 if directory.stat().st_mode & stat.S_ISGID else 0o077
    for path in (path for pattern in _OURS for path in directory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & wider:
                try:
                    path.chmod(mode & ~wider)
                except OSError as exc:
                    logger.warning("%s can be read by other users (mode %03o): %s", path, mode, exc.strerror)


def is_same_file(path: Path, held: os.stat_result) -> bool:
    """Whether `path` still names the file that `held` describes."""
    try:
        return os.path.samestat(path.stat(), held)
    except OSError:
        return False
