"""Sampling on the host: from logits to a token with both logprobs. Faster ways to sample must give the same tokens.

The noise is Philox4x32-10, a pure function of (seed, position, token id, choice): a token at a position gets the same
noise whatever else is computed, and in which chunks. This makes sampling repeatable and speculation exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import NonFiniteLogits
from holdfast.generation import Mask, Sampled, SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

ROUNDING = 1e-9  # of two tokens with probability 0.5, one reaches a top_p of 0.5, whatever the last bit says
_NUCLEUS_GUESS = 1024  # most nuclei are smaller, and a partition is faster than sorting the vocabulary

_MUL0, _MUL1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_DENSE = 4096  # from this many ids on, hashing whole blocks of four neighbours is faster than single ids

# The noise is bounded, so a token further than REACH below the best one is never drawn.
GUMBEL_MIN = float(-np.log(-np.log(0.5 * 2.0**-23)))
GUMBEL_MAX = float(-np.log(-np.log(1.0 - 0.5 * 2.0**-23)))
REACH = GUMBEL_MAX - GUMBEL_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A request to draw the token at `position` from one row of logits."""

    row: int
    position: int
    params: SamplingParams
    sampled: Sequence[int] = ()  # the tokens of this call so far, for presence and frequency penalties
    visible: Sequence[int] = ()  # the tokens in the window, for the repetition penalty
    allowed: Mask | None = None  # allows at least one token; None: all


def sample_rows(logits: NDArray[np.float32], picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
    """One outcome per pick. A row with logits that are not finite fails alone."""
    return [_sample(logits[pick.row], pick) for pick in picks]


def _sample(logits: NDArray[np.float32], pick: Pick) -> Sampled | NonFiniteLogits:
    top = float(logits.max())
    norm = top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))) if math.isfinite(top) else top
    if not (math.isfinite(norm) and np.isfinite(logits).all()):
        return not_finite(pick.position)
    params = pick.params
    adjusted = adjust(logits, pick)
    if params.temperature == 0:
        token, sampling_logprob = int(adjusted.argmax()), 0.0
    else:
        with np.errstate(over="ignore"):  # at a tiny temperature all but the best become -inf, which is right
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


def not_finite(position: int) -> NonFiniteLogits:
    return NonFiniteLogits(f"the model's logits for position {position} are not finite")


def adjust(logits: NDArray[np.float32], pick: Pick) -> Floats:
    """A copy with penalties and biases applied, and -inf for tokens that are not allowed."""
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
    """The ids that can be drawn, ascending, and their logprobs after top-k, then top-p, then min-p."""
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


def philox4x32(counter: tuple[NDArray[np.uint64], int, int, int], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10 over an array of first counter words: [n] -> [4, n]."""
    c0 = np.asarray(counter[0], dtype=np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MUL0, c2 * _MUL1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL0) & 0xFFFFFFFF, (k1 + _WEYL1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def random_bits(seed: int, position: int, ids: NDArray[np.int64], choice: int = 0) -> NDArray[np.uint32]:
    """32 random bits for each token id; four neighbouring ids share one Philox block."""
    blocks, lanes = ids >> 2, ids & 3
    first = int(blocks.min()) if ids.size else 0
    if ids.size >= _DENSE:
        rows = blocks - first
        blocks = np.arange(first, int(blocks.max()) + 1, dtype=np.int64)
    else:
        rows = np.arange(ids.size)
    counter = (blocks.astype(np.uint64), position & 0xFFFFFFFF, position >> 32, choice)
    bits = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    picked: NDArray[np.uint32] = bits[lanes, rows]
    return picked


def gumbel(seed: int, position: int, ids: NDArray[np.int64], choice: int = 0) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, always within [GUMBEL_MIN, GUMBEL_MAX]."""
    uniform = ((random_bits(seed, position, ids, choice) >> np.uint32(9)) + 0.5) * 2.0**-23
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
