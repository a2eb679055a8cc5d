"""What every launch has in common.

Kernels overlap with their predecessors (programmatic dependent launch): each waits for its predecessor before it
touches what that one wrote, and only then lets its successor begin. So before its wait a kernel may read what was
there two kernels earlier: weights, keys of earlier steps, positions.
"""

import os
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on the host: the same arithmetic, no device features
OVERLAP = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def take_turn():
    """From here on, all that earlier kernels wrote can be seen, and the next one may begin its preamble."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlapped(num_warps: int, num_stages: int = 1) -> dict[str, Any]:
    """Launch options of a kernel that takes its turn."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    return options if IS_INTERPRETED else options | {"launch_pdl": True}


def power_of_two(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def blocks(size: int, block: int) -> int:
    return -(-size // block)
