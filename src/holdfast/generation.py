"""Sampling parameters and the events of a generation. Shared by callers and backends."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import InvalidArgument

MAX_TOP_LOGPROBS = 20
MAX_BIAS = 1e6  # beyond any logit, and far from overflowing one

# The sampling parameters that a turn's record names, whoever sampled it.
RECORDED_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "stop_token_ids"),
)

Mask = NDArray[np.bool_]  # [vocabulary], True where a token may be sampled


class ConstraintState(Protocol):
    """How far one generation has come under its constraint. One run's own; not thread-safe.

    If the constraint cannot be continued, its methods raise ConstraintFailed, then and from then on.
    """

    def allowed(self) -> Mask:
        """Which tokens may come next, in an array of the caller's own. The end is not among them. Mutates nothing."""

    @property
    def may_end(self) -> bool:
        """Whether the generation may be over here. Mutates nothing."""

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed. Mutates."""


class Constraint(Protocol):
    """What the tokens of a generation must spell, as ids alone. Any number of generations may start from one."""

    @property
    def vocab_size(self) -> int: ...

    def start(self) -> ConstraintState:
        """The state before the first token. Called in the engine thread, so it must be quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one generation draws its tokens. `seed` fixes every draw; `choice` tells n-best siblings apart."""

    seed: int
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    choice: int = 0
    constraint: Constraint | None = None
    speculation: bool = True  # whether drafts may be proposed, where there is a proposer

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise InvalidArgument(f"{name} must be {rule}, got {getattr(self, name)}", param=name)

        check("seed", 0 <= self.seed < 2**64, "between 0 and 2^64-1")
        check("choice", 0 <= self.choice < 2**32, "between 0 and 2^32-1")
        check("max_tokens", self.max_tokens >= 1, "1 or more")
        check("temperature", 0 <= self.temperature < math.inf, "0 or more and finite")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("top_k", self.top_k >= 0, "0 (all) or more")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("presence_penalty", abs(self.presence_penalty) <= MAX_BIAS, f"at most {MAX_BIAS:g} either way")
        check("frequency_penalty", abs(self.frequency_penalty) <= MAX_BIAS, f"at most {MAX_BIAS:g} either way")
        check(
            "repetition_penalty", 1 / MAX_BIAS <= self.repetition_penalty <= MAX_BIAS, f"above 0, at most {MAX_BIAS:g}"
        )
        check("top_logprobs", 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        check(
            "logit_bias", all(abs(b) <= MAX_BIAS for b in self.logit_bias.values()), f"at most {MAX_BIAS:g} either way"
        )

    def as_record(self) -> dict[str, Any]:
        """The parameters as they are recorded with a turn."""
        recorded = {name: getattr(self, name) for name in RECORDED_FIELDS}
        return recorded | {
            "stop_token_ids": sorted(self.stop_token_ids),
            "logit_bias": {str(token): bias for token, bias in self.logit_bias.items()},
        }

    def check_vocabulary(self, vocab_size: int) -> None:
        for name in ("logit_bias", "stop_token_ids", "eos_token_ids"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise InvalidArgument(
                        f"{name}: token id {token} is outside the vocabulary of {vocab_size}", param=name
                    )
        if self.constraint is None:
            return
        if self.constraint.vocab_size != vocab_size:
            raise InvalidArgument(
                f"constraint: it is for a vocabulary of {self.constraint.vocab_size}, the model has {vocab_size}"
            )
        if not self.eos_token_ids:
            raise InvalidArgument("constraint: it ends with an EOS token, and eos_token_ids is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One drawn token. `logprob` is the model's own, before anything was applied; `sampling_logprob`
    is under the distribution it was drawn from (greedy: certain, 0)."""

    token: int
    logprob: float
    sampling_logprob: float
    top: tuple[tuple[int, float], ...] = ()
    weight_version: str = ""  # of the weights that computed its logits


def weight_spans(tokens: Iterable[Sampled]) -> tuple[tuple[str, int], ...]:
    """Runs of tokens that the same weights sampled: their version and how many they are."""
    runs = itertools.groupby(tokens, key=lambda token: token.weight_version)
    return tuple((version, sum(1 for _ in run)) for version, run in runs)


class StopReason(StrEnum):
    MAX_TOKENS = "max_tokens"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Truncated:
    """Positions `first` up to, not including, `end` can no longer be seen by the model."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a run. `stop_reason` is None where nothing was to be sampled."""

    stop_reason: StopReason | None
    num_generated: int
    history_length: int
    num_dropped: int
    prefill_tokens: int
    prefill_duration_s: float
    total_duration_s: float
    seed: int | None
    num_proposed: int = 0  # drafted tokens
    num_accepted: int = 0  # those that turned out to be what was sampled


Event = Sampled | Truncated | Done
