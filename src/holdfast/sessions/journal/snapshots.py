"""Snapshots of parked sessions: in host memory first, then on disk, each within its budget.

A snapshot is a shortcut: a session whose snapshot is gone recomputes from its history. So nothing here is synced, a
full disk is no error, and a damaged file is as good as none. Every method but the sizes blocks: call them off the loop.
"""

import contextlib
import logging
import mmap
import os
import struct
import threading
import zlib
from collections import OrderedDict
from pathlib import Path

from holdfast.errors import InvalidArgument
from holdfast.sessions.journal.files import make_directory, open_private

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQI")  # magic, length, CRC-32
_MAGIC = b"HFSNAP1\n"
_SUFFIX = ".snapshot"

Buffer = bytes | bytearray | memoryview


class SnapshotStore:
    """Thread-safe. What was used least recently goes first: from memory to disk, from disk for good."""

    def __init__(self, directory: Path, *, budget_bytes: int, memory_budget_bytes: int = 0) -> None:
        make_directory(directory)
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._memory_budget_bytes = memory_budget_bytes
        self._lock = threading.Lock()
        self._memory: OrderedDict[str, memoryview] = OrderedDict()  # least recently used first, here and below
        self._disk: OrderedDict[str, int] = OrderedDict()  # id -> size of the file
        self._memory_bytes = self._disk_bytes = 0
        for path in directory.glob("*.new"):
            path.unlink()
        found = [(path.stat(), path.stem) for path in directory.glob(f"*{_SUFFIX}")]
        for stat, session_id in sorted(found, key=lambda item: item[0].st_mtime_ns):
            self._disk[session_id] = stat.st_size
            self._disk_bytes += stat.st_size
        self._make_room_on_disk(0)

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def disk_bytes(self) -> int:
        return self._disk_bytes

    def __len__(self) -> int:
        return len(self._memory) + len(self._disk)

    def ids(self) -> list[str]:
        """Whose snapshots there are, those that go first at the beginning."""
        with self._lock:
            return [*self._disk, *self._memory]

    def put(self, session_id: str, content: Buffer) -> bool:
        """Keep `content` instead of what there was; False where no budget has room for it."""
        if not session_id.isalnum():
            raise InvalidArgument(f"{session_id!r} is not the id of a session")
        content = memoryview(content).cast("B")
        with self._lock:
            self._drop(session_id)
            if len(content) > self._memory_budget_bytes:
                return self._write(session_id, content)
            self._memory[session_id] = _held(content)
            self._memory_bytes += len(content)
            while self._memory_bytes > self._memory_budget_bytes:
                self._spill()
            return True

    def get(self, session_id: str) -> bytes | None:
        """The snapshot as it was put, or None: evicted, damaged, never there. It stays, as used just now."""
        with self._lock:
            if session_id in self._memory:
                self._memory.move_to_end(session_id)
                return bytes(self._memory[session_id])
            if session_id not in self._disk:
                return None
            content = self._read(session_id)
            if content is None:
                self._drop(session_id)
            else:
                self._disk.move_to_end(session_id)
                with contextlib.suppress(OSError):
                    os.utime(self._path(session_id))  # the order outlives the process
            return content

    def delete(self, session_id: str) -> None:
        """Does nothing where there is none."""
        with self._lock:
            self._drop(session_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._memory or session_id in self._disk

    def delete_all(self, prefix: str) -> None:
        """Delete those whose ids begin so."""
        with self._lock:
            for session_id in [id for id in (*self._memory, *self._disk) if id.startswith(prefix)]:
                self._drop(session_id)

    def spill(self) -> None:
        """Bring to disk what is in memory, as far as the budget goes; for a shutdown."""
        with self._lock:
            while self._memory:
                self._spill()

    # Under the lock

    def _spill(self) -> None:
        session_id, content = self._memory.popitem(last=False)
        self._memory_bytes -= len(content)
        self._write(session_id, content)

    def _write(self, session_id: str, content: Buffer) -> bool:
        size = _HEADER.size + len(content)
        if not self._make_room_on_disk(size):
            return False
        path = self._path(session_id)
        new = path.with_suffix(".new")
        try:
            with os.fdopen(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(_HEADER.pack(_MAGIC, len(content), zlib.crc32(content)))
                file.write(content)
            os.replace(new, path)
        except OSError as exc:
            logger.warning("the snapshot of session %s is not kept: %s", session_id, exc)
            with contextlib.suppress(OSError):
                new.unlink()
            return False
        self._disk[session_id] = size
        self._disk_bytes += size
        return True

    def _make_room_on_disk(self, size: int) -> bool:
        if size > self._budget_bytes:
            return False
        while self._disk_bytes + size > self._budget_bytes:
            self._drop(next(iter(self._disk)))
        return True

    def _read(self, session_id: str) -> bytes | None:
        try:
            data = self._path(session_id).read_bytes()
        except OSError as exc:
            logger.warning("the snapshot of session %s cannot be read: %s", session_id, exc)
            return None
        if len(data) >= _HEADER.size:
            magic, length, checksum = _HEADER.unpack_from(data)
            content = data[_HEADER.size :]
            if magic == _MAGIC and len(content) == length and zlib.crc32(content) == checksum:
                return content
        logger.warning("the snapshot of session %s is damaged and was removed", session_id)
        return None

    def _drop(self, session_id: str) -> None:
        if (content := self._memory.pop(session_id, None)) is not None:
            self._memory_bytes -= len(content)
        if (size := self._disk.pop(session_id, None)) is not None:
            self._disk_bytes -= size
            with contextlib.suppress(OSError):
                self._path(session_id).unlink()

    def _path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}{_SUFFIX}"


def _held(content: memoryview) -> memoryview:
    """A copy in mmap pages, which return to the system when it is dropped; memory that malloc frees may not."""
    pages = mmap.mmap(-1, max(1, len(content)))
    pages.write(content)
    return memoryview(pages)[: len(content)]
