"""The selection rules (max_variance, max_reward, random, percentile), the registry, and rules of a user.

A built-in rule sees a `Bucket`, all groups of one size at once, and returns which rollouts each group keeps.
A rule of a user sees one group. Ties are never broken by position: equal rewards are ordered by noise that is
a function of (seed, group id, row of the group) alone.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
KeyArray = NDArray[np.uint64]

UserRule = Callable[[FloatArray, int, np.random.Generator], Any]
_F = TypeVar("_F", bound=Callable[..., Any])

# Variances this close (relative) count as equal. Far above what rounding does to a group of some thousand
# rollouts, far below any difference that matters.
_EQUAL_VARIANCE = 1e-11

_GAMMA = 0x9E3779B97F4A7C15  # the increment of splitmix64
_WORD = 0xFFFFFFFFFFFFFFFF
_SHORT_GROUP = 4096  # rollouts, up to which 32-bit noise has room for the number of a row
_MAGNITUDE = 0x7FFFFFFF00000000  # the upper word of a double without its sign


class DownsampleError(ValueError):
    """Something given to down-sampling cannot be used; one line with what was given and what to write."""


def mix(x: KeyArray) -> KeyArray:
    """Scrambles 64-bit words in place with the finaliser of splitmix64 (Steele et al., 2014), a bijection."""
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def mix_int(x: int) -> int:
    """Returns what `mix` makes of (x + the increment of splitmix64), for one Python int."""
    x = (x + _GAMMA) & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Groups of the same size, with the randomness that belongs to each.

    Attributes:
        rewards: (groups, n) float64, finite, contiguous.
        ids: (groups,) the group ids, for messages.
        keys: (groups,) uint64, a hash of (seed, group id).
    """

    rewards: FloatArray
    ids: NDArray[Any]
    keys: KeyArray

    def noise(self) -> NDArray[Any]:
        """Returns (groups, n) uint32 (uint64 if n > 4096) of noise, different for all rows of a group.

        The noise is counter-based: group by group the splitmix64 stream that starts at the group's key, so
        that no group depends on another. The three top bits are 0, left to `_keep_ends`. The lowest bits are
        the row, which makes the values different; it decides an order only where all other bits are equal,
        which happens to one pair of rows in 2^23 at n = 64, in 2^17 at n = 4096.
        """
        n = self.rewards.shape[1]
        dtype = np.dtype(np.uint32 if n <= _SHORT_GROUP else np.uint64)
        per_word = 8 // dtype.itemsize
        words = -(-n // per_word)
        row_mask = (1 << (n - 1).bit_length()) - 1
        rows = np.arange(words * per_word, dtype=dtype) & dtype.type(row_mask)
        mask = np.full(per_word, (1 << _noise_bits(dtype)) - 1 - row_mask, dtype=dtype).view(np.uint64)
        # Words in rows, groups in columns: numpy is fast along the long axis.
        noise = mix(self.keys + np.arange(1, words + 1, dtype=np.uint64)[:, None] * np.uint64(_GAMMA))
        noise &= mask
        noise |= rows.view(np.uint64)[:, None]
        return noise.T.copy().view(dtype)[:, :n]

    def draw(self, choices: IntArray) -> IntArray:
        """Returns (groups,) int64, for each group a uniform number in 0 .. choices - 1."""
        words = mix(self.keys.copy())  # word 0 of the stream; the rows have the others
        return (words % choices.astype(np.uint64)).astype(np.int64)


BatchedRule = Callable[[Bucket, int], BoolArray]


def _noise_bits(dtype: np.dtype[Any]) -> int:
    """How many bits of noise a key has below the three that `_keep_ends` uses."""
    return 8 * dtype.itemsize - 3


def _cut(keys: NDArray[Any], ordered: NDArray[Any], lowest: IntArray, keep: int) -> BoolArray:
    """Marks the `lowest` smallest and `keep - lowest` largest keys of each group, and all that equal them.

    Args:
        keys: (G, n) between the extremes of their dtype (infinities, for floats), keep < n.
        ordered: (G, n) the keys, sorted in each group.
        lowest: (G,) int64 in 0 .. keep.
        keep: Keys to mark in each group.

    Returns:
        (G, n) bool, at least `keep` True in each row.
    """
    groups, n = keys.shape
    if keys.dtype.kind == "f":
        none_below, none_above = -np.inf, np.inf
    else:
        none_below, none_above = np.iinfo(keys.dtype).min, np.iinfo(keys.dtype).max
    flat = ordered.ravel()
    position = np.arange(-1, groups * n - 1, n)
    position += lowest
    low = flat.take(position, mode="clip")
    position += n - keep + 1
    high = flat.take(position, mode="clip")
    low[lowest == 0] = none_below
    high[lowest == keep] = none_above
    marked: BoolArray = keys <= low[:, None]
    marked |= keys >= high[:, None]
    return marked


def _keep_ends(bucket: Bucket, ordered: FloatArray, lowest: IntArray, keep: int) -> BoolArray:
    """Keeps the `lowest` smallest and `keep - lowest` largest rewards of each group; noise breaks ties.

    Args:
        bucket: G groups of n rollouts, keep < n.
        ordered: (G, n) the rewards, sorted in each group.
        lowest: (G,) int64 in 0 .. keep.
        keep: Rollouts to keep of each group.

    Returns:
        (G, n) bool, `keep` True in each row.
    """
    rewards = bucket.rewards
    kept = _cut(rewards, ordered, lowest, keep)
    if np.count_nonzero(kept) == len(rewards) * keep:
        return kept
    # Some group has more rewards equal to a cut than places for them. Refine the order by noise, which makes
    # the cuts exact: in the three top bits whether a reward is below the low cut, on it, between, on the high
    # cut or above.
    n = rewards.shape[1]
    group = np.arange(len(rewards))
    low = np.where(lowest > 0, ordered[group, lowest - 1], -np.inf)[:, None]
    high = np.where(lowest < keep, ordered[group, np.minimum(lowest + (n - keep), n - 1)], np.inf)[:, None]
    level = (rewards >= low).view(np.uint8)
    level += 1  # no key is 0
    level += rewards > low
    level += rewards >= high
    level += rewards > high
    keys = bucket.noise()
    keys |= np.left_shift(level, _noise_bits(keys.dtype), dtype=keys.dtype)
    return _cut(keys, np.sort(keys, axis=-1), lowest, keep)


def _best_split(bucket: Bucket, low: FloatArray, high: FloatArray) -> IntArray:
    """Finds how many of the smallest rewards a subset of largest variance has.

    Args:
        bucket: G groups, for the choice between splits of equal variance.
        low: (keep, G) the smallest rewards of each group, ascending; overwritten.
        high: (keep, G) the largest rewards of each group, ascending; overwritten.

    Returns:
        (G,) int64 in 0 .. keep.
    """
    keep, groups = low.shape
    middle = 0.5 * low[0] + 0.5 * high[-1]
    half_range = 0.5 * high[-1] - 0.5 * low[0]
    half_range[half_range == 0.0] = 1.0
    for rewards in (low, high):
        rewards -= middle
        rewards /= half_range
    swap = low - high
    # Row i is candidate i, the i smallest and the keep - i largest: the sums of rewards and of their squares.
    sums = np.empty((keep + 1, groups))
    score = np.empty((keep + 1, groups))
    high.sum(axis=0, out=sums[0])
    np.multiply(swap, low + high, out=score[1:])
    np.square(high, out=high)
    high.sum(axis=0, out=score[0])
    for i in range(keep):  # prefix sums; faster over whole rows than numpy's cumsum
        np.add(sums[i], swap[i], out=sums[i + 1])
        score[i + 1] += score[i]
    # keep^2 times the variance; at least 2 * keep unless keep = 1 or all rewards are equal.
    score *= keep
    sums *= sums
    score -= sums
    same = swap == 0.0
    if same.any():  # a swap of equal rewards gives the same multiset again: count it once
        np.copyto(score[1:], -np.inf, where=same)
    best = score.max(axis=0)
    best *= 1.0 - _EQUAL_VARIANCE
    best -= _EQUAL_VARIANCE
    optimal = score >= best
    if np.count_nonzero(optimal) == groups:
        return (np.arange(keep + 1.0) @ optimal).astype(np.int64)
    rank = optimal.cumsum(axis=0)
    return (rank > bucket.draw(rank[-1])).argmax(axis=0)


def max_variance(bucket: Bucket, keep: int) -> BoolArray:
    """Keeps the rollouts whose rewards have the largest variance, exactly.

    By the paper's lemma such a set is the i smallest and keep - i largest rewards for some i. Going from i to
    i + 1 swaps one large reward for one small one, so sums and sums of squares of all keep + 1 candidates are
    prefix sums over those swaps: O(n log n) for the sort, O(keep) for the rest. Rewards are centred on the
    middle of their range and scaled by it, so that a large offset or scale costs no digits.

    Different candidates may have the same variance: 0/1 rewards with odd `keep` allow one success more or one
    failure more. Each distinct candidate (as a multiset of rewards, variances equal to 1e-11 relative) is
    then equally likely, so neither side is favoured. With keep = 1 all variances are 0 and the choice is
    between smallest and largest.

    Source: PODS, arXiv 2504.13818, max-variance down-sampling.
    """
    keys = _short_keys(bucket)
    if keys is None:
        ordered = np.sort(bucket.rewards, axis=-1)
        low, high = ordered[:, :keep].T.copy(), ordered[:, -keep:].T.copy()
        return _keep_ends(bucket, ordered, _best_split(bucket, low, high), keep)
    ordered_keys = np.sort(keys, axis=-1)
    low, high = _short_rewards(ordered_keys[:, :keep].T), _short_rewards(ordered_keys[:, -keep:].T)
    return _cut(keys, ordered_keys, _best_split(bucket, low, high), keep)


def _short_keys(bucket: Bucket) -> IntArray | None:
    """Packs a short reward and its noise into one word, so that one sort orders both.

    Short are doubles that end in 32 zero bits: 0 and 1, other integers up to 2^21, halves, quarters, ...
    Without this path such rewards, nearly all ties, would take a second sort. Both paths choose the same
    rows, as they must: which one is taken depends on the other groups.

    Returns:
        (groups, n) int64 in the order of (reward, noise), or None if some reward is not short.
    """
    if bucket.rewards.shape[1] > _SHORT_GROUP:
        return None
    bits = bucket.rewards.view(np.int64)
    union = int(np.bitwise_or.reduce(bits, axis=None))
    if union & 0xFFFFFFFF:
        return None
    if union < 0:  # doubles are sign and magnitude: order the negative ones as integers are; + 0.0 drops -0.0
        bits = (bucket.rewards + 0.0).view(np.int64)
        bits ^= (bits >> 63) & _MAGNITUDE
    return bits | bucket.noise()


def _short_rewards(keys: IntArray) -> FloatArray:
    """Returns the rewards of `_short_keys`, whose rows must ascend, in a new contiguous array."""
    words = keys.copy()
    words &= ~0xFFFFFFFF
    if (words[0] < 0).any():
        words ^= (words >> 63) & _MAGNITUDE
    return words.view(np.float64)


def max_reward(bucket: Bucket, keep: int) -> BoolArray:
    """Keeps the rollouts of largest reward."""
    lowest = np.zeros(len(bucket.rewards), dtype=np.int64)
    return _keep_ends(bucket, np.sort(bucket.rewards, axis=-1), lowest, keep)


def random(bucket: Bucket, keep: int) -> BoolArray:
    """Keeps a uniform subset, whatever the rewards."""
    noise: NDArray[Any] = bucket.noise()
    return noise <= np.sort(noise, axis=-1)[:, keep - 1, None]


def percentile(bucket: Bucket, keep: int) -> BoolArray:
    """Keeps the rollouts at the 0.5/keep, 1.5/keep, ... quantiles of the sorted rewards.

    These are the positions floor((k + 0.5) / keep * n), k = 0 .. keep - 1, of the sorted order, which are
    distinct.
    """
    n = bucket.rewards.shape[1]
    positions = (2 * np.arange(keep) + 1) * n // (2 * keep)  # floats could round below a whole number
    order = np.lexsort((bucket.noise(), bucket.rewards), axis=-1)
    kept = np.zeros(bucket.rewards.shape, dtype=np.bool_)
    np.put_along_axis(kept, order[:, positions], True, axis=1)
    return kept


_BUILT_IN: dict[str, BatchedRule] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "random": random,
    "percentile": percentile,
}
_REGISTERED: dict[str, UserRule] = {}


