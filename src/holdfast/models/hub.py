"""Models on the Hugging Face hub, by its own package: found in its local cache first, fetched where they are not.

Only safetensors, tokenizer, template and config files are fetched, by name: never code, never pickles, and never the
second copy of the weights that some repositories have in a folder.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ModelError
from holdfast.models.tiktoken_file import NAMES as TIKTOKEN_FILES

CONFIG_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
VOCABULARY = "tokenizer.json"  # or, without it, one of TIKTOKEN_FILES
WEIGHTS, WEIGHT_INDEX = "model.safetensors", "model.safetensors.index.json"

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    """One revision of a repository: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRevision:
    """What the local cache has of one revision. `name` includes the revision where it is not the main one."""

    name: str
    commit: str
    num_bytes: int
    has_weights: bool


def parse_id(argument: str) -> HubModel | None:
    """The model if this is `org/name` or `org/name@revision`."""
    found = _ID.fullmatch(argument)
    return HubModel(found[1], found[2] or "main") if found else None


def find(model: HubModel, *, tokenizer_only: bool, is_offline: bool = False) -> Path | None:
    """The model's directory in the local cache; None if it lacks something. Uses no network.

    A file is needed unless the hub is known to have none of that name. Offline that cannot be found out: then it is
    enough that there are a vocabulary and, if they are needed, all weights.
    """
    hub = _package()
    names = (*CONFIG_FILES, VOCABULARY, *TIKTOKEN_FILES)
    known = {name: hub.try_to_load_from_cache(model.repository, name, revision=model.revision) for name in names}
    folders = [Path(path).parent for path in known.values() if isinstance(path, str)]
    if not folders:
        return None
    folder = folders[0]
    has_vocabulary = any(isinstance(known[name], str) for name in (VOCABULARY, *TIKTOKEN_FILES))
    unknown = [name for name in CONFIG_FILES if known[name] is None and not _is_spared(name, folder)]
    is_complete = has_vocabulary and (is_offline or not unknown)
    return folder if is_complete and (tokenizer_only or _has_weights(folder)) else None


def fetch(model: HubModel, *, tokenizer_only: bool) -> Path:
    """The model's directory in the local cache, brought up to date. Blocks, and shows progress on stderr.

    Without access to the hub, what the cache has is used if it is complete; otherwise ModelError says what to do.
    """
    hub = _package()
    errors = hub.errors
    try:
        return _download(hub, model, tokenizer_only=tokenizer_only)
    except ModelError:
        raise
    except errors.GatedRepoError as exc:
        raise ModelError(
            f"{model} is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelError(
            f"no model {str(model)!r}: there is no such directory here and no such repository on the hub; a private "
            "one needs HF_TOKEN"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise ModelError(f"{model.repository} has no revision {model.revision!r} on the hub") from exc
    except Exception as exc:  # each version of the package has its own errors of connections
        is_offline = isinstance(exc, errors.OfflineModeIsEnabled)
        if folder := find(model, tokenizer_only=tokenizer_only, is_offline=True):
            if not is_offline:
                logger.warning("the hub cannot be used (%s); %s is taken from the local cache", _reason(exc), model)
            return folder
        if is_offline:
            raise ModelError(
                f"{model} is not complete in the local cache, and HF_HUB_OFFLINE forbids to fetch it; unset that, or "
                f"run elsewhere: holdfast models pull {model}"
            ) from exc
        raise ModelError(
            f"cannot fetch {model} from the hub ({_reason(exc)}), and the local cache does not have all of it; try "
            "again: files that have arrived are kept"
        ) from exc


def cached_revisions() -> list[CachedRevision]:
    """Every revision of a model in the local cache."""
    return [
        CachedRevision(
            name=str(HubModel(repository.repo_id, _revision_name(revision))),
            commit=revision.commit_hash,
            num_bytes=revision.size_on_disk,
            has_weights=any(file.file_name.endswith(".safetensors") for file in revision.files),
        )
        for repository in sorted(_cached_repositories(), key=lambda one: str(one.repo_id))
        for revision in sorted(repository.revisions, key=lambda one: str(one.commit_hash))
    ]


def plan_removal(argument: str) -> Any:
    """The hub's plan to delete a model from the cache: `expected_freed_size`, and `execute`. ModelError if not there.

    With a revision only that one is deleted, without one all of them.
    """
    model = parse_id(argument)
    for repository in _cached_repositories():
        if model and repository.repo_id == model.repository:
            commits = [
                one.commit_hash
                for one in repository.revisions
                if "@" not in argument or model.revision in one.refs or one.commit_hash.startswith(model.revision)
            ]
            if commits:
                return _package().scan_cache_dir().delete_revisions(*commits)
    raise ModelError(f"{argument} is not in the local cache of the hub; holdfast models list shows what is")


def _download(hub: Any, model: HubModel, *, tokenizer_only: bool) -> Path:
    commit = hub.HfApi().model_info(model.repository, revision=model.revision, timeout=_TIMEOUT_S).sha

    def get(name: str, revision: str = commit) -> Path | None:
        """The file, or None if the hub has none of that name, which the cache keeps in mind."""
        try:
            return Path(hub.hf_hub_download(model.repository, name, revision=revision))
        except hub.errors.LocalEntryNotFoundError:  # no connection
            raise
        except hub.errors.EntryNotFoundError:
            return None

    found = [get(name) for name in CONFIG_FILES]
    found += [get(VOCABULARY)]
    if not found[-1]:
        found += [get(name) for name in TIKTOKEN_FILES]
    files = [path for path in found if path]
    if not tokenizer_only:
        index = get(WEIGHT_INDEX)
        names = _weight_names(index) if index else [WEIGHTS]
        weights = [get(name) for name in names]
        if not all(weights):
            missing = names[weights.index(None)]
            raise ModelError(f"{model} has no {missing} on the hub: only weights in safetensors files are fetched")
        files += [path for path in weights if path]
    if not files:
        raise ModelError(f"{model} has no tokenizer and no config.json on the hub")
    if model.revision != commit:
        get(files[0].name, model.revision)  # last: now the cache notes that the revision is this commit
    return files[0].parent


def _weight_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as exc:
        raise ModelError(f"{index} has no usable weight_map") from exc
    if other := [name for name in names if not name.endswith(".safetensors")]:
        raise ModelError(f"{index} names {other[0]}, which is not a safetensors file")
    return names


def _has_weights(folder: Path) -> bool:
    index = folder / WEIGHT_INDEX
    names = _weight_names(index) if index.is_file() else [WEIGHTS]
    return all((folder / name).is_file() for name in names)


def _is_spared(name: str, folder: Path) -> bool:
    """Whether a model is complete without this file: there is a template already."""
    if not name.startswith("chat_template"):
        return False
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    return file.is_file() or (config.is_file() and b'"chat_template"' in config.read_bytes())


def _cached_repositories() -> list[Any]:
    hub = _package()
    try:
        return [one for one in hub.scan_cache_dir().repos if one.repo_type == "model"]
    except hub.errors.CacheNotFound:
        return []


def _revision_name(revision: Any) -> str:
    refs = sorted(revision.refs)
    return "main" if "main" in refs else refs[0] if refs else str(revision.commit_hash)


def _reason(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _package() -> Any:
    """The hub's package, which takes a while to import: only those who need it do."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as exc:
        raise ModelError("models on the hub need the huggingface_hub package: pip install huggingface_hub") from exc
    return huggingface_hub
