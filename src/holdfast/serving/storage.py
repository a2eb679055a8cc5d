"""Opens what a server has on disk: the journal, snapshots, and the sessions of the process before."""

import contextlib
import json
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
from holdfast.sessions.ports import ModelInfo

_MB = 1024 * 1024
_MODEL = "model.json"


@dataclass(frozen=True, slots=True)
class Storage:
    journal: Journal
    snapshots: SnapshotStore
    stored: tuple[StoredSession, ...] = ()


@contextlib.contextmanager
def open_storage(config: ServeConfig, metrics: Metrics, model: ModelInfo) -> Iterator[Storage]:
    """Blocks while it checks and reads what is there. Without a data directory nothing outlives the context.

    A directory belongs to the tokenizer that it was first used with: under another one its tokens would say something
    else, so that is refused.
    """
    memory = config.snapshot_memory_mb * _MB
    if not config.data_dir:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            snapshots = SnapshotStore(Path(folder), budget_bytes=0, memory_budget_bytes=memory)
            yield Storage(NoJournal(), snapshots)
        return
    directory = Path(config.data_dir).expanduser()
    _check_tokenizer(directory, model)
    journal = SqliteJournal(directory, on_commit=lambda seconds, num_writes: metrics.journal_commit.observe(seconds))
    metrics.journal_cut_commits.set(journal.num_cut_commits)
    try:
        _note_tokenizer(directory, model)
        snapshots = SnapshotStore(
            directory / "snapshots", budget_bytes=config.snapshot_disk_mb * _MB, memory_budget_bytes=memory
        )
    except OSError as exc:
        raise ConfigError(f"cannot use the data directory {directory}: {exc}") from exc
    yield Storage(journal, snapshots, tuple(journal.load()))


def _check_tokenizer(directory: Path, model: ModelInfo) -> None:
    try:
        theirs = json.loads((directory / _MODEL).read_text(encoding="utf-8"))
        name, tokenizer_hash = str(theirs["name"]), str(theirs["tokenizer_hash"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"cannot use the data directory {directory}: {_MODEL} is damaged ({exc})") from exc
    if model.tokenizer_hash and tokenizer_hash != model.tokenizer_hash:
        raise ConfigError(
            f"the data directory {directory} was used with {name!r}, which has another tokenizer than {model.name!r}; "
            "use another --data-dir, or serve that model"
        )


def _note_tokenizer(directory: Path, model: ModelInfo) -> None:
    path = directory / _MODEL
    if model.tokenizer_hash and not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"name": model.name, "tokenizer_hash": model.tokenizer_hash}), encoding="utf-8")
        fresh.replace(path)
