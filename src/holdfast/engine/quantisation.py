"""Weights in eight bits, groups of 32 along a row with one half-precision scale each: the bits of GGUF's Q8_0."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelError

GROUP = 32
_LARGEST = 127.0


class Quantised(NamedTuple):
    """`values` [out, in] times the scale of its group."""

    values: NDArray[np.int8]
    scales: NDArray[np.float16]  # [out, in / 32]

    def restored(self) -> NDArray[np.float32]:
        """The weights that these bits stand for."""
        return self.values.astype(np.float32) * np.repeat(self.scales.astype(np.float32), GROUP, axis=1)


def quantise(weight: NDArray[np.float32]) -> Quantised:
    """The nearest eight-bit form of `weight` [out, in]; the rows must hold whole groups."""
    rows, columns = weight.shape
    if columns % GROUP:
        raise ModelError(f"int8 needs rows of whole groups of {GROUP} weights, got {columns}; use --dtype bfloat16")
    groups = weight.reshape(rows, -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(_LARGEST)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    values = np.rint(groups * inverse[:, :, None]).astype(np.int8)
    return Quantised(values.reshape(rows, columns), scales.astype(np.float16))