def rule_names() -> list[str]:
    """The names that can be written for `rule`: the built-in ones first, then those registered."""
    return [*_BUILT_IN, *_REGISTERED]


def register_rule(name: str) -> Callable[[_F], _F]:
    """Registers a rule of your own under a name.

    The decorated function is called once for each group with more than `keep` rollouts, as
    `rule(rewards: (n,) float64, keep: int, rng: numpy.random.Generator)`, and returns (k,) integer indices of
    the rollouts to keep, 1 <= k <= keep, all different. `rng` is seeded by (seed, group id). Smaller groups
    are kept whole.

    Raises:
        DownsampleError: The name is taken, empty or holds a colon (which marks `module:function`).
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise DownsampleError(
            f"register_rule({name!r}): expected a non-empty name without a colon, such as 'my_rule'"
        )
    if name in _BUILT_IN or name in _REGISTERED:
        raise DownsampleError(
            f"register_rule({name!r}): the name is taken; there are {', '.join(rule_names())}"
        )

    def register(function: _F) -> _F:
        if not callable(function):
            raise DownsampleError(f"register_rule({name!r}): expected a function, got {brief(function)}")
        if name in _REGISTERED:
            raise DownsampleError(f"register_rule({name!r}): the name is taken; choose another")
        _REGISTERED[name] = function
        return function

    return register


def resolve_rule(name: str) -> BatchedRule:
    """Finds a rule by its name, or imports it when the name has the form `module:function`.

    Raises:
        DownsampleError: There is no such rule (the line says which there are), or it cannot be imported.
    """
    if isinstance(name, str):
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        if name in _REGISTERED:
            return _one_by_one(name, _REGISTERED[name])
        if ":" in name:
            return _one_by_one(name, _import_rule(name))
    raise DownsampleError(
        f"rule {brief(name)} is unknown{nearest(name, rule_names())}; "
        f"expected one of {', '.join(rule_names())}, or module:function"
    )


def _import_rule(name: str) -> UserRule:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise DownsampleError(f"rule {name!r}: expected module:function, such as my_rules:my_rule")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module_name}.".startswith(f"{error.name}.")
        ):
            raise DownsampleError(
                f"rule {name!r}: there is no module {error.name}; is its folder on PYTHONPATH?"
            ) from error
        raise DownsampleError(
            f"rule {name!r}: importing {module_name} failed with {_brief_error(error)}"
        ) from error
    if not hasattr(module, attribute):
        raise DownsampleError(
            f"rule {name!r}: module {module_name} has no {attribute}{nearest(attribute, dir(module))}"
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise DownsampleError(
            f"rule {name!r}: expected a function (rewards, keep, rng) -> indices, found {brief(function)}"
        )
    return function


def _one_by_one(name: str, function: UserRule) -> BatchedRule:
    """Makes a rule over a bucket of a user's rule over one group, and checks what that returns."""

    def rule(bucket: Bucket, keep: int) -> BoolArray:
        kept = np.zeros(bucket.rewards.shape, dtype=np.bool_)
        for group, rewards in enumerate(bucket.rewards):
            where = f"for group {bucket.ids[group]} ({len(rewards)} rollouts, keep={keep})"
            try:
                # A copy: what a user's code does to its argument stays there.
                result = function(rewards.copy(), keep, np.random.default_rng(int(bucket.keys[group])))
            except Exception as error:
                raise DownsampleError(f"rule {name!r} failed {where} with {_brief_error(error)}") from error
            problem, indices = _check_indices(result, len(rewards), keep)
            if problem:
                raise DownsampleError(
                    f"rule {name!r} returned {brief(result)} {where}: {problem}; "
                    f"expected 1 to {keep} different integers in 0..{len(rewards) - 1}"
                )
            kept[group, indices] = True
        return kept

    return rule


