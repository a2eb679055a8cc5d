"""A few lines that run an engine by hand: those of `holdfast.testing.engine_driver`."""

from holdfast.testing.engine_driver import Array, difference, forward, run_chunks

__all__ = ["Array", "difference", "forward", "run_chunks"]
