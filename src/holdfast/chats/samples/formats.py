"""Samples to bytes and back: safetensors, JSON, Parquet. The same samples always make the same bytes.

safetensors: `_samples_meta` (JSON as uint8) and, for sample i, `tokens.i` int64, `loss_mask.i` uint8,
`rollout_log_probs.i` float64, `rollout_routed_experts.i` and `rollout_indexer_topk.i` int32 where there are any;
nothing else. JSON and Parquet also have both logprobs on record for every sampled token.
"""

import base64
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

from holdfast.chats.samples import parquet
from holdfast.chats.samples.sample import EmptyReason, Export, Rows
from holdfast.chats.samples.sample_meta import ARRAYS, ExportMeta, SampleMeta, meta_of, sample_of
from holdfast.errors import InvalidArgument, SamplesUnusable

_META = "_samples_meta"
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
    return {Format.SAFETENSORS: _to_safetensors, Format.JSON: _to_json, Format.PARQUET: parquet.write}[form](export)


def decode(payload: bytes) -> Export:
    """What `encode` wrote, in whichever format. Raises SamplesUnusable where it is nothing of the kind."""
    try:
        if payload.startswith(parquet.MAGIC):
            return parquet.read(payload)
        return _from_safetensors(payload) if payload[8:9] == b"{" else _from_json(payload)
    except (*_BROKEN, msgspec.MsgspecError, safetensors.SafetensorError) as exc:
        raise SamplesUnusable(f"not a samples file: {exc}", reason="format") from exc


def _to_safetensors(export: Export) -> bytes:
    meta = ExportMeta(
        samples=[meta_of(sample) for sample in export.samples],
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
    return Export(samples=tuple(samples), session_metadata=meta.session_metadata, empty_reason=meta.empty_reason)


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
    samples: list[_WholeSample]
    session_metadata: dict[str, Any]
    empty_reason: EmptyReason | None


def _to_json(export: Export) -> bytes:
    whole = _WholeExport(
        samples=[
            _WholeSample(
                **msgspec.structs.asdict(meta_of(sample)),
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
    return Export(samples=tuple(samples), session_metadata=whole.session_metadata, empty_reason=whole.empty_reason)


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
