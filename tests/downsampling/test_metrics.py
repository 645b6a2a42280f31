"""The metrics of a step, against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pods_plugin.downsampling import DownsampleError, downsample_metrics, select_groups

KEYS = {
    "downsample/generated",
    "downsample/kept",
    "downsample/dropped",
    "downsample/kept_fraction",
    "downsample/reward/mean_all",
    "downsample/reward/std_all",
    "downsample/reward/mean_kept",
    "downsample/reward/std_kept",
    "downsample/response_length/mean_all",
    "downsample/response_length/std_all",
    "downsample/response_length/mean_kept",
    "downsample/response_length/std_kept",
    "downsample/group_variance/all",
    "downsample/group_variance/kept",
    "downsample/zero_variance_groups",
    "downsample/select_s",
}


@pytest.mark.parametrize("offset", [0.0, 1e8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_against_a_loop(offset, interleaved):
    rng = np.random.default_rng(0)
    ids = np.repeat([f"u{i}" for i in range(30)], rng.integers(1, 12, size=30))
    rewards = rng.normal(size=len(ids)).round(6)
    rewards[ids == "u3"] = 0.25
    rewards += offset
    lengths = rng.integers(1, 500, size=len(ids))
    if interleaved:
        order = rng.permutation(len(ids))
        ids, rewards, lengths = ids[order], rewards[order], lengths[order]
    kept = select_groups(rewards, ids, keep=4)
    kept[ids == "u5"] = False  # a group of which nothing is kept does not count as a variance of zero
    got = downsample_metrics(rewards, ids, kept, lengths, 0.5)
    assert set(got) == KEYS
    groups = [rewards[ids == name] for name in np.unique(ids)]
    kept_groups = [rewards[(ids == name) & kept] for name in np.unique(ids)]
    variances = [g.var() for g in kept_groups if len(g)]
    expected = {
        "downsample/generated": len(ids),
        "downsample/kept": kept.sum(),
        "downsample/dropped": (~kept).sum(),
        "downsample/kept_fraction": kept.mean(),
        "downsample/reward/mean_all": rewards.mean(),
        "downsample/reward/std_all": rewards.std(),
        "downsample/reward/mean_kept": rewards[kept].mean(),
        "downsample/reward/std_kept": rewards[kept].std(),
        "downsample/response_length/mean_all": lengths.mean(),
        "downsample/response_length/std_all": lengths.std(),
        "downsample/response_length/mean_kept": lengths[kept].mean(),
        "downsample/response_length/std_kept": lengths[kept].std(),
        "downsample/group_variance/all": np.mean([g.var() for g in groups]),
        "downsample/group_variance/kept": np.mean(variances),
        "downsample/zero_variance_groups": sum(len(set(g.tolist())) == 1 for g in groups),
        "downsample/select_s": 0.5,
    }
    assert got == pytest.approx(expected, rel=1e-9)
    assert all(type(v) in (int, float) for v in got.values())


def test_max_variance_raises_the_variance():
    rewards = np.random.default_rng(0).normal(size=640)
    ids = np.repeat(np.arange(10), 64)
    got = downsample_metrics(rewards, ids, select_groups(rewards, ids, keep=16), np.ones(640), 0.0)
    assert got["downsample/group_variance/kept"] > 2 * got["downsample/group_variance/all"]
    assert got["downsample/kept_fraction"] == 0.25


@pytest.mark.parametrize("rows", [0, 6])
def test_nothing_kept_gives_zeros_and_no_nan(rows, recwarn):
    got = downsample_metrics(np.ones(rows), np.arange(rows) // 2, np.zeros(rows, bool), np.ones(rows), 0.0)
    assert set(got) == KEYS
    assert all(math.isfinite(v) for v in got.values())
    assert got["downsample/kept"] == 0 and got["downsample/dropped"] == rows
    assert got["downsample/reward/mean_kept"] == got["downsample/group_variance/kept"] == 0.0
    assert got["downsample/zero_variance_groups"] == rows // 2
    assert not recwarn.list


def test_lengths_that_differ():
    with pytest.raises(DownsampleError, match=r"\(2,\), \(3,\) and \(2,\)"):
        downsample_metrics([1.0, 2.0], [0, 0], [True, True, False], [1, 1], 0.0)
    with pytest.raises(DownsampleError, match="group_ids"):
        downsample_metrics([1.0, 2.0], [0], [True, True], [1, 1], 0.0)
