"""Rotary tables, worked out on the host: devices may lack float64, and float32 angles lose 0.016 at position 1M."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RotaryTables(NamedTuple):
    """What turns a head's two halves: [tokens, 1, head_dim / 2] each."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def rotary_tables(inverse_frequencies: Sequence[float], positions: Sequence[int]) -> RotaryTables:
    angles = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inverse_frequencies, np.float64)
    return RotaryTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
