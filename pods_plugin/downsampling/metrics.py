"""What a step reports about its down-sampling: all rollouts beside the kept ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pods_plugin.downsampling.rules import DownsampleError, FloatArray, IntArray
from pods_plugin.downsampling.selection import group_rows

# Metrics that add up where one step makes several selections; the others are means.
SUMS = tuple(
    f"downsample/{name}" for name in ("generated", "kept", "dropped", "zero_variance_groups", "select_s")
)


def downsample_metrics(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    kept: ArrayLike,
    response_lengths: ArrayLike,
    select_seconds: float,
) -> dict[str, float | int]:
    """Summarises a step's selection.

    verl's own `critic/score/*` see only what is trained, and max-variance selection pulls them to the middle:
    to compare with a run without down-sampling, use the `_all` metrics.

    Args:
        rewards: (sessions,) the compared metric of every session.
        group_ids: (sessions,) ints or strings.
        kept: (sessions,) bool.
        response_lengths: (sessions,) tokens.
        select_seconds: Seconds that the selection took.

    Returns:
        The metrics, the same keys at every step. Deviations and variances are of the population (divided by
        the count); `group_variance/*` is the mean over the groups that have rollouts (all, or kept). What has
        no rollouts to be computed from is 0.0, never nan.

        - `downsample/generated`, `downsample/kept`, `downsample/dropped`: sessions.
        - `downsample/kept_fraction`: kept / generated.
        - `downsample/reward/{mean,std}_{all,kept}`, `downsample/response_length/{mean,std}_{all,kept}`.
        - `downsample/group_variance/{all,kept}`: of the rewards.
        - `downsample/zero_variance_groups`: groups whose rewards, of all rollouts, are all equal.
        - `downsample/select_s`: seconds.

    Raises:
        DownsampleError: The arguments are not of one length.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    length = np.asarray(response_lengths, dtype=np.float64)
    mask = np.asarray(kept, dtype=np.bool_)
    if not reward.shape == length.shape == mask.shape == (reward.size,):
        raise DownsampleError(
            f"rewards, kept and response_lengths have shapes {reward.shape}, {mask.shape} and {length.shape}"
            "; expected one value for each session in all three"
        )
    generated, remaining = len(reward), int(np.count_nonzero(mask))
    metrics: dict[str, float | int] = {
        "downsample/generated": generated,
        "downsample/kept": remaining,
        "downsample/dropped": generated - remaining,
        "downsample/kept_fraction": remaining / generated if generated else 0.0,
    }
    for name, values in (("reward", reward), ("response_length", length)):
        for which, some in (("all", values), ("kept", values[mask])):
            metrics[f"downsample/{name}/mean_{which}"] = float(some.mean()) if some.size else 0.0
            metrics[f"downsample/{name}/std_{which}"] = float(some.std()) if some.size else 0.0
    groups = group_rows(group_ids, generated)
    ordered, ordered_mask = groups.gather(reward), groups.gather(mask)
    group_of_row = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    equal = 0
    if generated:
        low = np.minimum.reduceat(ordered, groups.starts)
        high = np.maximum.reduceat(ordered, groups.starts)
        equal = int(np.count_nonzero(low == high))
    metrics["downsample/group_variance/all"] = _mean_group_variance(ordered, group_of_row)
    metrics["downsample/group_variance/kept"] = _mean_group_variance(
        ordered[ordered_mask], group_of_row[ordered_mask]
    )
    metrics["downsample/zero_variance_groups"] = equal
    metrics["downsample/select_s"] = float(select_seconds)
    return metrics


def _mean_group_variance(values: FloatArray, group_of_row: IntArray) -> float:
    """The mean, over groups that have rows, of the population variance of (rows,) values; 0.0 if none has."""
    if values.size == 0:
        return 0.0
    sizes = np.bincount(group_of_row)
    divisor = np.maximum(sizes, 1)
    # Twice centred, so that a large offset costs no digits: the second pass removes the first mean's
    # rounding.
    for _ in range(2):
        values = values - (np.bincount(group_of_row, weights=values) / divisor)[group_of_row]
    variances = np.bincount(group_of_row, weights=values * values) / divisor
    return float(variances[sizes > 0].mean())
