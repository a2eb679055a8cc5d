"""Snapshots of parked sessions: in host memory first, then on this server's disk or where all servers reach them.

A snapshot is a shortcut: a session whose snapshot is gone recomputes from its history. So nothing that fails here is an
error, and a damaged snapshot is as good as none. Every method but the sizes blocks: call them off the loop.
"""

import contextlib
import logging
import mmap
import os
import queue
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from holdfast.errors import InvalidArgument
from holdfast.sessions.journal.blobs import BlobStore, open_blobs
from holdfast.sessions.journal.files import make_directory, open_private

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQI")  # magic, length, CRC-32
_MAGIC = b"HFSNAP1\n"
_SUFFIX = ".snapshot"
_MAX_KNOWN = 100_000  # names of shared snapshots that are remembered
_MAX_REQUESTS = 8  # to a shared store at once
_MAX_DELETED = 1000  # in one request
_SHARE_S = 10.0  # for all that is shared at once

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class SnapshotTier(Protocol):
    """Where snapshots go for which memory has no room. Thread-safe."""

    @property
    def is_shared(self) -> bool:
        """Whether other servers reach them."""

    @property
    def num_bytes(self) -> int:
        """On this server's disk."""

    def ids(self) -> list[str]:
        """Those that are known to be here, the least recently used first."""

    def put(self, session_id: str, content: Buffer) -> bool:
        """Keep `content` instead of what there was; False where that failed."""

    def get(self, session_id: str) -> bytes | None:
        """As it was put, or None."""

    def delete(self, session_id: str) -> None:
        """Does nothing where there is none."""

    def delete_all(self, prefix: str) -> None:
        """Those whose ids begin so."""

    def outdate(self, session_id: str) -> None:
        """There is a newer one in memory."""

    def find(self, prefix: str) -> None:
        """Look up those whose ids begin so: they are known from now on."""

    def __contains__(self, session_id: str) -> bool:
        """Whether it is known to be here. Does not block."""


