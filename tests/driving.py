"""A few lines that run an engine by hand: those of `holdfast.testing.driving`."""

from holdfast.testing.driving import Array, difference, forward, run_chunks

__all__ = ["Array", "difference", "forward", "run_chunks"]
