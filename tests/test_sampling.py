import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from holdfast.engine.sampling import Pick, adjust, gumbel, sample_rows, survivors
from holdfast.errors import InvalidArgument, NonFiniteLogits
from holdfast.generation import Sampled, SamplingParams

# Quarters: two logits are equal or clearly apart, so that rounding does not decide which of them is cut.
rows = st.lists(st.integers(-120, 120), min_size=2, max_size=40).map(lambda x: np.array(x, np.float32) / 4)


def _draw(logits: np.ndarray, position: int = 7, **options: object) -> Sampled:
    params = SamplingParams(**{"seed": 1, **options})  # type: ignore[arg-type]
    outcome = sample_rows(logits[None], [Pick(row=0, position=position, params=params)])[0]
    assert isinstance(outcome, Sampled)
    return outcome


def test_greedy_takes_the_first_of_the_largest() -> None:
    drawn = _draw(np.array([1, 3, 3, 2], np.float32), temperature=0)
    assert drawn.token == 1
    assert drawn.sampling_logprob == 0
    assert drawn.logprob == pytest.approx(special.log_softmax([1, 3, 3, 2])[1], abs=1e-6)


@given(rows, st.floats(0.1, 3), st.integers(0, 45), st.floats(0.05, 1), st.floats(0, 1))
def test_filters_keep_what_the_definitions_say(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(seed=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, logprobs = survivors(logits.astype(np.float64) / temperature, params)
    expected = _plain_filter(logits / np.float64(temperature), top_k, top_p, min_p)
    kept = expected[expected > 0]
    near = np.abs(kept - kept.max() * math.exp(-19.5)).min() < 1e-9
    reachable = np.flatnonzero((expected > 0) & (np.log(np.maximum(expected, 1e-300)) >= np.log(kept.max()) - 19.45))
    if not near:
        assert list(ids) == list(reachable)
        assert np.exp(logprobs) == pytest.approx(expected[ids], rel=1e-6)


def _plain_filter(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The same in the plainest way: sort, cut, renormalise, one filter after the other."""
    scaled = np.asarray(scaled, np.float64)
    p = special.softmax(scaled)
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(p.size, bool)
    keep[order[: top_k or p.size]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep = np.zeros(p.size, bool)
        keep[order[before < top_p - 1e-9]] = True
        keep &= p > 0
        p = np.where(keep, p, 0) / p[keep].sum()
    keep = p >= min_p * p.max() * (1 - 1e-9)
    keep &= p > 0
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.4, "top_k": 12},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 2},
    ],
)
def test_sampling_follows_the_distribution(options: dict[str, float]) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 50).astype(np.float32)
    draws = 4000
    counts = np.zeros(50)
    for position in range(draws):
        counts[_draw(logits, position, seed=99, **options).token] += 1
    temperature = options.get("temperature", 1.0)
    expected = _plain_filter(
        logits / temperature,
        int(options.get("top_k", 0)),
        options.get("top_p", 1.0),
        options.get("min_p", 0.0),
    )
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5  # chi-square wants a handful expected in every class
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * draws
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 1e-3


def test_pruning_what_noise_cannot_lift_changes_nothing() -> None:
    source = np.random.default_rng(1)
    for position in range(200):
        logits = source.normal(0, 12, 5000).astype(np.float32)
        drawn = _draw(logits, position, seed=5)
        scaled = logits.astype(np.float64) - special.logsumexp(logits.astype(np.float64))
        assert drawn.token == int((scaled + gumbel(5, position, np.arange(5000))).argmax())
        assert drawn.sampling_logprob == pytest.approx(scaled[drawn.token], abs=1e-5)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30, 1e300])
def test_extreme_temperatures_are_greedy_or_even(temperature: float) -> None:
    logits = np.array([0.0, 3.0, 2.9, -1e30], np.float32)
    drawn = _draw(logits, temperature=temperature, logit_bias={0: 1e6} if temperature < 1 else {})
    assert temperature > 1 or drawn.token == 0
    assert math.isfinite(drawn.sampling_logprob)


def test_both_logprobs_are_recorded() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    drawn = _draw(logits, temperature=0.5, top_k=2, logit_bias={0: -5.0})
    assert drawn.token in (2, 3)
    assert drawn.logprob == pytest.approx(special.log_softmax(logits)[drawn.token], abs=1e-6)
    assert drawn.sampling_logprob == pytest.approx(special.log_softmax(logits[2:] / 0.5)[drawn.token - 2], abs=1e-6)


def test_top_logprobs_are_the_models_own_in_order() -> None:
    logits = np.array([0.0, 5.0, 2.0, 5.0], np.float32)
    drawn = _draw(logits, temperature=0, top_logprobs=3, logit_bias={1: -50.0})
    expected = special.log_softmax(logits)
    assert [token for token, _ in drawn.top] == [1, 3, 2]
    assert [logprob for _, logprob in drawn.top] == pytest.approx([expected[1], expected[3], expected[2]], abs=1e-6)


def test_penalties_lower_what_was_said() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    params = SamplingParams(seed=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    pick = Pick(row=0, position=0, params=params, sampled=[2, 2], visible=[0, 1, 1])
    assert adjust(logits, pick).tolist() == [1.0, -4.0, 0.0]


def test_a_large_nucleus_is_found_beyond_the_first_guess() -> None:
    logits = np.zeros(5000, np.float32)
    ids, _ = survivors(logits.astype(np.float64), SamplingParams(seed=0, top_p=0.8999))
    assert len(ids) == 4500


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 3] = bad
    params = SamplingParams(seed=0, temperature=0)
    outcomes = sample_rows(logits, [Pick(row=row, position=0, params=params) for row in range(3)])
    assert [type(outcome) for outcome in outcomes] == [Sampled, NonFiniteLogits, Sampled]


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": 2},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0},
        {"top_logprobs": 21},
        {"choice": -1},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: 1e308}},
        {"frequency_penalty": 1e300},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        SamplingParams(**{"seed": 0, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [{"logit_bias": {64: 1.0}}, {"stop_token_ids": frozenset({-1})}])
def test_ids_outside_the_vocabulary_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="outside the vocabulary of 64"):
        SamplingParams(seed=0, **bad).check_vocabulary(64)  # type: ignore[arg-type]
