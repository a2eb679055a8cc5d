"""Where a server keeps its sessions: opens the journal and the snapshots that the settings name, and checks that they
belong to the model that is served."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import ServeConfig
from holdfast.errors import ConfigError, StorageUnavailable
from holdfast.extras import how_to_install
from holdfast.metrics import Metrics
from holdfast.sessions.journal.base import Journal, NoJournal
from holdfast.sessions.journal.blobs import usable_blobs
from holdfast.sessions.journal.schema import MODEL, note_model, noted_model, room_advice, salvage_advice
from holdfast.sessions.journal.snapshots import SnapshotStore, open_tier
from holdfast.sessions.journal.sqlite import SqliteJournal
from holdfast.sessions.ports import ModelInfo

logger = logging.getLogger(__name__)

_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Storage:
    journal: Journal
    snapshots: SnapshotStore


@contextlib.contextmanager
def open_storage(config: ServeConfig, metrics: Metrics, model: ModelInfo) -> Iterator[Storage]:
    """Blocks while it checks and reads what is there. Without a data directory nothing outlives the context.

    A directory belongs to the tokenizer that it was first used with: under another one its tokens would say something
    else, so that is refused.
    """
    memory = config.snapshot_memory_mb * _MB
    if not config.data_dir:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            tier = open_tier(config.snapshots, Path(folder), budget_bytes=0)
            journal: Journal = _postgres(config, metrics, model) if config.journal else NoJournal()
            yield Storage(journal, SnapshotStore(tier, memory_budget_bytes=memory))
        return
    directory = Path(config.data_dir).expanduser()
    noted = noted_model(directory)
    if noted and model.tokenizer_hash and noted["tokenizer_hash"] != model.tokenizer_hash:
        raise ConfigError(
            f"the data directory {directory} was used with {noted['name']!r}, which has another tokenizer than "
            f"{model.name!r}; use another --data-dir, or serve that model"
        )
    journal = SqliteJournal(
        directory,
        on_commit=lambda seconds, num_writes: metrics.journal_commit.observe(seconds),
        on_damage=lambda: metrics.journal_damaged.set(1),
    )
    metrics.journal_cut_commits.set(journal.num_cut_commits)
    try:
        if noted is None and model.tokenizer_hash:
            if journal.last_number:
                logger.warning("%s has no %s: its sessions are taken for those of %s", directory, MODEL, model.name)
            note_model(directory, _facts(model))
        tier = open_tier(config.snapshots, directory / "snapshots", budget_bytes=config.snapshot_disk_mb * _MB)
    except OSError as exc:
        raise ConfigError(f"cannot use the data directory {directory}: {exc}. {room_advice(directory)}") from exc
    except StorageUnavailable as exc:
        raise ConfigError(f"{exc}. {salvage_advice(directory)}") from exc
    yield Storage(journal, SnapshotStore(tier, memory_budget_bytes=memory))


def _postgres(config: ServeConfig, metrics: Metrics, model: ModelInfo) -> Journal:
    try:
        from holdfast.sessions.journal.postgres import PostgresJournal
    except ModuleNotFoundError as exc:
        raise ConfigError(f"--journal needs the package {exc.name}; {how_to_install('postgres')}") from exc
    return PostgresJournal(
        config.journal,
        lease_s=config.lease_s,
        blobs=usable_blobs(config.blobs) if config.blobs else None,
        model=_facts(model) if model.tokenizer_hash else None,
        on_commit=lambda seconds, num_writes: metrics.journal_commit.observe(seconds),
        on_renewed=metrics.member_renew.observe,
        on_takeover=metrics.cluster_takeovers.inc,
    )


def _facts(model: ModelInfo) -> dict[str, str]:
    return {"name": model.name, "tokenizer_hash": model.tokenizer_hash}
