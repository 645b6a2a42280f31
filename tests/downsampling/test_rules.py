"""Max-variance against brute force in exact arithmetic, the fairness of ties, the other built-in rules."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_plugin.downsampling import select, select_groups

REWARDS = {
    "binary": st.sampled_from([0.0, 1.0]),
    "few_valued": st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 1.1]),
    "integers": st.integers(-4, 4).map(float),
    "real": st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False),
    "tied_reals": st.sampled_from([-3.7, 1 / 3, 2**0.5, 17.25]),
    "constant": st.just(0.3),
    "huge_offset": st.floats(0, 1, allow_subnormal=False).map(lambda x: 1e8 + x),
    "negative": st.floats(-5, -1e-3, allow_subnormal=False),
    "huge": st.floats(-1.7e308, 1.7e308),
    "tiny": st.integers(-5, 5).map(lambda k: k * 1e-290),
}


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], int]:
    kind = draw(st.sampled_from(sorted(REWARDS)))
    rewards = draw(st.lists(REWARDS[kind], min_size=2, max_size=12))
    return rewards, draw(st.integers(1, len(rewards)))


def as_integers(rewards) -> list[int]:
    """The rewards, exactly, in units of their common denominator."""
    fractions = [Fraction(float(r)) for r in rewards]
    unit = max(f.denominator for f in fractions)  # powers of two
    return [f.numerator * (unit // f.denominator) for f in fractions]


def scaled_variance(subset) -> int:
    """len^2 times the variance of integers, exactly."""
    return len(subset) * sum(x * x for x in subset) - sum(subset) ** 2


def variance(rewards) -> Fraction:
    values = [Fraction(float(r)) for r in rewards]
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(groups(), st.integers(0, 2**70))
def test_max_variance_is_the_optimum_of_all_subsets(group, seed):
    rewards, keep = group
    kept = select(rewards, keep=keep, seed=seed)
    assert kept.dtype == np.int64 and kept.tolist() == sorted(set(kept.tolist())) and len(kept) == keep
    exact = as_integers(rewards)
    optimum = max(scaled_variance(subset) for subset in itertools.combinations(exact, keep))
    got = scaled_variance([exact[i] for i in kept])
    assert (optimum - got) * 10**9 <= optimum


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups(), st.randoms(use_true_random=False))
def test_permuting_the_rewards_permutes_nothing_but_ties(group, shuffler):
    rewards, keep = group
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    one = sorted(rewards[i] for i in select(rewards, keep=keep))
    shuffled = [rewards[i] for i in order]
    other = sorted(shuffled[i] for i in select(shuffled, keep=keep))
    # Even the choice between multisets of equal variance is a function of (seed, group id), not of the order.
    assert one == other


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "percentile"])
def test_permuting_distinct_rewards_permutes_the_selection(rule):
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=64)
    order = rng.permutation(64)
    kept = set(select(rewards, keep=16, rule=rule).tolist())
    shuffled = set(order[select(rewards[order], keep=16, rule=rule)].tolist())
    assert kept == shuffled


def test_the_case_that_the_authors_multi_gpu_code_gets_wrong():
    # Its scan overwrites a view of the sorted indices and returns a set of (sample) variance 0.25.
    rewards = [1, 1, 1, 1, 1, 0, 0, 0]
    for seed in range(50):
        kept = np.array(rewards)[select(rewards, keep=4, seed=seed)]
        assert sorted(kept.tolist()) == [0, 0, 1, 1]
        assert kept.var(ddof=1) == pytest.approx(1 / 3)


def chi_square(counts: Counter, outcomes: int) -> float:
    expected = sum(counts.values()) / outcomes
    return sum((c - expected) ** 2 for c in counts.values()) / expected + (outcomes - len(counts)) * expected


def critical(outcomes: int) -> float:
    """The 99.99% quantile of chi-square for so many outcomes (Wilson and Hilferty's approximation)."""
    freedom = outcomes - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


TIES = {
    # rule, rewards, keep, number of equally good subsets
    "0/1": ("max_variance", [1, 1, 1, 1, 1, 0, 0, 0], 4, 30),
    "negative integers": ("max_variance", [-1, 0, -1, -1, 0, -1, -1, 0], 4, 30),
    "0/0.1": ("max_variance", [0.1, 0.1, 0.1, 0.1, 0.1, 0, 0, 0], 4, 30),
    "tie on one side": ("max_variance", [0, 1, 0.3, 1, 0.1, 1, 0, 1, 0, 1, 0, 1], 6, 80),
    "tie on one side, short": ("max_variance", [2, 0, 0, 0, 0, 0, 0], 3, 15),
    "constant": ("max_variance", [0.7] * 8, 4, 70),
    "constant, short": ("max_variance", [1.0] * 8, 2, 28),
    "both cuts in one tie": ("max_variance", [0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 1], 5, 20),
    "max_reward": ("max_reward", [1, 1, 0, 1, 1, 2, 0], 3, 6),
    "random": ("random", [5, 4, 3, 2, 1, 0], 3, 20),
    "percentile": ("percentile", [0, 0, 0, 1, 1, 1], 2, 9),
}


@pytest.mark.parametrize("over", ["seeds", "groups"])
@pytest.mark.parametrize("case", TIES)
def test_ties_are_chosen_uniformly(case, over):
    rule, rewards, keep, outcomes = TIES[case]
    repeats = 3000
    counts: Counter = Counter()
    if over == "seeds":
        for seed in range(repeats):
            counts[tuple(select(rewards, keep=keep, rule=rule, seed=(7, seed)).tolist())] += 1
    else:
        ids = np.repeat(np.arange(repeats), len(rewards))
        kept = select_groups(np.tile(rewards, repeats), ids, keep=keep, rule=rule)
        counts.update(tuple(np.flatnonzero(row).tolist()) for row in kept.reshape(repeats, -1))
    values = np.array(rewards, dtype=float)
    assert len({round(values[list(subset)].var(), 12) for subset in counts}) == 1 or rule == "random"
    assert len(counts) == outcomes
    assert chi_square(counts, outcomes) < critical(outcomes)


@pytest.mark.parametrize("n", [16, 37, 5000])  # 5000: beyond the groups that 32-bit noise serves
def test_no_position_is_favoured(n):
    groups = 6000 if n < 100 else 300
    keep = n // 4
    rewards = np.tile(np.arange(n) % 2 * 0.1, groups)
    kept = select_groups(rewards, np.repeat(np.arange(groups), n), keep=keep).reshape(groups, n)
    assert (kept.sum(axis=1) == keep).all()
    share = keep / n
    z = (kept.mean(axis=0) - share) / np.sqrt(share * (1 - share) / groups)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_odd_keep_favours_neither_successes_nor_failures(scale):
    groups = 4000
    rewards = np.tile([1, 1, 1, 1, 0, 0, 0, 0], groups) * scale
    kept = select_groups(rewards, np.repeat(np.arange(groups), 8), keep=5).reshape(groups, 8)
    successes = Counter(kept[:, :4].sum(axis=1).tolist())
    assert set(successes) == {2, 3}
    assert chi_square(successes, 2) < critical(2)


def test_candidates_of_equal_variance_are_equally_likely_though_some_have_more_splits():
    # {0, 1, 1} is one split, one smallest and two largest; {0, 0, 1} is two: two and one, three and none.
    groups = 4000
    rewards = np.tile([0, 0, 1, 1, 1], groups)
    kept = select_groups(rewards, np.repeat(np.arange(groups), 5), keep=3).reshape(groups, 5)
    assert chi_square(Counter(kept[:, 2:].sum(axis=1).tolist()), 2) < critical(2)


def test_keep_one_is_the_smallest_or_the_largest():
    chosen = Counter(int(select([0.2, 0.9, 0.4, 0.6], keep=1, seed=s)[0]) for s in range(1000))
    assert set(chosen) == {0, 1}
    assert chi_square(chosen, 2) < critical(2)


def test_signed_zeros_are_one_reward():
    for rewards in ([0.0, -0.0, 1.0, 1.0], [0.0, -0.0, 1.0, -1.0]):
        for seed in range(20):
            kept = select(rewards, keep=2, seed=seed)
            assert variance(np.array(rewards)[kept]) == (1 if -1.0 in rewards else Fraction(1, 4))
    first = Counter(int(select([0.0, -0.0, 1.0], keep=2, seed=s)[0]) for s in range(1000))
    assert chi_square(first, 2) < critical(2)


def test_max_reward_keeps_the_largest():
    rewards = [3.0, -1.0, 0.5, 9.0, 0.25, 8.0]
    assert select(rewards, keep=3, rule="max_reward").tolist() == [0, 3, 5]
    assert {0, 2} < set(select([1, 0, 1, 0, 0], keep=3, rule="max_reward").tolist())


def test_percentile_keeps_the_middle_of_each_slice():
    rewards = np.arange(16.0)
    assert select(rewards, keep=4, rule="percentile").tolist() == [2, 6, 10, 14]
    assert select(rewards, keep=1, rule="percentile").tolist() == [8]
    assert select(-np.arange(5.0), keep=2, rule="percentile").tolist() == [1, 3]
    for n in range(1, 40):
        for keep in range(1, n + 1):
            expected = [int(Fraction(2 * k + 1, 2 * keep) * n) for k in range(keep)]
            assert select(np.arange(n), keep=keep, rule="percentile").tolist() == expected


def test_random_ignores_the_rewards():
    one = select(np.arange(32.0), keep=8, rule="random", seed=3)
    other = select(-np.ones(32), keep=8, rule="random", seed=3)
    assert one.tolist() == other.tolist()
    assert select(np.arange(32.0), keep=8, rule="random", seed=4).tolist() != one.tolist()


def test_large_group_is_optimal_and_exact_in_number():
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 7, size=6000) / 10
    kept = select(rewards, keep=1001)
    ordered = np.sort(rewards)
    best = max(np.concatenate([ordered[:i], ordered[6000 - 1001 + i :]]).var() for i in range(1002))
    assert len(kept) == 1001
    assert rewards[kept].var() == pytest.approx(best, rel=1e-12)
