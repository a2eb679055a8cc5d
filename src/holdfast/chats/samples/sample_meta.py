"""What every format says of a sample beside its arrays, in the order in which it is written.

The names are those of miles' samples, so that its driver reads ours; what it does not know it leaves alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from holdfast.chats.samples.sample import RECORDED, Certificate, EmptyReason, Sample, Status, TurnSpan

ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}


class SampleMeta(Struct, kw_only=True):
    response: str
    response_length: int
    status: Status
    weight_versions: list[list[dict[str, str | int]]]  # for each turn, the oldest weights of its sampled tokens
    spec_info: dict[str, int] = {}
    prefix_cache_info: dict[str, int] = {}
    reward: float | None
    metadata: dict[str, Any]
    nulls: list[str]  # arrays that this sample does not have
    session_id: str
    group: str
    label: str
    branch: int
    num_left_out: int
    logprob_kind: str
    turns: tuple[TurnSpan, ...]
    certificate: Certificate | None


class ExportMeta(Struct, kw_only=True):
    samples: list[SampleMeta]
    session_metadata: dict[str, Any]
    empty_reason: EmptyReason | None


def meta_of(sample: Sample) -> SampleMeta:
    return SampleMeta(
        response=sample.response,
        response_length=len(sample.loss_mask),
        status=sample.status,
        weight_versions=[_weights(turn) for turn in sample.turns],
        reward=sample.reward,
        metadata=dict(sample.metadata),
        nulls=[name for name in ARRAYS if getattr(sample, name) is None],
        session_id=sample.session_id,
        group=sample.group,
        label=sample.label,
        branch=sample.branch,
        num_left_out=sample.num_left_out,
        logprob_kind=sample.logprob_kind,
        turns=sample.turns,
        certificate=sample.certificate,
    )


def sample_of(meta: SampleMeta, arrays: Mapping[str, NDArray[Any] | None]) -> Sample:
    """The sample that was written. Raises ValueError where the two do not fit."""
    for name, kind in ARRAYS.items():
        array = arrays.get(name)
        if (array is None) != (name in meta.nulls):
            raise ValueError(f"{name} is {'missing' if array is None else 'present, but listed in nulls'}")
        if array is not None and array.dtype != kind:
            raise ValueError(f"{name} holds {array.dtype}, not {np.dtype(kind)}")
    tokens, mask = arrays["tokens"], arrays["loss_mask"]
    if tokens is None or mask is None or arrays["rollout_log_probs"] is None:
        raise ValueError("tokens, loss_mask and rollout_log_probs cannot be null")
    if tokens.ndim != 1 or mask.shape != (meta.response_length,) or len(mask) > len(tokens):
        raise ValueError(f"{meta.response_length} response tokens do not fit the arrays")
    sample = Sample(
        session_id=meta.session_id,
        branch=meta.branch,
        status=meta.status,
        num_left_out=meta.num_left_out,
        turns=meta.turns,
        response=meta.response,
        reward=meta.reward,
        group=meta.group,
        label=meta.label,
        metadata=meta.metadata,
        certificate=meta.certificate,
        **{name: arrays.get(name) for name in (*ARRAYS, *RECORDED)},  # type: ignore[arg-type]
    )
    if (sample.logprob_kind, meta_of(sample).weight_versions) != (meta.logprob_kind, meta.weight_versions):
        raise ValueError("weight_versions or logprob_kind differ from those of the turns")
    return sample


def _weights(turn: TurnSpan) -> list[dict[str, str | int]]:
    version = turn.weight_versions[0]
    return [{"version": version, "abs_start": turn.sampled_start, "abs_end": turn.end}] if version else []
