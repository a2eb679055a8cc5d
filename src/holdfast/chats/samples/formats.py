"""Samples to bytes and back: safetensors, JSON, Parquet. The same samples always make the same bytes.

safetensors: `_samples_meta` (JSON as uint8) and, for sample i, `tokens.i` int64, `loss_mask.i` uint8,
`rollout_log_probs.i` float64, `rollout_routed_experts.i` and `rollout_indexer_topk.i` int32 where there are any;
nothing else. JSON and Parquet also have both logprobs on record for every sampled token. All state their
`format_version`; files without one are of version 1.
"""

import base64
import io
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from msgspec import Struct
from numpy.typing import NDArray

from holdfast.chats.samples.sample import (
    ARRAYS,
    FORMAT_VERSION,
    RECORDED,
    EmptyReason,
    Export,
    ExportMeta,
    Rows,
    Sample,
    SampleMeta,
    meta_of,
    sample_of,
)
from holdfast.errors import InvalidArgument, SamplesUnusable, Unimplemented

_META = "_samples_meta"
_PARQUET_MAGIC = b"PAR1"
_BROKEN = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # whatever reading a broken file may raise


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    JSON = "json"
    PARQUET = "parquet"


CONTENT_TYPES = {
    Format.SAFETENSORS: "application/octet-stream",
    Format.JSON: "application/json",
    Format.PARQUET: "application/vnd.apache.parquet",
}


def read_format(name: str) -> Format:
    """The format of that name, or InvalidArgument."""
    try:
        return Format(name)
    except ValueError:
        raise InvalidArgument(f"format must be one of {', '.join(Format)}, got {name!r}", param="format") from None


def encode(export: Export, form: Format = Format.SAFETENSORS) -> bytes:
    """Takes time in proportion to the samples: not for the event loop where they are large."""
    return {Format.SAFETENSORS: _to_safetensors, Format.JSON: _to_json, Format.PARQUET: _to_parquet}[form](export)


def decode(payload: bytes) -> Export:
    """What `encode` wrote, in whichever format. Raises SamplesUnusable where it is nothing of the kind."""
    try:
        if payload.startswith(_PARQUET_MAGIC):
            return _from_parquet(payload)
        return _from_safetensors(payload) if payload[8:9] == b"{" else _from_json(payload)
    except (*_BROKEN, msgspec.MsgspecError, safetensors.SafetensorError) as exc:
        raise SamplesUnusable(f"not a samples file: {exc}", reason="format") from exc


def _to_safetensors(export: Export) -> bytes:
    meta = ExportMeta(
        format_version=FORMAT_VERSION,
        samples=[meta_of(sample, has_version_spans=export.has_version_spans) for sample in export.samples],
        session_metadata=dict(export.session_metadata),
        empty_reason=export.empty_reason,
    )
    tensors: dict[str, NDArray[Any]] = {_META: np.frombuffer(msgspec.json.encode(meta), np.uint8)}
    for index, sample in enumerate(export.samples):
        for name in ARRAYS:
            if (array := getattr(sample, name)) is not None:
                tensors[f"{name}.{index}"] = np.ascontiguousarray(array)  # others are written wrongly without a word
    return safetensors.numpy.save(tensors)


def _from_safetensors(payload: bytes) -> Export:
    tensors = safetensors.numpy.load(payload)
    raw = tensors.pop(_META, np.zeros(0))
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise ValueError(f"the tensor {_META} is missing or not text")
    meta = msgspec.json.decode(raw.tobytes(), type=ExportMeta)
    samples = []
    for index, said in enumerate(meta.samples):
        samples.append(sample_of(said, {name: tensors.pop(f"{name}.{index}", None) for name in ARRAYS}))
    if tensors:
        raise ValueError(f"tensors that belong to no sample: {', '.join(sorted(tensors))}")
    return _export(samples, meta.samples, meta.format_version, meta.session_metadata, meta.empty_reason)


def _export(
    samples: list[Sample],
    said: list[Any],
    format_version: int,
    session_metadata: dict[str, Any],
    empty_reason: EmptyReason | None,
) -> Export:
    if not 1 <= format_version <= FORMAT_VERSION:
        raise ValueError(f"its format_version is {format_version}; this program knows 1 to {FORMAT_VERSION}")
    return Export(
        samples=tuple(samples),
        session_metadata=session_metadata,
        empty_reason=empty_reason,
        has_version_spans=any(isinstance(one, list) for meta in said for one in meta.weight_versions),
    )


class _Rows(Struct):
    shape: list[int]
    int32: str  # base64, little-endian


class _WholeSample(SampleMeta, kw_only=True):
    tokens: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float]
    logprobs: list[float] | None
    sampling_logprobs: list[float] | None
    rollout_routed_experts: _Rows | None
    rollout_indexer_topk: _Rows | None


