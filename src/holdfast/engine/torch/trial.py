"""Whether a faster implementation is used: only where it can be built and computes what the plain one does."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Fast = TypeVar("Fast")

logger = logging.getLogger(__name__)


def accepted(
    what: str, build: Callable[[], Fast], run: Callable[[Fast | None], Tensor], *, tolerance: float
) -> Fast | None:
    """What `build` makes; None with a warning where it fails or its results are not those of `run(None)`."""
    expected = run(None)
    try:
        fast = build()
        found = relative_difference(run(fast), expected)
    except torch.AcceleratorError:
        raise  # the device does not recover
    except RuntimeError as exc:
        logger.warning("%s is not used, so decoding is slower: %s", what, exc)
        return None
    if not found <= tolerance:  # NaN, too
        difference = f"its results differ from those of the plain kernels by {found:.3g} of their spread"
        logger.warning(
            "%s is not used, so decoding is slower: %s, and at most %g is accepted", what, difference, tolerance
        )
        return None
    return fast


def relative_difference(ours: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences, relative to the spread of what is expected."""
    return float((ours - expected).square().mean().sqrt() / expected.std())
