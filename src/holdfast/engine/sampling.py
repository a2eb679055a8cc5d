"""From logits to one token with both logprobs, on the host. The plain path that others are held to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.noise import REACH, gumbel
from holdfast.errors import InvalidArgument, NonFiniteLogits

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

MAX_TOP_LOGPROBS = 20
_NUCLEUS_GUESS = 1024  # most nuclei are smaller than this, and partitioning beats sorting the vocabulary


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

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise InvalidArgument(f"{name} must be {rule}, got {getattr(self, name)}")

        check("seed", 0 <= self.seed < 2**64, "between 0 and 2^64-1")
        check("choice", 0 <= self.choice < 2**32, "between 0 and 2^32-1")
        check("max_tokens", self.max_tokens >= 1, "1 or more")
        check("temperature", 0 <= self.temperature < math.inf, "0 or more and finite")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("top_k", self.top_k >= 0, "0 (all) or more")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        check("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite")
        check("top_logprobs", 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        check("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "finite numbers")

    def check_vocabulary(self, vocab_size: int) -> None:
        for name in ("logit_bias", "stop_token_ids", "eos_token_ids"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise InvalidArgument(f"{name}: token id {token} is outside the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A request to draw the token at `position` from one row of logits."""

    row: int
    position: int
    params: SamplingParams
    sampled: Sequence[int] = ()  # what this call sampled so far, for presence and frequency
    visible: Sequence[int] = ()  # the history in view, for repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One drawn token. `logprob` is the model's own, before anything was applied; `sampling_logprob`
    is under the distribution it was drawn from (greedy: certain, 0)."""

    token: int
    logprob: float
    sampling_logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample_rows(logits: NDArray[np.float32], picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
    """One outcome per pick; a row that is not finite is an outcome of its own and harms no other."""
    return [_sample(logits[pick.row], pick) for pick in picks]


def _sample(logits: NDArray[np.float32], pick: Pick) -> Sampled | NonFiniteLogits:
    top = float(logits.max())
    norm = top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))) if math.isfinite(top) else top
    if not (math.isfinite(norm) and np.isfinite(logits).all()):
        return NonFiniteLogits(f"the model's logits for position {pick.position} are not finite")
    params = pick.params
    adjusted = adjust(logits, pick)
    if params.temperature == 0:
        token, sampling_logprob = int(adjusted.argmax()), 0.0
    else:
        ids, scaled = survivors(adjusted / params.temperature, params)
        winner = int((scaled + gumbel(params.seed, pick.position, ids, params.choice)).argmax())
        token, sampling_logprob = int(ids[winner]), float(scaled[winner])
    return Sampled(
        token=token,
        logprob=float(logits[token]) - norm,
        sampling_logprob=sampling_logprob,
        top=_top(logits, norm, params.top_logprobs),
    )


def adjust(logits: NDArray[np.float32], pick: Pick) -> Floats:
    """Penalties and biases applied, in a copy."""
    params, out = pick.params, logits.astype(np.float64)
    if params.repetition_penalty != 1 and pick.visible:
        seen = np.unique(np.asarray(pick.visible, dtype=np.int64))
        out[seen] = np.where(
            out[seen] > 0, out[seen] / params.repetition_penalty, out[seen] * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and pick.sampled:
        seen, counts = np.unique(np.asarray(pick.sampled, dtype=np.int64), return_counts=True)
        out[seen] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


def survivors(scaled: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """The ids that may be drawn, ascending, and their logprobs after top-k, then top-p, then min-p."""
    logprobs = scaled - _logsumexp(scaled)
    ids: Ids = np.arange(scaled.size)
    if 0 < params.top_k < ids.size:
        ids = _largest(logprobs, params.top_k)
        logprobs = _renormalised(logprobs[ids])
    if params.top_p < 1:
        kept = _nucleus(logprobs, params.top_p)
        ids, logprobs = ids[kept], _renormalised(logprobs[kept])
    if params.min_p > 0:
        kept = np.flatnonzero(logprobs >= logprobs.max() + math.log(params.min_p))
        ids, logprobs = ids[kept], _renormalised(logprobs[kept])
    reachable = np.flatnonzero(logprobs >= logprobs.max() - REACH)
    return ids[reachable], logprobs[reachable]


def _logsumexp(values: Floats) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def _renormalised(logprobs: Floats) -> Floats:
    out: Floats = logprobs - _logsumexp(logprobs)
    return out


def _largest(values: Floats, num: int) -> Ids:
    """The indices of the `num` largest values, ascending; of equal ones, the lowest indices."""
    bar = np.partition(values, values.size - num)[values.size - num]
    above = np.flatnonzero(values > bar)
    level = np.flatnonzero(values == bar)[: num - above.size]
    return np.sort(np.concatenate([above, level]))


def _nucleus(logprobs: Floats, top_p: float) -> Ids:
    """The fewest most likely indices whose probabilities reach `top_p`, ascending."""
    for num in (_NUCLEUS_GUESS, logprobs.size):
        ids = _largest(logprobs, min(num, logprobs.size))
        order = ids[np.argsort(-logprobs[ids], kind="stable")]
        mass = np.cumsum(np.exp(logprobs[order]))
        if mass[-1] >= top_p:
            break
    return np.sort(order[: int(np.searchsorted(mass, top_p)) + 1])


def _top(logits: NDArray[np.float32], norm: float, num: int) -> tuple[tuple[int, float], ...]:
    if num == 0:
        return ()
    ids = _largest(logits.astype(np.float64), min(num, logits.size))
    order = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple((int(token), float(logits[token]) - norm) for token in order)