class _WholeExport(Struct, kw_only=True):
    format_version: int = 1
    samples: list[_WholeSample]
    session_metadata: dict[str, Any]
    empty_reason: EmptyReason | None


def _to_json(export: Export) -> bytes:
    whole = _WholeExport(
        format_version=FORMAT_VERSION,
        samples=[
            _WholeSample(
                **msgspec.structs.asdict(meta_of(sample, has_version_spans=export.has_version_spans)),
                tokens=sample.tokens.tolist(),
                loss_mask=sample.loss_mask.tolist(),
                rollout_log_probs=sample.rollout_log_probs.tolist(),
                logprobs=None if sample.logprobs is None else sample.logprobs.tolist(),
                sampling_logprobs=None if sample.sampling_logprobs is None else sample.sampling_logprobs.tolist(),
                rollout_routed_experts=_packed(sample.rollout_routed_experts),
                rollout_indexer_topk=_packed(sample.rollout_indexer_topk),
            )
            for sample in export.samples
        ],
        session_metadata=dict(export.session_metadata),
        empty_reason=export.empty_reason,
    )
    return msgspec.json.encode(whole)


def _from_json(payload: bytes) -> Export:
    whole = msgspec.json.decode(payload, type=_WholeExport)
    samples = []
    for said in whole.samples:
        arrays: Mapping[str, NDArray[Any] | None] = {
            "tokens": np.array(said.tokens, np.int64),
            "loss_mask": np.array(said.loss_mask, np.uint8),
            "rollout_log_probs": np.array(said.rollout_log_probs, np.float64),
            "logprobs": None if said.logprobs is None else np.array(said.logprobs, np.float64),
            "sampling_logprobs": None
            if said.sampling_logprobs is None
            else np.array(said.sampling_logprobs, np.float64),
            "rollout_routed_experts": _unpacked(said.rollout_routed_experts),
            "rollout_indexer_topk": _unpacked(said.rollout_indexer_topk),
        }
        fields = {name: getattr(said, name) for name in SampleMeta.__struct_fields__}
        samples.append(sample_of(SampleMeta(**fields), arrays))
    return _export(samples, whole.samples, whole.format_version, whole.session_metadata, whole.empty_reason)


def _packed(rows: Rows | None) -> _Rows | None:
    if rows is None:
        return None
    return _Rows(list(rows.shape), base64.b64encode(rows.astype("<i4").tobytes()).decode())


def _unpacked(rows: _Rows | None) -> Rows | None:
    if rows is None:
        return None
    values = np.frombuffer(base64.b64decode(rows.int32, validate=True), "<i4")
    if math.prod(rows.shape) != values.size:
        raise ValueError(f"{values.size} values do not have shape {rows.shape}")
    return values.astype(np.int32).reshape(rows.shape)


# Parquet: a row for each sample, nested facts as JSON. Needs pyarrow, which is an extra.

_TEXTS = ("response", "status", "session_id", "group", "label", "logprob_kind")
_COUNTS = ("response_length", "branch", "num_left_out")
_NESTED = ("weight_versions", "spec_info", "prefix_cache_info", "metadata", "nulls", "turns", "certificate")
_KINDS = ARRAYS | dict.fromkeys(RECORDED, np.float64)
_ROWS = ("rollout_routed_experts", "rollout_indexer_topk")


def _to_parquet(export: Export) -> bytes:
    pa, pq = _pyarrow()
    schema = _schema(pa).with_metadata(
        {
            "format_version": str(FORMAT_VERSION),
            "session_metadata": msgspec.json.encode(export.session_metadata),
            "empty_reason": msgspec.json.encode(export.empty_reason),
        }
    )
    rows = []
    for sample in export.samples:
        said = msgspec.to_builtins(meta_of(sample, has_version_spans=export.has_version_spans))
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


def _from_parquet(payload: bytes) -> Export:
    """Raises ValueError where it is a table of something else."""
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(io.BytesIO(payload))
    except (OSError, pa.ArrowException) as exc:
        raise ValueError(str(exc)) from exc
    if not table.schema.equals(_schema(pa)):
        raise ValueError("the table has other columns than samples have")
    held = table.schema.metadata or {}
    samples, metas = [], []
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
        metas.append(msgspec.convert(plain | nested, SampleMeta))
        samples.append(sample_of(metas[-1], arrays))
    return _export(
        samples,
        metas,
        msgspec.json.decode(held.get(b"format_version", b"1"), type=int),
        msgspec.json.decode(held[b"session_metadata"], type=dict[str, Any]),
        msgspec.json.decode(held[b"empty_reason"], type=EmptyReason | None),
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
        raise Unimplemented("Parquet needs pyarrow on the server: install the extra `parquet` there") from exc
    return pyarrow, pyarrow.parquet
