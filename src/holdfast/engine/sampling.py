"""From logits to one token with both logprobs, on the host. The plain path that others are held to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.noise import REACH, gumbel
from holdfast.errors import NonFiniteLogits
from holdfast.generation import Mask, Sampled, SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

ROUNDING = 1e-9  # two even tokens reach a top_p of 0.5 with one of them, whatever the last bit says
_NUCLEUS_GUESS = 1024  # most nuclei are smaller than this, and partitioning beats sorting the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A request to draw the token at `position` from one row of logits."""

    row: int
    position: int
    params: SamplingParams
    sampled: Sequence[int] = ()  # what this call sampled so far, for presence and frequency
    visible: Sequence[int] = ()  # the history in view, for repetition
    allowed: Mask | None = None  # at least one token; None: all


def sample_rows(logits: NDArray[np.float32], picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
    """One outcome per pick; a row that is not finite is an outcome of its own and harms no other."""
    return [_sample(logits[pick.row], pick) for pick in picks]


def _sample(logits: NDArray[np.float32], pick: Pick) -> Sampled | NonFiniteLogits:
    top = float(logits.max())
    norm = top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))) if math.isfinite(top) else top
    if not (math.isfinite(norm) and np.isfinite(logits).all()):
        return not_finite(pick)
    params = pick.params
    adjusted = adjust(logits, pick)
    if params.temperature == 0:
        token, sampling_logprob = int(adjusted.argmax()), 0.0
    else:
        with np.errstate(over="ignore"):  # at a tiny temperature all but the best become -inf, as they should
            scaled = (adjusted - adjusted.max()) / params.temperature
        ids, scaled = survivors(scaled, params)
        winner = int((scaled + gumbel(params.seed, pick.position, ids, params.choice)).argmax())
        token, sampling_logprob = int(ids[winner]), float(scaled[winner])
    return Sampled(
        token=token,
        logprob=float(logits[token]) - norm,
        sampling_logprob=sampling_logprob,
        top=_top(logits, norm, params.top_logprobs),
    )


def not_finite(pick: Pick) -> NonFiniteLogits:
    return NonFiniteLogits(f"the model's logits for position {pick.position} are not finite")


def adjust(logits: NDArray[np.float32], pick: Pick) -> Floats:
    """Penalties and biases applied, in a copy; what is not allowed becomes impossible."""
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
    if pick.allowed is not None:
        out[~pick.allowed] = -np.inf
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
        kept = np.flatnonzero(logprobs >= logprobs.max() + math.log(params.min_p) - ROUNDING)
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
        if mass[-1] >= top_p - ROUNDING:
            break
    return np.sort(order[: int(np.searchsorted(mass, top_p - ROUNDING)) + 1])


def _top(logits: NDArray[np.float32], norm: float, num: int) -> tuple[tuple[int, float], ...]:
    if num == 0:
        return ()
    ids = _largest(logits.astype(np.float64), min(num, logits.size))
    order = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple((int(token), float(logits[token]) - norm) for token in order)
