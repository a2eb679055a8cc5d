"""What a server keeps outside its slabs: journal, snapshots of parked sessions, what an earlier process left."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import ServeConfig
from holdfast.errors import ConfigError
from holdfast.observability.metrics import Metrics
from holdfast.sessions.journal.base import Journal, NoJournal, StoredSession
from holdfast.sessions.journal.snapshots import SnapshotStore
from holdfast.sessions.journal.sqlite import SqliteJournal

_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Storage:
    journal: Journal
    snapshots: SnapshotStore
    stored: tuple[StoredSession, ...] = ()


@contextlib.contextmanager
def open_storage(config: ServeConfig, metrics: Metrics) -> Iterator[Storage]:
    """Blocks while it checks and reads what is there. Without a data directory nothing outlives the context."""
    memory = config.snapshot_memory_mb * _MB
    if not config.data_dir:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            snapshots = SnapshotStore(Path(folder), budget_bytes=0, memory_budget_bytes=memory)
            yield Storage(NoJournal(), snapshots)
        return
    directory = Path(config.data_dir).expanduser()
    journal = SqliteJournal(directory, on_commit=lambda seconds, num_writes: metrics.journal_commit.observe(seconds))
    try:
        snapshots = SnapshotStore(
            directory / "snapshots", budget_bytes=config.snapshot_disk_mb * _MB, memory_budget_bytes=memory
        )
    except OSError as exc:
        raise ConfigError(f"cannot use the data directory {directory}: {exc}") from exc
    yield Storage(journal, snapshots, tuple(journal.load()))
