"""Sampling noise as a pure function of (seed, position, token id, choice): Philox4x32-10.

The same token at the same place gets the same noise whatever was computed beside it, before it or
in which chunks; that is what makes sampling repeatable and speculation exact.
"""

import numpy as np
from numpy.typing import NDArray

_MUL0, _MUL1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

# The noise below is bounded, so a token this far under the best one can never be drawn.
GUMBEL_MIN = float(-np.log(-np.log(0.5 * 2.0**-23)))
GUMBEL_MAX = float(-np.log(-np.log(1.0 - 0.5 * 2.0**-23)))
REACH = GUMBEL_MAX - GUMBEL_MIN

_DENSE = 4096  # from here on, hashing whole blocks of four neighbours is cheaper than single ids


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
