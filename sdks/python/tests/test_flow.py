"""Repeating and waiting as pure generators, driven by hand: no network, no clock."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_sdk import flow
from holdfast_sdk.errors import ConnectionFailed, HoldfastError, SessionBusy
from holdfast_sdk.flow import Call, Limits, Pause, backoff, repeat


@pytest.fixture(autouse=True)
def _real_pauses(monkeypatch: pytest.MonkeyPatch, _no_pauses: None) -> None:
    monkeypatch.setattr(flow, "FIRST_PAUSE_S", 0.2)


def drive(call: Call, retries: int, *outcomes: HoldfastError | str) -> tuple[Any, list[float]]:
    """The answer and the pauses before it; each outcome answers one attempt."""
    steps = repeat(call, Limits(retries=retries))
    pauses, pending = [], list(outcomes)
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = steps.send(None)
            else:
                assert step is call
                outcome = pending.pop(0)
                step = steps.throw(outcome) if isinstance(outcome, HoldfastError) else steps.send(outcome)
    except StopIteration as stop:
        assert not pending
        return stop.value, pauses


def test_pauses_double_and_are_spread() -> None:
    call = Call("GetModelInfo", None, None)
    answer, pauses = drive(call, 4, *[ConnectionFailed("")] * 4, "answer")
    assert answer == "answer"
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, [0.2, 0.4, 0.8, 1.6], strict=True))


def test_no_pause_outlives_the_deadline() -> None:
    call = Call("GetModelInfo", None, time.monotonic() + 0.05)
    with pytest.raises(ConnectionFailed):
        drive(call, 4, ConnectionFailed(""))


def test_busy_is_repeated_only_after_a_lost_attempt() -> None:
    call = Call("AppendTokens", None, None)
    with pytest.raises(SessionBusy):
        drive(call, 4, SessionBusy(""))
    assert drive(call, 4, ConnectionFailed(""), SessionBusy(""), "answer")[0] == "answer"


@given(st.integers(0, 10_000))
def test_a_pause_is_never_longer_than_the_longest(attempt: int) -> None:
    assert 0 < backoff(attempt) <= flow.LONGEST_PAUSE_S


@pytest.mark.parametrize(
    "limits", [{"timeout_s": 0}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}, {"retries": -1}]
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Limits(**limits)


def test_no_timeout_means_no_deadline() -> None:
    assert Limits(None).call("GetModelInfo", None).timeout_s is None
    assert Limits(None).call("GetModelInfo", None, 5).timeout_s == pytest.approx(5, abs=1)