class SnapshotStore:
    """Thread-safe. What was used least recently goes first, from memory to `tier`."""

    def __init__(self, tier: SnapshotTier, *, memory_budget_bytes: int = 0) -> None:
        self._tier = tier
        self._memory_budget_bytes = memory_budget_bytes
        self._lock = threading.Lock()  # never held while the tier is asked
        self._spilling = threading.Lock()  # one at a time moves snapshots to the tier
        self._memory: OrderedDict[str, memoryview] = OrderedDict()  # least recently used first
        self._memory_bytes = 0

    @property
    def is_shared(self) -> bool:
        """Whether other servers reach those that are not in memory."""
        return self._tier.is_shared

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def disk_bytes(self) -> int:
        return self._tier.num_bytes

    def __len__(self) -> int:
        return len(self.ids())

    def ids(self) -> list[str]:
        """Whose snapshots are known, those that go first at the beginning."""
        with self._lock:
            return [*self._tier.ids(), *self._memory]

    def put(self, session_id: str, content: Buffer) -> bool:
        """Keep `content` instead of what there was; False where there is no room for it."""
        if not session_id.isalnum():
            raise InvalidArgument(f"{session_id!r} is not the id of a session")
        content = memoryview(content).cast("B")
        with self._lock:
            self._drop(session_id)
        if len(content) > self._memory_budget_bytes:
            return self._tier.put(session_id, content)
        self._tier.outdate(session_id)
        with self._lock:
            self._memory[session_id] = _held(content)
            self._memory_bytes += len(content)
        self._spill(keep_bytes=self._memory_budget_bytes)
        return True

    def get(self, session_id: str) -> bytes | None:
        """The snapshot as it was put, or None: evicted, damaged, never there. It stays, as used just now."""
        with self._lock:
            if session_id in self._memory:
                self._memory.move_to_end(session_id)
                return bytes(self._memory[session_id])
        return self._tier.get(session_id)

    def delete(self, session_id: str) -> None:
        """Does nothing where there is none."""
        with self._lock:
            self._drop(session_id)
        self._tier.delete(session_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._memory or session_id in self._tier

    def delete_all(self, prefix: str) -> None:
        """Delete those whose ids begin so."""
        with self._lock:
            for session_id in [id for id in self._memory if id.startswith(prefix)]:
                self._drop(session_id)
        self._tier.delete_all(prefix)

    def find(self, prefix: str) -> None:
        """Look up the snapshots that other servers have left, so that `in` knows of them."""
        self._tier.find(prefix)

    def share(self, prefixes: Sequence[str]) -> None:
        """Bring those whose ids begin so from memory to where other servers reach them. What that takes too long for
        stays in memory."""
        deadline = time.monotonic() + _SHARE_S
        for prefix in prefixes:
            if self._tier.is_shared and time.monotonic() < deadline:
                self._spill(keep_bytes=-1, prefix=prefix)

    def spill(self) -> None:
        """Bring to disk what is in memory, as far as there is room; for a shutdown."""
        self._spill(keep_bytes=-1)

    def _spill(self, *, keep_bytes: int, prefix: str = "") -> None:
        with self._spilling:
            while True:
                with self._lock:
                    oldest = next((id for id in self._memory if id.startswith(prefix)), None)
                    if oldest is None or self._memory_bytes <= keep_bytes:
                        return
                    content = self._memory[oldest]
                self._tier.put(oldest, content)
                with self._lock:
                    is_current = self._memory.get(oldest) is content
                    if is_current:
                        self._drop(oldest)
                if not is_current:  # deleted or replaced meanwhile
                    self._tier.delete(oldest)

    def _drop(self, session_id: str) -> None:
        """From memory, under the lock."""
        if (content := self._memory.pop(session_id, None)) is not None:
            self._memory_bytes -= len(content)


class LocalSnapshots:
    """In a directory of this server alone, within a budget."""

    def __init__(self, directory: Path, *, budget_bytes: int) -> None:
        make_directory(directory)
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # id -> size of the file, least recently used first
        self._num_bytes = 0
        for path in directory.glob("*.new"):
            path.unlink()
        found = [(path.stat(), path.stem) for path in directory.glob(f"*{_SUFFIX}")]
        for stat, session_id in sorted(found, key=lambda item: item[0].st_mtime_ns):
            self._sizes[session_id] = stat.st_size
            self._num_bytes += stat.st_size
        self._make_room(0)

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._sizes)

    def put(self, session_id: str, content: Buffer) -> bool:
        size = _HEADER.size + len(content)
        path = self._path(session_id)
        new = path.with_suffix(".new")
        with self._lock:
            self._drop(session_id)
            if not self._make_room(size):
                return False
            try:
                with os.fdopen(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                    file.write(_header(content))
                    file.write(content)
                os.replace(new, path)
            except OSError as exc:
                logger.warning("the snapshot of session %s is not kept: %s", session_id, exc)
                with contextlib.suppress(OSError):
                    new.unlink()
                return False
            self._sizes[session_id] = size
            self._num_bytes += size
            return True

    def get(self, session_id: str) -> bytes | None:
        with self._lock:
            if session_id not in self._sizes:
                return None
            try:
                content = _content(self._path(session_id).read_bytes(), session_id)
            except OSError as exc:
                logger.warning("the snapshot of session %s cannot be read: %s", session_id, exc)
                content = None
            if content is None:
                self._drop(session_id)
            else:
                self._sizes.move_to_end(session_id)
                with contextlib.suppress(OSError):
                    os.utime(self._path(session_id))  # the order outlives the process
            return content

    def delete(self, session_id: str) -> None:
        with self._lock:
            self._drop(session_id)

    outdate = delete

    def delete_all(self, prefix: str) -> None:
        with self._lock:
            for session_id in [id for id in self._sizes if id.startswith(prefix)]:
                self._drop(session_id)

    def find(self, prefix: str) -> None:
        pass

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sizes

    # Under the lock

    def _make_room(self, size: int) -> bool:
        if size > self._budget_bytes:
            return False
        while self._num_bytes + size > self._budget_bytes:
            self._drop(next(iter(self._sizes)))
        return True

    def _drop(self, session_id: str) -> None:
        if (size := self._sizes.pop(session_id, None)) is not None:
            self._num_bytes -= size
            with contextlib.suppress(OSError):
                self._path(session_id).unlink()

    def _path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}{_SUFFIX}"


