"""What all kernel launches have in common.

Kernels overlap with the one before them (programmatic dependent launch): each waits for its predecessor before it reads
what that one wrote, and only then lets its successor start. So before it waits, a kernel may read what was written at
least two kernels earlier: weights, keys of earlier steps, positions.
"""

import os
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU: the same arithmetic, without device features
OVERLAP = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def take_turn():
    """Wait for the kernels before this one, then let the next one start its preamble."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlapped(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Launch options of a kernel that calls `take_turn`."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    return options if IS_INTERPRETED else options | {"launch_pdl": True}


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is not below `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def blocks(size: int, block: int) -> int:
    """How many blocks of `block` cover `size`."""
    return -(-size // block)
