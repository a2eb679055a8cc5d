"""A slab as a file, for the disk or another engine: keys, values, and what they belong to.

The format is safetensors with two tensors and a JSON header. It contains what is visible and what a rewind can still
reach. The session keeps the tokens; the snapshot only has their digest.
"""

import hashlib
import json
import struct
from array import array
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.engine.interface import Engine, EngineInfo, KeysValues
from holdfast.engine.sequence import Sequence
from holdfast.engine.slab import Slab
from holdfast.errors import SnapshotMismatch

_HEADER = "holdfast.snapshot"
_DIGEST = "holdfast.digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    fingerprint: str
    kv_dtype: str
    sink: int
    recent: int
    capacity: int
    length: int
    high: int
    lowest: int  # the first ring position that is in the file
    tail: tuple[int, ...]  # tokens of the history that are not computed yet
    history_digest: str  # of the tokens below `length`
    reported_dropped: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    header: SnapshotHeader
    kv: KeysValues


def take(engine: Engine, sequence: Sequence) -> Snapshot:
    """A copy of all keys and values that are still in the slab. The sequence is unchanged."""
    slab, window = sequence.slab, sequence.slab.window
    sinks, ring = slab.intact()
    kv = engine.read_slab(slab, [sinks, ring])
    header = SnapshotHeader(
        fingerprint=engine.info.fingerprint,
        kv_dtype=engine.info.kv_dtype,
        sink=window.sink,
        recent=window.recent,
        capacity=slab.capacity,
        length=slab.length,
        high=slab.high,
        lowest=ring.start,
        tail=tuple(sequence.tokens[slab.length :]),
        history_digest=_history_digest(sequence.tokens[: slab.length]),
        reported_dropped=sequence.reported_dropped,
    )
    return Snapshot(header, kv)


def check(engine: Engine, snapshot: Snapshot, tokens: "array[int]") -> None:
    """Raise SnapshotMismatch, which names the difference, unless it fits this engine and this history."""
    header, info, shape = snapshot.header, engine.info, engine.shape
    fingerprint = header.fingerprint if header.fingerprint in engine.kept_fingerprints else info.fingerprint
    for name, theirs, ours in (
        ("model", header.fingerprint, fingerprint),
        ("kv_dtype", header.kv_dtype, info.kv_dtype),
        ("recent", header.recent, shape.recent),
    ):
        if theirs != ours:
            raise SnapshotMismatch(f"the snapshot's {name} is {theirs}, this engine's is {ours}")
    if (problem := _flaw(snapshot, info)) is not None:
        raise SnapshotMismatch(f"invalid snapshot: {problem}")
    if header.sink > shape.max_pin or header.length - header.lowest > shape.capacity - header.sink:
        raise SnapshotMismatch(f"the snapshot was taken from a larger slab ({header.capacity} > {shape.capacity})")
    if header.length > len(tokens) or (
        tuple(tokens[header.length :]) != header.tail
        or _history_digest(tokens[: header.length]) != header.history_digest
    ):
        raise SnapshotMismatch("the snapshot belongs to another history")


def _flaw(snapshot: Snapshot, info: EngineInfo) -> str | None:
    """What is inconsistent in the snapshot. It may come from another server, so nothing in it is trusted."""
    header = snapshot.header
    numbers = (header.sink, header.recent, header.capacity, header.length, header.high, header.reported_dropped)
    if not all(isinstance(number, int) and number >= 0 for number in (*numbers, header.lowest)):
        return "its header has a value that is not a non-negative integer"
    if not min(header.sink, header.length) <= header.lowest <= header.length:
        return f"it begins at position {header.lowest} and ends at {header.length}"
    num_positions = min(header.sink, header.length) + header.length - header.lowest
    expected = (info.num_layers, info.num_kv_heads, num_positions, info.kv_width)
    for name, part in snapshot.kv._asdict().items():
        if part.shape != expected or part.dtype.itemsize != info.kv_itemsize:
            return f"its {name} have shape {part.shape} and dtype {part.dtype}, expected shape {expected}"
    return None


def restore(engine: Engine, snapshot: Snapshot, slab: Slab) -> None:
    """Fill a fresh slab from a checked snapshot. Mutates the slab and its cells."""
    header = snapshot.header
    slab.adopt(length=header.length, lowest=header.lowest)
    engine.write_slab(slab, list(slab.intact()), snapshot.kv)


def encode(snapshot: Snapshot) -> bytes:
    from safetensors.numpy import save

    header = json.dumps(asdict(snapshot.header))
    metadata = {_HEADER: header, _DIGEST: _content_digest(header, snapshot.kv)}
    return save({name: np.ascontiguousarray(part) for name, part in snapshot.kv._asdict().items()}, metadata)


def decode(data: bytes) -> Snapshot:
    """The snapshot in `data`. Raises SnapshotMismatch where it is not a snapshot, truncated or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        kv = KeysValues(**load(data))
        (header_size,) = struct.unpack("<Q", data[:8])
        metadata: dict[str, str] = json.loads(data[8 : 8 + header_size])["__metadata__"]
        fields: dict[str, Any] = json.loads(metadata[_HEADER])
        header = SnapshotHeader(**fields | {"tail": tuple(fields["tail"])})
        is_whole = metadata[_DIGEST] == _content_digest(metadata[_HEADER], kv)
    except (SafetensorError, struct.error, ValueError, KeyError, TypeError) as exc:
        raise SnapshotMismatch(f"not a readable snapshot: {exc}") from exc
    if not is_whole:
        raise SnapshotMismatch("the snapshot is damaged: its content does not match its digest")
    return Snapshot(header, kv)


def _history_digest(tokens: "array[int]") -> str:
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def _content_digest(header: str, kv: KeysValues) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for part in kv:
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