def _check_indices(result: object, n: int, keep: int) -> tuple[str, NDArray[Any]]:
    """Returns (what is wrong with a user's indices or "", the indices)."""
    try:
        indices = np.asarray(result)
    except Exception:
        return "not an array", np.empty(0, dtype=np.int64)
    problem = ""
    if indices.ndim != 1:
        problem = f"an array of {indices.ndim} dimensions, not 1"
    elif indices.size == 0:
        problem = "empty"
    elif indices.dtype.kind == "b":
        problem = "a mask (write numpy.flatnonzero(mask))"
    elif indices.dtype.kind not in "iu":
        problem = f"not integers but {indices.dtype}"
    elif indices.min() < 0 or indices.max() >= n:
        problem = "out of range"
    elif len(np.unique(indices)) != len(indices):
        problem = "duplicates"
    elif len(indices) > keep:
        problem = f"{len(indices)} are too many"
    return problem, indices


def brief(value: object, quote: bool = True) -> str:
    """A value on one line of at most 80 characters, for an error message."""
    text = " ".join((repr(value) if quote else str(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _brief_error(error: Exception) -> str:
    return f"{type(error).__name__}: {brief(error, quote=False)}"


def nearest(name: object, names: list[str]) -> str:
    """Returns " (did you mean X?)" or "" if no name is near."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
