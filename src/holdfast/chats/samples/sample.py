"""A sample and its parts, and what every file format says about one besides its arrays. Pure data."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Mask = NDArray[np.uint8]
Logprobs = NDArray[np.float64]
Rows = NDArray[np.int32]  # [tokens - 1, ...]: what was computed at each position; the last token never was


FORMAT_VERSION = 2  # of files; 1 had no version, and weight_versions as spans alone
_MAX_DIGITS = 1000  # of a weight version; Python refuses to convert very long ones
RECORDED = ("logprobs", "sampling_logprobs")  # what safetensors have no place for


class Masked(StrEnum):
    """Why a turn's sampled tokens are not trained in this sample."""

    NO = ""
    SHARED = "shared"  # an earlier branch trains them
    STALE = "stale"  # sampled from weights older than asked for


class Status(StrEnum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"  # by a limit on tokens, the turn's own or max_seq_len
    ABORTED = "aborted"


class EmptyReason(StrEnum):
    NO_RECORDS = "no_records"  # nothing was ever sampled
    ALL_TRUNCATED = "all_truncated"  # nothing that was sampled lies within max_seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """One turn in `tokens`: given from `start`, sampled from `sampled_start`, over at `end`.

    `finish_reason` is that of the whole turn; one that max_seq_len cut short (`is_cut`) has `length`.
    `logprob_kind` is that of this turn's `rollout_log_probs`. `weight_versions`: when it began and when it ended;
    `weight_spans`: each version and its number of sampled tokens, where several are known to have sampled the turn.
    `effort`: what the reply took, counts and seconds by name. `recalled`: where the quotes of earlier passages begin
    among its given tokens, and how many tokens they have.
    """

    number: int
    start: int
    sampled_start: int
    end: int
    finish_reason: str
    masked: Masked = Masked.NO
    is_cut: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprob_kind: str = "unknown"
    weight_versions: tuple[str, str] = ("", "")
    reward: float | None = None
    weight_spans: tuple[tuple[str, int], ...] = ()
    effort: Mapping[str, int | float] = field(default_factory=dict)
    recalled: tuple[int, ...] = ()

    @property
    def versions(self) -> list[str]:
        """The weight versions that sampled this turn, as far as they are known, in order."""
        known = [name for name, _ in self.weight_spans] or list(dict.fromkeys(self.weight_versions))
        return [name for name in known if name]

    @property
    def num_sampled(self) -> int:
        return self.end - self.sampled_start

    @property
    def num_trained(self) -> int:
        return 0 if self.masked else self.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a sample must still be: a chained hash for each turn, lengths, the weights it was sampled from.

    It shows that nothing was changed since the export, not who exported it. Rewards and metadata are not covered:
    they may be added later.
    """

    version: int
    links: tuple[str, ...]
    num_tokens: int
    num_response: int
    num_trained: int
    weight_versions: tuple[str, str]  # lowest and highest
    payloads: Mapping[str, str]  # hashes of the arrays that not every sample or format has
    digest: str  # over all of the above


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One branch. The response is everything from the first sampled token on; arrays of that length say so.

    `rollout_log_probs` are those of the distribution that was sampled from where they are known, and 0.0 where the
    mask is 0. `logprobs` and `sampling_logprobs` are all that is on record, for masked turns too; None where the
    format that a sample was read from does not hold them.
    """

    session_id: str
    branch: int  # the number of the last turn
    status: Status
    num_left_out: int  # turns beyond max_seq_len
    turns: tuple[TurnSpan, ...]
    tokens: Tokens  # [tokens]
    loss_mask: Mask  # [response]
    rollout_log_probs: Logprobs  # [response]
    logprobs: Logprobs | None = None  # [response], 0.0 where given
    sampling_logprobs: Logprobs | None = None  # [response], 0.0 where given
    rollout_routed_experts: Rows | None = None
    rollout_indexer_topk: Rows | None = None
    response: str = ""
    reward: float | None = None
    group: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    certificate: Certificate | None = None

    @property
    def response_start(self) -> int:
        return len(self.tokens) - len(self.loss_mask)

    @property
    def logprob_kind(self) -> str:
        """Of `rollout_log_probs` where the mask is 1; `mixed` where the turns do not agree."""
        kinds = {turn.logprob_kind for turn in self.turns if turn.num_trained}
        return "mixed" if len(kinds) > 1 else kinds.pop() if kinds else "unknown"

    @property
    def weight_versions(self) -> tuple[str, str]:
        """The lowest and the highest of all turns; the first and the last where they are not all numbers."""
        return _span(version for turn in self.turns for version in turn.versions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Export:
    """All samples of a session. `empty_reason` says why there are none. `has_version_spans`: files tell weight versions
    as spans of tokens, not as names."""

    samples: tuple[Sample, ...] = ()
    session_metadata: Mapping[str, Any] = field(default_factory=dict)
    empty_reason: EmptyReason | None = None
    has_version_spans: bool = False


def version_number(version: str) -> int | None:
    """None for a version that has no order."""
    return int(version) if version.isascii() and version.isdecimal() and len(version) <= _MAX_DIGITS else None


def _span(versions: Iterable[str]) -> tuple[str, str]:
    names = list(versions)
    if not names:
        return "", ""
    numbers = [(number, name) for name in names if (number := version_number(name)) is not None]
    if len(numbers) < len(names):
        return names[0], names[-1]
    return min(numbers)[1], max(numbers)[1]


# What every format says about a sample besides its arrays, in the order in which it is written. The names are those of
# miles' samples, so that its driver reads ours; it ignores what it does not know.

ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}


VersionSpan = dict[str, str | int]  # version, abs_start, abs_end: positions in `tokens`


class SampleMeta(Struct, kw_only=True):
    response: str
    response_length: int
    status: Status
    weight_versions: list[str | list[VersionSpan]]  # names of all turns in order, or for each turn its spans
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
    format_version: int = 1
    samples: list[SampleMeta]
    session_metadata: dict[str, Any]
    empty_reason: EmptyReason | None


def meta_of(sample: Sample, *, has_version_spans: bool = False) -> SampleMeta:
    return SampleMeta(
        response=sample.response,
        response_length=len(sample.loss_mask),
        status=sample.status,
        weight_versions=list(_spans(sample) if has_version_spans else _names(sample)),
        spec_info=spec_info(sample),
        prefix_cache_info=prefix_cache_info(sample),
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
    told = [
        one if isinstance(one, str) else [span for span in one if span.get("abs_start") != span.get("abs_end")]
        for one in meta.weight_versions
    ]
    if sample.logprob_kind != meta.logprob_kind or told not in (_names(sample), _spans(sample)):
        raise ValueError("weight_versions or logprob_kind differ from those of the turns")
    return sample


def totals(sample: Sample) -> dict[str, float]:
    """The effort of the turns together. A turn that branches share counts in the one that trains it."""
    return _sum(turn.effort for turn in _own(sample))


def prefix_cache_info(sample: Sample) -> dict[str, int]:
    """Cached tokens and prompt tokens of the turns that tell both; the names are those of miles."""
    known = _sum(turn.effort for turn in _own(sample) if {"cached_tokens", "prompt_tokens"} <= turn.effort.keys())
    names = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}
    return {name: int(known[ours]) for name, ours in names.items()} if known else {}


def spec_info(sample: Sample) -> dict[str, int]:
    """Drafted and accepted tokens of the turns with speculation; the names are those of miles."""
    turns = [turn for turn in _own(sample) if turn.effort.get("spec_steps")]
    if not turns:
        return {}
    known = _sum(turn.effort for turn in turns)
    return {
        "spec_accept_token_num": int(known.get("spec_accepted", 0)),
        "spec_draft_token_num": int(known.get("spec_drafted", 0)),
        "spec_verify_ct": int(known["spec_steps"]),
        "completion_token_num": sum(turn.num_sampled for turn in turns),
    }


def _own(sample: Sample) -> list[TurnSpan]:
    return [turn for turn in sample.turns if turn.masked is not Masked.SHARED]


def _sum(efforts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for effort in efforts:
        for name, value in effort.items():
            found[name] = found.get(name, 0) + value
    return found


def _names(sample: Sample) -> list[str]:
    return [name for turn in sample.turns for name in turn.versions]


def _spans(sample: Sample) -> list[list[VersionSpan]]:
    """For each turn the versions of its sampled tokens; the oldest for all of them where no more is known."""
    found = []
    for turn in sample.turns:
        runs = turn.weight_spans or ((turn.weight_versions[0], turn.num_sampled),)
        ends = list(itertools.accumulate((num for _, num in runs), initial=turn.sampled_start))
        spans: list[VersionSpan] = [
            {"version": name, "abs_start": start, "abs_end": end}
            for (name, _), start, end in zip(runs, ends, ends[1:], strict=False)
            if name and start < end
        ]
        found.append(spans)
    return found
