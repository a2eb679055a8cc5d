"""New weights for a running engine: checked as a whole first, then written over the old ones, one tensor at a time."""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.interface import Engine
from holdfast.engine.lora import LoraWeights, is_lora
from holdfast.engine.weights import TensorFile, WeightSource, as_float32, check_shape
from holdfast.errors import EngineDied, HoldfastError, ModelError
from holdfast.models.gguf_file import MAGIC, GGUFFile

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = ".rotary_emb.inv_freq"  # in old files; the engine computes these itself
_PIECE = 1 << 18  # values that are looked at together: they stay in the cache of a core
# The largest value that each dtype of an engine can hold: int8 has half-precision scales of 127 steps, and int4
# half-precision offsets.
_LARGEST = {"float32": 3.4e38, "bfloat16": 3.38e38, "fp8": 3.38e38, "int8": 127 * 65000.0, "int4": 65000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Tensors that fit an engine. `sums` are their checksums: they are read again when they are written."""

    source: WeightSource
    sums: Mapping[str, int]
    digest: str
    is_whole: bool  # whether the weights afterwards do not depend on those before


class WeightFiles:
    """The tensors of safetensors files that others may still change: nothing is mapped."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, TensorFile] = {}
        for path in paths:
            file = TensorFile(path, is_mapped=False)
            for name in file.names:
                if name in self._files:
                    raise ModelError(f"tensor {name} is in more than one file of {path.parent}")
                self._files[name] = file

    @property
    def names(self) -> list[str]:
        return [name for name in self._files if not name.endswith(_COMPUTED)]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> NDArray[np.generic]:
        return self._files[name].tensor(name)


class NewWeights(NamedTuple):
    """Tensors to be written, not checked yet. `is_complete`: together with the model that was loaded they are all that
    the weights depend on."""

    source: WeightSource
    names: Collection[str]
    is_complete: bool = False


def open_weights_at(path: Path, engine: Engine) -> NewWeights:
    """The weights at `path`: safetensors, a GGUF file, or a LoRA adapter for the model that the engine was loaded with.
    Raises ModelError where they cannot be read."""
    try:
        if is_lora(path):
            return _adapted(path, engine)
        is_folder = path.is_dir()
        is_gguf = not is_folder and _starts_with_magic(path)
    except (OSError, ValueError) as exc:  # ValueError: a zero byte in the path
        raise ModelError(f"cannot read {path} on the server: {exc}") from exc
    if is_gguf:
        gguf = GGUFFile(path)
        return NewWeights(gguf, [name for name in {*engine.weight_shapes(), _HEAD} if name in gguf])
    files = WeightFiles(_weight_files(path) if is_folder else [path])
    return NewWeights(files, files.names)


def _adapted(path: Path, engine: Engine) -> NewWeights:
    """An adapter belongs to the model as it was loaded, so tensors that were replaced since then are restored."""
    if engine.base_weights is None:
        raise ModelError(f"{path}: this engine cannot read its base model again, which an adapter needs")
    adapted = LoraWeights(engine.base_weights(), path)
    return NewWeights(adapted, engine.replaced_names.union(adapted.targets), is_complete=True)


def _starts_with_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelError(f"{index} has no usable weight_map: {exc}") from exc


def checked(weights: NewWeights, engine: Engine) -> WeightUpdate:
    """Reads every tensor once. Raises ModelError for the first that does not fit; the engine is only looked at."""
    source, names, is_complete = weights
    shapes = engine.weight_shapes()
    digest = hashlib.sha256()
    sums: dict[str, int] = {}
    for name in sorted(names):
        if name == _HEAD and name not in shapes:
            _check_tied(source)
            continue
        if name not in shapes:
            raise ModelError(f"tensor {name} is not one of this model's tensors")
        tensor = source.tensor(name)
        check_shape(name, tensor.shape, shapes[name])
        _check_values(name, tensor, _LARGEST[engine.info.dtype])
        content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(content)
        sums[name] = zlib.crc32(content)
    if not sums:
        raise ModelError("there are no tensors in it")
    is_whole = is_complete or sums.keys() == shapes.keys()
    return WeightUpdate(source=source, sums=sums, digest=digest.hexdigest(), is_whole=is_whole)


def _check_tied(source: WeightSource) -> None:
    if _EMBEDDING not in source or not np.array_equal(source.tensor(_EMBEDDING), source.tensor(_HEAD)):
        raise ModelError(f"tensor {_HEAD} differs from {_EMBEDDING}, and this model has the same weights for both")


def _check_values(name: str, tensor: NDArray[np.generic], largest: float) -> None:
    if tensor.dtype not in (np.float64, np.float32, np.float16, np.uint16):  # 16-bit integers are bfloat16
        raise ModelError(f"tensor {name} has type {tensor.dtype}; weights must be floating-point numbers")
    flat = tensor.reshape(-1)
    for first in range(0, flat.size, _PIECE):
        with np.errstate(over="ignore"):
            values = as_float32(flat[first : first + _PIECE])
        if not np.abs(values).max() <= largest:
            raise ModelError(f"tensor {name} has a value that is not finite, or too large for this engine's dtype")


def write(engine: Engine, update: WeightUpdate, *, version: str, keeps_caches: bool) -> None:
    """Overwrite the engine's weights. Call it between two forwards, on the thread that owns the engine.

    The engine's fingerprint changes with the weights. With `keeps_caches` it also tells that caches may be of several
    weights, and snapshots of earlier ones still fit. Where this fails, the weights are neither the old nor the new
    ones, so EngineDied ends the engine.
    """
    started = time.perf_counter()
    before = engine.info.fingerprint
    try:
        for name, expected in update.sums.items():
            tensor = update.source.tensor(name)
            if zlib.crc32(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data) != expected:
                raise ModelError(f"tensor {name} changed while the weights were read")
            engine.write_weight(name, tensor)
    except (HoldfastError, OSError, ValueError, MemoryError, RuntimeError) as exc:
        raise EngineDied(f"the weights were overwritten only in part: {exc}; start the server again") from exc
    base = engine.loaded_fingerprint if update.is_whole and not keeps_caches else before
    facts = json.dumps([base, update.digest, version, keeps_caches]).encode()
    engine.info = replace(engine.info, fingerprint=hashlib.blake2b(facts, digest_size=16).hexdigest())
    engine.kept_fingerprints = engine.kept_fingerprints | {before} if keeps_caches else frozenset()
    engine.replaced_names |= update.sums.keys()
    engine.weight_version = version
    logger.info(
        "%d tensors were replaced in %.2f s; the weights are version %r now",
        len(update.sums),
        time.perf_counter() - started,
        version,
    )
