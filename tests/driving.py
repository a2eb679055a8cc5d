"""A few lines that run an engine by hand: those of `holdfast.testing.fake_engine`."""

from holdfast.testing.fake_engine import Logits as Array
from holdfast.testing.fake_engine import difference, forward, run_chunks

__all__ = ["Array", "difference", "forward", "run_chunks"]
