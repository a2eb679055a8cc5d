"""Whether SQLite has cut the end of its write-ahead log. It does so without a word; we say it.

A log is a header of 32 bytes and frames, each 24 bytes and one page. A frame belongs to the current log if its
salt is the header's, and ends a transaction if its second word is not 0 (https://www.sqlite.org/fileformat2.html).
"""

import logging
import sqlite3
import struct
from pathlib import Path

logger = logging.getLogger(__name__)


def report_cut_tail(path: Path, connection: sqlite3.Connection) -> None:
    """Log how much of the log beside the database at `path` was not whole when `connection` was opened."""
    frames = _frames(path.with_name(f"{path.name}-wal"))  # before the checkpoint, which may begin a new log
    num_kept = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
    if num_kept < 0 or len(frames) <= num_kept:
        return
    num_ends = sum(frames[num_kept:])
    logger.log(
        logging.ERROR if num_ends else logging.WARNING,
        "%s: the last %d pages of the write-ahead log were not whole and were cut; %s",
        path,
        len(frames) - num_kept,
        f"{num_ends} commits ended there, acknowledged ones may be lost"
        if num_ends
        else "nothing acknowledged is lost",
    )


def _frames(path: Path) -> list[bool]:
    """For each frame of the log as it lies there: does it end a transaction?"""
    frames: list[bool] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return frames
    with file:
        header = file.read(32)
        if len(header) < 32:
            return frames
        page_bytes, salt = struct.unpack(">I", header[8:12])[0], header[16:24]
        while len(frame := file.read(24)) == 24 and frame[8:16] == salt:
            frames.append(frame[4:8] != bytes(4))
            file.seek(page_bytes, 1)
    return frames