class SharedSnapshots:
    """Where all servers of a cluster reach them, without an index: looked up by name.

    A store that fails, or does not answer within `patience_s`, is not asked again for `pause_s`: until then there are
    no snapshots. Deleting is done later, by a thread; what is not deleted then is left to the store's own rules.
    """

    def __init__(self, blobs: BlobStore, *, patience_s: float = 10.0, pause_s: float = 30.0) -> None:
        self._blobs = blobs
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._paused_until = 0.0
        self._requests = threading.Semaphore(_MAX_REQUESTS)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._doomed: queue.Queue[tuple[str, bool]] = queue.Queue(10 * _MAX_DELETED)  # names, or what they begin with
        threading.Thread(target=self._delete_doomed, name="holdfast-snapshots", daemon=True).start()

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def num_bytes(self) -> int:
        return 0

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._known)

    def put(self, session_id: str, content: Buffer) -> bool:
        data = _header(content) + bytes(content)

        def put() -> bool:
            self._blobs.put(session_id, data)
            return True

        is_kept = self._ask(put, default=False)
        if is_kept:
            self._know(session_id)
        return is_kept

    def get(self, session_id: str) -> bytes | None:
        data = self._ask(lambda: self._blobs.get(session_id), default=None)
        content = None if data is None else _content(data, session_id)
        if content is not None:
            self._know(session_id)
        elif data is not None:
            self.delete(session_id)
        else:
            self._forget(session_id)
        return content

    def delete(self, session_id: str) -> None:
        self._doom(session_id, is_prefix=False)

    def delete_all(self, prefix: str) -> None:
        self._doom(prefix, is_prefix=True)

    def outdate(self, session_id: str) -> None:
        """It stays until the newer one is put: one of another history is found out when it is restored."""

    def find(self, prefix: str) -> None:
        nothing: list[str] = []
        for session_id in self._ask(lambda: self._blobs.keys(prefix), default=nothing):
            self._know(session_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._known

    def _know(self, session_id: str) -> None:
        with self._lock:
            self._known[session_id] = None
            self._known.move_to_end(session_id)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, prefix: str, *, is_prefix: bool = False) -> None:
        with self._lock:
            for session_id in [id for id in self._known if id.startswith(prefix)] if is_prefix else [prefix]:
                self._known.pop(session_id, None)

    def _ask(self, call: Callable[[], T], *, default: T) -> T:
        """What the store answers, in time; `default` where it does not, or does not have it."""
        deadline = time.monotonic() + self._patience_s
        if time.monotonic() < self._paused_until:
            return default
        answer: queue.SimpleQueue[tuple[T, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((call(), None))
            except Exception as exc:  # noqa: BLE001 - it is the answer
                answer.put((default, exc))
            finally:
                self._requests.release()

        problem: Exception | None = TimeoutError(f"no answer within {self._patience_s:g} s")
        value = default
        if self._requests.acquire(timeout=self._patience_s):
            threading.Thread(target=run, name="holdfast-snapshot", daemon=True).start()
            with contextlib.suppress(queue.Empty):
                value, problem = answer.get(timeout=max(0.0, deadline - time.monotonic()))
        if problem is not None and not isinstance(problem, FileNotFoundError):
            self._paused_until = time.monotonic() + self._pause_s
            logger.warning(
                "shared snapshots are not used for %g s, and histories are computed again: %s", self._pause_s, problem
            )
        return value

    def _doom(self, name: str, *, is_prefix: bool) -> None:
        self._forget(name, is_prefix=is_prefix)
        try:
            self._doomed.put_nowait((name, is_prefix))
        except queue.Full:
            logger.warning("the shared snapshot %s is not deleted: too many are waiting to be", name)

    def _delete_doomed(self) -> None:
        while True:
            batch = [self._doomed.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _MAX_DELETED:
                    batch.append(self._doomed.get_nowait())
            self._ask(lambda names=batch: self._delete_now(names), default=None)  # type: ignore[misc]

    def _delete_now(self, names: list[tuple[str, bool]]) -> None:
        found = [[name] if not is_prefix else self._blobs.keys(name) for name, is_prefix in names]
        self._blobs.delete([name for part in found for name in part])


def open_tier(shared: str, directory: Path, *, budget_bytes: int) -> SnapshotTier:
    """Where all servers reach the snapshots, if `shared` names a place; otherwise in `directory`."""
    return SharedSnapshots(open_blobs(shared)) if shared else LocalSnapshots(directory, budget_bytes=budget_bytes)


def _header(content: Buffer) -> bytes:
    return _HEADER.pack(_MAGIC, len(content), zlib.crc32(content))


def _content(data: bytes, session_id: str) -> bytes | None:
    """What was kept; None where it is damaged."""
    if len(data) >= _HEADER.size:
        magic, length, checksum = _HEADER.unpack_from(data)
        content = data[_HEADER.size :]
        if magic == _MAGIC and len(content) == length and zlib.crc32(content) == checksum:
            return content
    logger.warning("the snapshot of session %s is damaged and was removed", session_id)
    return None


def _held(content: memoryview) -> memoryview:
    """A copy in mmap pages, which return to the system when it is dropped; memory that malloc frees may not."""
    pages = mmap.mmap(-1, max(1, len(content)))
    pages.write(content)
    return memoryview(pages)[: len(content)]
