from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_plugin.downsampling import select
from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.signal import PassRates, beta_of_run, kept_variance, signal


@pytest.mark.parametrize(("n", "m"), [(8, 8), (8, 4), (8, 3), (9, 5), (12, 2), (6, 5)])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_kept_variance_is_that_of_the_real_rule(n: int, m: int, rate: float) -> None:
    """Every number of right rollouts, selected by the rule that training uses."""
    expected = 0.0
    for right in range(n + 1):
        rewards = np.array([1.0] * right + [0.0] * (n - right))
        kept = rewards[select(rewards, keep=m, rule="max_variance", seed=0)]
        expected += math.comb(n, right) * rate**right * (1 - rate) ** (n - right) * kept.var()
    assert kept_variance(n, m, PassRates((rate,))) == pytest.approx(expected, rel=1e-12)


def test_without_down_sampling_it_is_the_textbook_variance() -> None:
    assert kept_variance(16, 16, PassRates((0.3,))) == pytest.approx(0.3 * 0.7 * 15 / 16)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.4, 2.5), (3, 0.7)])
def test_beta_profile_is_the_binomial_averaged_over_it(a: float, b: float) -> None:
    rates = np.random.default_rng(0).beta(a, b, size=4000)
    drawn = PassRates(tuple(rates.tolist())).right(12)
    assert PassRates(a=a, b=b).right(12) == pytest.approx(drawn, abs=0.02)
    assert PassRates(a=a, b=b).right(12).sum() == pytest.approx(1)


@given(st.integers(2, 40), st.integers(0, 100), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_more_rollouts_never_lower_the_kept_variance(m: int, more: int, rate: float) -> None:
    profile = PassRates((rate,))
    assert kept_variance(m + more + 1, m, profile) >= kept_variance(m + more, m, profile) - 1e-12
    assert kept_variance(m + more, m, profile) <= 0.25 + 1e-12


def test_signal_is_the_squared_signal_to_noise_of_the_gradient() -> None:
    """The claim of the module: with class means that differ by d and covariance S, it is m v |d|^2 / trace S."""
    rng = np.random.default_rng(1)
    m, ones, width = 8, 3, 5
    rewards = np.array([1.0] * ones + [0.0] * (m - ones))
    difference, spread = rng.normal(size=width), 1.7
    scores = spread * rng.normal(size=(100_000, m, width)) + rewards[:, None] * difference
    gradients = ((rewards - rewards.mean())[:, None] * scores).mean(axis=1)
    noise = gradients.var(axis=0).sum()
    ratio = (gradients.mean(axis=0) ** 2).sum() / noise
    v = ones / m * (1 - ones / m)
    assert ratio == pytest.approx(m * v * (difference**2).sum() / (width * spread**2), rel=0.03)
    assert signal(10, m, m, PassRates((0.5,))) == 10 * m * kept_variance(m, m, PassRates((0.5,)))


@given(st.floats(0.2, 5), st.floats(0.2, 5), st.integers(4, 64))
@settings(max_examples=100, deadline=None)
def test_profile_of_a_run_is_recovered(a: float, b: float, n: int) -> None:
    profile = PassRates(a=a, b=b)
    found = beta_of_run(profile.mean, kept_variance(n, n, profile), n)
    assert found is not None
    assert (found.a, found.b) == pytest.approx((a, b), rel=1e-6)


def test_no_profile_of_rewards_that_are_all_alike() -> None:
    assert beta_of_run(1.0, 0.0, 8) is None
    assert beta_of_run(0.5, 0.25, 8) is None  # more variance than 0/1 rewards of one pass rate have


@pytest.mark.parametrize("text", ["beta(1)", "beta(0,1)", "beta(nan,1)", "0.1,2", "often", "", "0.1;0.2"])
def test_a_wrong_profile_is_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="expected rates"):
        PassRates.parse(text)


def test_profiles_are_parsed() -> None:
    assert PassRates.parse("0.1, 0.3,1") == PassRates((0.1, 0.3, 1.0))
    assert PassRates.parse("Beta(0.5, 2)") == PassRates(a=0.5, b=2.0)
