"""A sample and its parts. Pure data: where a sample comes from and how it is written is not known here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Mask = NDArray[np.uint8]
Logprobs = NDArray[np.float64]
Rows = NDArray[np.int32]  # [tokens - 1, ...]: what was computed at each position; the last token never was


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
    `logprob_kind` is that of this turn's `rollout_log_probs`. `weight_versions`: when it began and when it ended.
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
        return _span(version for turn in self.turns for version in turn.weight_versions if version)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Export:
    """All samples of a session. `empty_reason` says why there are none."""

    samples: tuple[Sample, ...] = ()
    session_metadata: Mapping[str, Any] = field(default_factory=dict)
    empty_reason: EmptyReason | None = None


def version_number(version: str) -> int | None:
    """None for a version that has no order."""
    return int(version) if version.isascii() and version.isdecimal() else None


def _span(versions: Iterable[str]) -> tuple[str, str]:
    names = list(versions)
    if not names:
        return "", ""
    numbers = [(number, name) for name in names if (number := version_number(name)) is not None]
    if len(numbers) < len(names):
        return names[0], names[-1]
    return min(numbers)[1], max(numbers)[1]
