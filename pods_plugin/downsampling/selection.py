"""All groups of a step -> the rollouts kept: checks, grouping by id, a call of the rule for each size."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pods_plugin.downsampling.rules import (
    BatchedRule,
    BoolArray,
    Bucket,
    DownsampleError,
    FloatArray,
    IntArray,
    KeyArray,
    brief,
    mix,
    mix_int,
    resolve_rule,
)

_BLOCK_ROWS = 32768  # 256 KiB of float64


def select(
    rewards: ArrayLike, keep: int = 16, rule: str = "max_variance", seed: int | Sequence[int] = 0
) -> IntArray:
    """Selects the rollouts of one group to train on.

    Args:
        rewards: (n,) finite numbers.
        keep: m, rollouts to keep, 1 <= m <= n.
        rule: `max_variance`, `max_reward`, `random`, `percentile`, a registered name, or `module:function`.
        seed: Decides ties (and `random`); an int or a sequence of ints.

    Returns:
        (m,) int64 indices into `rewards`, ascending. A rule of a user may keep fewer.

    Raises:
        DownsampleError: keep > n, a reward that is not finite, an unknown rule, or a rule that fails.

    Source: PODS, arXiv 2504.13818.
    """
    values = _as_rewards(rewards)
    if _check_keep(keep) > len(values):
        raise DownsampleError(f"keep={keep} of {len(values)} rewards; expected keep <= {len(values)}")
    kept = select_groups(values, np.zeros(len(values), dtype=np.int64), keep=keep, rule=rule, seed=seed)
    return np.flatnonzero(kept).astype(np.int64, copy=False)


def select_groups(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    keep: int = 16,
    rule: str = "max_variance",
    seed: int | Sequence[int] = 0,
    drop_zero_variance: bool = False,
) -> BoolArray:
    """Selects the rollouts of many groups at once; only a user's rule takes a Python loop over groups.

    What is kept of a group depends on its id, the rewards of its rows in their order, and the arguments
    below: not on other groups, nor on where its rows stand between theirs.

    Args:
        rewards: (rows,) finite numbers.
        group_ids: (rows,) ints or strings, the group (prompt) of each row, in any order.
        keep: m, rollouts to keep of each group, m >= 1. Groups of at most m rollouts are kept whole.
        rule: `max_variance`, `max_reward`, `random`, `percentile`, a registered name, or `module:function`.
        seed: Decides ties (and `random`), together with the group id; an int or a sequence of ints.
        drop_zero_variance: Keep nothing of a group whose rewards are all equal.

    Returns:
        (rows,) bool, True where the row is kept.

    Raises:
        DownsampleError: Shapes that differ, a reward that is not finite (its group is named), an unknown
            rule, or a rule of a user that returned something that is no selection.
    """
    values = _as_rewards(rewards)
    keep = _check_keep(keep)
    apply_rule = resolve_rule(rule)
    seed_key = _hash_seed(seed)
    groups = group_rows(group_ids, len(values))
    if len(values) == 0:
        return np.zeros(0, dtype=np.bool_)
    if not np.isfinite(values).all():
        bad = np.flatnonzero(~np.isfinite(values))
        raise DownsampleError(
            f"reward of group {np.asarray(group_ids)[bad[0]]} is {values[bad[0]]} (row {bad[0]}; {len(bad)} "
            f"of {len(values)} rewards are not finite); expected finite numbers: mend the reward function"
        )
    values = groups.gather(values)
    keys = mix(groups.words ^ np.uint64(seed_key))
    kept = np.ones(len(values), dtype=np.bool_)
    sizes = groups.sizes
    size = int(sizes[0])
    if (sizes == size).all():
        if size > keep:
            bucket = Bucket(values.reshape(-1, size), groups.ids, keys)
            _apply_in_blocks(apply_rule, bucket, keep, kept.reshape(-1, size))
    else:
        for size in np.unique(sizes[sizes > keep]).tolist():
            members = np.flatnonzero(sizes == size)
            rows = groups.starts[members, None] + np.arange(size)
            selected = np.empty(rows.shape, dtype=np.bool_)
            bucket = Bucket(values[rows], groups.ids[members], keys[members])
            _apply_in_blocks(apply_rule, bucket, keep, selected)
            kept[rows] = selected
    if drop_zero_variance:
        low, high = np.minimum.reduceat(values, groups.starts), np.maximum.reduceat(values, groups.starts)
        kept &= np.repeat(low != high, sizes)
    return groups.scatter(kept)


def _apply_in_blocks(rule: BatchedRule, bucket: Bucket, keep: int, out: BoolArray) -> None:
    """Applies a rule to blocks of groups whose temporaries fit the cache: twice as fast on large steps."""
    groups, n = out.shape
    block = max(1, _BLOCK_ROWS // n)
    for start in range(0, groups, block):
        part = slice(start, start + block)
        out[part] = rule(Bucket(bucket.rewards[part], bucket.ids[part], bucket.keys[part]), keep)


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows sorted by group: where each group starts. Rows of a group keep their order.

    Attributes:
        order: (rows,) int64, the rows group after group; None if they are already so.
        starts: (groups,) int64, the first position of each group in that order.
        sizes: (groups,) int64.
        ids: (groups,) the group ids.
        words: (groups,) uint64, a function of each id alone, the same in every process.
    """

    order: IntArray | None
    starts: IntArray
    sizes: IntArray
    ids: NDArray[Any]
    words: KeyArray

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns (rows,) `values` group after group."""
        return values if self.order is None else values[self.order]

    def scatter(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns (rows,) what `gather` gathered, back in the order of the rows."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result


def group_rows(group_ids: ArrayLike, rows: int) -> GroupedRows:
    """Groups `rows` rows by their ids, ints or strings.

    Rows whose groups are contiguous, as verl's are, are found to be so without sorting them.

    Raises:
        DownsampleError: Not (rows,) ids, or ids that are neither ints nor strings.
    """
    ids = np.asarray(group_ids)
    if ids.shape != (rows,):
        raise DownsampleError(f"group_ids has shape {ids.shape}; expected ({rows},), one id for each reward")
    starts = np.append(np.zeros(min(rows, 1), dtype=np.int64), np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    sizes = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
    sizes[-1:] = rows - starts[-1:]
    runs = _as_ids(ids[starts])
    words = _as_words(runs)
    if _all_different(words):
        return GroupedRows(None, starts, sizes, runs, words)
    unique, first, group_of_run = np.unique(runs, return_index=True, return_inverse=True)
    if len(unique) == len(runs):  # two strings with one word: harmless
        return GroupedRows(None, starts, sizes, runs, words)
    group_of_row = np.repeat(group_of_run, sizes)
    sizes = np.bincount(group_of_row)
    starts = np.cumsum(sizes) - sizes
    return GroupedRows(np.argsort(group_of_row, kind="stable"), starts, sizes, unique, words[first])


def _all_different(values: KeyArray) -> bool:
    if (values[1:] > values[:-1]).all():  # 0, 1, 2, ...
        return True
    ordered = np.sort(values)
    return bool((ordered[1:] != ordered[:-1]).all())


def _as_rewards(rewards: ArrayLike) -> FloatArray:
    try:
        values = np.asarray(rewards)
        if values.dtype.kind not in "fiubO":
            raise TypeError
        values = values.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise DownsampleError(f"rewards={brief(rewards)}; expected an array of numbers") from None
    if values.ndim != 1:
        raise DownsampleError(
            f"rewards has shape {values.shape}; expected one dimension, a reward for each rollout"
        )
    return np.ascontiguousarray(values)


def _check_keep(keep: object) -> int:
    if isinstance(keep, bool) or not isinstance(keep, numbers.Integral) or keep < 1:
        raise DownsampleError(f"keep={brief(keep)}; expected an int >= 1, such as keep=16")
    return int(keep)


def _as_ids(ids: NDArray[Any]) -> NDArray[Any]:
    """Ids as an array of native ints or fixed-width strings."""
    if ids.dtype.kind == "O":
        items = ids.tolist()
        kinds = {str if isinstance(x, str) else type(x) for x in items}
        if kinds == {str}:
            return np.array(items, dtype=np.str_)
        if kinds and all(issubclass(kind, numbers.Integral) and kind is not bool for kind in kinds):
            ids = np.array(items)
    if ids.dtype.kind in "iuU" or ids.size == 0:
        return ids.astype(ids.dtype.newbyteorder("="), copy=False)
    example = brief(ids.tolist()[0])
    raise DownsampleError(
        f"group ids of type {ids.dtype}, such as {example}; expected all ints or all strings"
    )


def _as_words(ids: NDArray[Any]) -> KeyArray:
    """Returns (groups,) uint64, a function of each id alone: not of dtype width, process or other ids."""
    if ids.dtype.kind == "u":
        return ids.astype(np.uint64)
    if ids.dtype.kind != "U":
        return ids.astype(np.int64).view(np.uint64)
    width = ids.dtype.itemsize // 4
    characters = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), width)
    # Multilinear hashing; the zeros that pad a short string add nothing.
    factors = mix(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
    words: KeyArray = (characters * factors).sum(axis=1, dtype=np.uint64)
    return words


def _hash_seed(seed: int | Sequence[int]) -> int:
    """Returns a 64-bit hash of the seed, an int or several, in their order."""
    parts = (seed,) if isinstance(seed, numbers.Integral) else seed
    if isinstance(parts, str) or not isinstance(parts, (Sequence, np.ndarray)):
        raise DownsampleError(f"seed={brief(seed)}; expected an int or a sequence of ints")
    word = 0xCBF29CE484222325
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, numbers.Integral):
            raise DownsampleError(f"seed={brief(seed)}; expected an int or a sequence of ints")
        word = mix_int(word ^ (int(part) & 0xFFFFFFFFFFFFFFFF))
    return word
