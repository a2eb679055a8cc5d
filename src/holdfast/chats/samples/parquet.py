"""Samples as a Parquet table: a row for each, nested facts as JSON. Needs pyarrow, which is an extra."""

import io
from typing import Any

import msgspec
import numpy as np

from holdfast.chats.samples.sample import RECORDED, EmptyReason, Export
from holdfast.chats.samples.sample_meta import ARRAYS, SampleMeta, meta_of, sample_of
from holdfast.errors import Unimplemented

MAGIC = b"PAR1"
_TEXTS = ("response", "status", "session_id", "group", "label", "logprob_kind")
_COUNTS = ("response_length", "branch", "num_left_out")
_NESTED = ("weight_versions", "spec_info", "prefix_cache_info", "metadata", "nulls", "turns", "certificate")
_KINDS = ARRAYS | dict.fromkeys(RECORDED, np.float64)
_ROWS = ("rollout_routed_experts", "rollout_indexer_topk")


def write(export: Export) -> bytes:
    pa, pq = _pyarrow()
    schema = _schema(pa).with_metadata(
        {
            "session_metadata": msgspec.json.encode(export.session_metadata),
            "empty_reason": msgspec.json.encode(export.empty_reason),
        }
    )
    rows = []
    for sample in export.samples:
        said = msgspec.to_builtins(meta_of(sample))
        row = said | {name: msgspec.json.encode(said[name]).decode() for name in _NESTED}
        for name in _KINDS:
            array = getattr(sample, name)
            row[name] = None if array is None else array.ravel()
            if name in _ROWS:
                row[f"{name}_shape"] = None if array is None else list(array.shape)
        rows.append(row)
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def read(payload: bytes) -> Export:
    """Raises ValueError where it is a table of something else."""
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(io.BytesIO(payload))
    except (OSError, pa.ArrowException) as exc:
        raise ValueError(str(exc)) from exc
    if not table.schema.equals(_schema(pa)):
        raise ValueError("the table has other columns than samples have")
    held = table.schema.metadata or {}
    samples = []
    for index in range(table.num_rows):
        row = {name: table.column(name)[index] for name in table.column_names}
        plain = {name: row[name].as_py() for name in (*_TEXTS, *_COUNTS, "reward")}
        nested = {name: msgspec.json.decode(row[name].as_py()) for name in _NESTED}
        arrays: dict[str, Any] = {}
        for name, kind in _KINDS.items():
            values = row[name].values
            arrays[name] = None if values is None else np.array(values.to_numpy(zero_copy_only=False), kind)
            if name in _ROWS and values is not None:
                arrays[name] = arrays[name].reshape(row[f"{name}_shape"].as_py())
        samples.append(sample_of(msgspec.convert(plain | nested, SampleMeta), arrays))
    return Export(
        samples=tuple(samples),
        session_metadata=msgspec.json.decode(held[b"session_metadata"], type=dict[str, Any]),
        empty_reason=msgspec.json.decode(held[b"empty_reason"], type=EmptyReason | None),
    )


def _schema(pa: Any) -> Any:
    fields = [(name, pa.string()) for name in (*_TEXTS, *_NESTED)]
    fields += [(name, pa.int64()) for name in _COUNTS]
    fields += [("reward", pa.float64())]
    fields += [(name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in _KINDS.items()]
    fields += [(f"{name}_shape", pa.list_(pa.int64())) for name in _ROWS]
    return pa.schema(fields)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise Unimplemented("Parquet needs pyarrow: pip install 'holdfast[parquet]'") from exc
    return pyarrow, pyarrow.parquet
