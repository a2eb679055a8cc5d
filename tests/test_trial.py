"""A faster implementation takes the place of the plain one only where it can be built and computes the same."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast.engine.torch.trial import accepted, relative_difference

EXPECTED = torch.linspace(-1, 1, 50)


def tried(build: Callable[[], Tensor]) -> Tensor | None:
    """A fast implementation is the tensor that it computes."""
    return accepted("the fast kernel", build, lambda fast: EXPECTED if fast is None else fast, tolerance=0.1)


def test_what_computes_nearly_the_same_is_used(caplog: pytest.LogCaptureFixture) -> None:
    fast = EXPECTED + 0.01
    assert tried(lambda: fast) is fast
    assert caplog.records == []


@pytest.mark.parametrize(
    ("factor", "named"), [(1.2, "by 0.198 of their spread"), (float("nan"), "by nan of their spread")]
)
def test_what_computes_something_else_is_not_used(factor: float, named: str, caplog: pytest.LogCaptureFixture) -> None:
    assert tried(lambda: EXPECTED * factor) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the fast kernel is not used" in record.getMessage()
    assert named in record.getMessage()


def test_what_cannot_be_built_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Tensor:
        raise RuntimeError("libnvrtc.so.13 was not found")

    assert tried(build) is None
    (record,) = caplog.records
    assert "libnvrtc.so.13 was not found" in record.getMessage()


def test_what_fails_when_it_runs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def run(fast: Tensor | None) -> Tensor:
        if fast is None:
            return EXPECTED
        raise RuntimeError("CUDA driver: too many blocks in cooperative launch (720)")

    assert accepted("the fast kernel", lambda: EXPECTED, run, tolerance=0.1) is None
    assert "(720)" in caplog.text


def test_an_error_from_which_the_device_does_not_recover_is_raised() -> None:
    def build() -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        tried(build)


def test_the_difference_is_relative_to_the_spread() -> None:
    assert relative_difference(EXPECTED, EXPECTED) == 0
    assert relative_difference(1000 * EXPECTED * 1.5, 1000 * EXPECTED) == pytest.approx(0.5, abs=0.02)
