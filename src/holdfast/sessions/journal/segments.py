"""Large bodies in append-only files. Their positions and checksums are in the database.

One thread appends: `append` any number of times, `sync`, and after the commit `keep`, or `discard` if there was none.
Any thread may `read`. Everything blocks.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.sessions.journal.files import is_same_file, make_directory, open_private, sync, sync_directory

logger = logging.getLogger(__name__)

_PROBE_BYTES = 64 * 1024
_BLOCK = 4096  # bodies begin at multiples of it, and whole blocks are written: disks take nothing else directly
_BUFFER_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # past the system's cache, which would take a new page for every 4 KiB


class SegmentPosition(NamedTuple):
    segment: int
    start: int


class SegmentReader:
    """Reads the files, in any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, segment: int, start: int, length: int) -> bytes:
        """Raises OSError, or gives fewer bytes, where the file no longer has them."""
        with self._path(segment).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.segment"


class Segments(SegmentReader):
    """`ends` says up to where each file is committed; what lies beyond was never acknowledged and is cut."""

    def __init__(self, directory: Path, *, ends: Mapping[int, int], max_segment_bytes: int) -> None:
        super().__init__(directory)
        make_directory(directory)
        self._max_segment_bytes = max_segment_bytes
        self._files: dict[int, int] = {}  # segment -> descriptor, those that are being appended to
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page, as direct writing needs it
        self._unsynced: set[int] = set()
        for segment in self._present():
            self._cut(segment, ends.get(segment, 0))
        for segment in sorted(ends.keys() - set(self._present())):
            logger.error("%s is missing; the replies in it cannot be read", self._path(segment))
        self._end = SegmentPosition(max(ends, default=1), 0)
        self._end = self._kept = SegmentPosition(self._end.segment, ends.get(self._end.segment, 0))

    def append(self, content: bytes) -> SegmentPosition:
        """Where `content` now lies, though not yet for good."""
        start = _whole_blocks(self._end.start)
        place = SegmentPosition(self._end.segment, start)
        if start and start + len(content) > self._max_segment_bytes:
            place = SegmentPosition(self._end.segment + 1, 0)
        file = self._file(place.segment)
        view = memoryview(content)
        for at in range(0, len(view), _BUFFER_BYTES):
            self._write(file, view[at : at + _BUFFER_BYTES], place.start + at)
        self._end = SegmentPosition(place.segment, place.start + len(content))
        self._unsynced.add(place.segment)
        return place

    def _write(self, file: int, content: memoryview, start: int) -> None:
        size = len(content)
        self._buffer[:size] = content
        self._buffer[size : _whole_blocks(size)] = bytes(_whole_blocks(size) - size)
        with memoryview(self._buffer) as buffer:
            at = 0
            while at < size:
                with buffer[at : _whole_blocks(size)] as rest:
                    at += _write_at(file, rest, start + at)

    def sync(self) -> None:
        """What was appended survives a loss of power."""
        for segment in sorted(self._unsynced):
            if not is_same_file(self._path(segment), os.fstat(self._files[segment])):
                os.close(self._files.pop(segment))  # it is made again; what was in it is damaged
                raise OSError(f"{self._path(segment)} was deleted or replaced while the server runs")
            sync(self._files[segment])
        self._unsynced.clear()

    def keep(self) -> None:
        """What was appended since the last `keep` is committed."""
        for segment in [segment for segment in self._files if segment != self._end.segment]:
            os.close(self._files.pop(segment))
        self._kept = self._end

    def discard(self) -> None:
        """Discard what was appended since the last `keep`; its space is used again."""
        self._end = self._kept
        self._unsynced.clear()
        for segment, file in list(self._files.items()):
            with contextlib.suppress(OSError):  # then it is overwritten, or cut at the next start
                if segment == self._kept.segment:
                    os.ftruncate(file, self._kept.start)
                else:
                    os.close(self._files.pop(segment))
                    self._path(segment).unlink()

    def remove_unused(self, used: Collection[int]) -> None:
        """Delete the files that hold nothing any more."""
        for segment in self._present():
            if segment not in used and segment < self._kept.segment:
                self._path(segment).unlink(missing_ok=True)

    def probe(self) -> None:
        """Raises OSError where nothing can be written. Leaves nothing behind."""
        try:
            self.append(bytes(_PROBE_BYTES))
            self.sync()
        finally:
            self.discard()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _present(self) -> list[int]:
        names = (path.stem for path in self._directory.glob("*.segment"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, segment: int) -> int:
        if segment not in self._files:
            self._files[segment] = _open(self._path(segment))
            sync_directory(self._directory)
        return self._files[segment]

    def _cut(self, segment: int, end: int) -> None:
        path = self._path(segment)
        size = path.stat().st_size
        if size < end:
            logger.error("%s has %d bytes instead of %d; the replies at its end cannot be read", path, size, end)
        elif not end:
            logger.warning("removed %s: none of its %d bytes was acknowledged", path, size)
            path.unlink()
        elif size > (end := _whole_blocks(end)):
            logger.warning("%s: removed %d bytes at the end that were never acknowledged", path, size - end)
            os.truncate(path, end)


def _whole_blocks(num_bytes: int) -> int:
    """So many bytes, rounded up."""
    return -(-num_bytes // _BLOCK) * _BLOCK


def _open(path: Path) -> int:
    try:
        return open_private(path, os.O_RDWR | os.O_CREAT | _DIRECT)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return open_private(path, os.O_RDWR | os.O_CREAT)  # a file system that always uses the cache


def _write_at(file: int, content: memoryview, start: int) -> int:
    """How many bytes were written."""
    try:
        return os.pwrite(file, content, start)
    except OSError as exc:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if exc.errno != errno.EINVAL or not flags & _DIRECT:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)  # a disk with larger blocks
        return os.pwrite(file, content, start)
