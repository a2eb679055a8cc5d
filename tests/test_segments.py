"""Segment files: what was appended is read back as it was, whichever way the disk takes it."""

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.sessions.journal import segments
from holdfast.sessions.journal.segments import SegmentPosition, Segments

LENGTHS = [1, 4095, 4096, 4097, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2_500_000]


def opened(directory: Path, ends: dict[int, int] | None = None, *, most: int = 1 << 30) -> Segments:
    return Segments(directory, ends=ends or {}, max_segment_bytes=most)


def content(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def appended(files: Segments, lengths: list[int]) -> dict[SegmentPosition, bytes]:
    """What lies where once it is committed."""
    found = {files.append(content(length)): content(length) for length in lengths}
    files.sync()
    files.keep()
    return found


def assert_there(files: Segments, bodies: dict[SegmentPosition, bytes]) -> None:
    for place, body in bodies.items():
        assert files.read(*place, len(body)) == body


def refusing(plain: Callable[..., int]) -> Callable[..., int]:
    """A disk that takes nothing directly, as one with large blocks does."""

    def pwrite(file: int, *values: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & segments._DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(file, *values)

    return pwrite


def in_parts(plain: Callable[..., int]) -> Callable[..., int]:
    """A disk that takes less than it is given."""
    return lambda file, data, start: plain(file, data[:8192], start)


@pytest.mark.parametrize("disk", ["direct", "cached", "refusing", "in parts"])
def test_bodies_of_any_length_are_read_as_they_were_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    if disk == "cached":
        monkeypatch.setattr(segments, "_DIRECT", 0)
    elif disk != "direct":
        monkeypatch.setattr(os, "pwrite", (refusing if disk == "refusing" else in_parts)(os.pwrite))
    files = opened(tmp_path)
    bodies = appended(files, LENGTHS)
    assert_there(files, bodies)
    files.append(content(50_000))
    files.discard()
    last = max(bodies)
    files.close()
    end = last.start + len(bodies[last])
    again = opened(tmp_path, {last.segment: end})
    bodies |= appended(again, LENGTHS)
    assert_there(again, bodies)
    assert all(place.start % 4096 == 0 for place in bodies)
    again.close()


def test_a_file_whose_bodies_lie_side_by_side_is_read_and_continued(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    (tmp_path / "00000001.segment").write_bytes(content(1000) + content(2000))
    files = opened(tmp_path, {1: 3000})
    bodies = {SegmentPosition(1, 0): content(1000), SegmentPosition(1, 1000): content(2000)}
    assert_there(files, bodies)
    bodies |= appended(files, [5000])
    assert_there(files, bodies)
    files.close()


def test_a_body_that_does_not_fit_begins_the_next_file(tmp_path: Path) -> None:
    files = opened(tmp_path, most=10_000)
    bodies = appended(files, [20_000, 5000, 5000, 1000])
    assert [place.segment for place in bodies] == [1, 2, 3, 3]
    assert_there(files, bodies)
    files.close()
