"""Batches of groups: what a group keeps does not depend on the batch around it; ids, shapes, bad rewards."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pods_plugin.downsampling import DownsampleError, register_rule, select, select_groups

RULES = ["max_variance", "max_reward", "random", "percentile"]
KINDS = ["real", "0/1", "few"]


@pytest.fixture(autouse=True, scope="module")
def a_users_rule():
    from pods_plugin.downsampling import rules

    @register_rule("coin")
    def coin(rewards, keep, rng):
        return rng.choice(len(rewards), size=keep, replace=False)

    yield
    del rules._REGISTERED["coin"]


def draw(kind: str, rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "real":
        return rng.normal(size=rows)
    return rng.integers(0, 2, size=rows) * 1.0 if kind == "0/1" else rng.integers(0, 4, size=rows) * 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [*RULES, "coin"])
def test_a_group_alone_in_a_batch_and_among_others_keeps_the_same(rule, kind):
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 20, size=40)
    names = np.array([f"uid-{i:03d}" for i in range(40)])
    ids = np.repeat(names, sizes)
    rewards = draw(kind, len(ids))
    ragged = select_groups(rewards, ids, keep=6, rule=rule, seed=(3, 11))
    order = rng.permutation(len(ids))  # interleaved; then sorted so that each group keeps its own order
    position = np.empty_like(order)
    for name in names:
        spots = np.sort(order[ids == name])
        position[ids == name] = spots
    interleaved = np.empty(len(ids), dtype=bool)
    mixed_rewards, mixed_ids = np.empty_like(rewards), np.empty_like(ids)
    mixed_rewards[position], mixed_ids[position] = rewards, ids
    interleaved[:] = select_groups(mixed_rewards, mixed_ids, keep=6, rule=rule, seed=(3, 11))
    for name, size in zip(names, sizes, strict=True):
        rows = ids == name
        alone = select_groups(rewards[rows], ids[rows], keep=6, rule=rule, seed=(3, 11))
        assert alone.sum() == min(6, size)
        assert (ragged[rows] == alone).all()
        assert (interleaved[mixed_ids == name] == alone).all()


def test_other_groups_do_not_change_ties_though_they_change_the_code_path():
    # Short rewards (0/1) take one sort, others two: the choice must be the same.
    ids = np.repeat([1, 2], 16)
    binary = draw("0/1", 16)
    beside_binary = select_groups(np.append(binary, draw("0/1", 16, 1)), ids, keep=6)[:16]
    for other in (draw("few", 16, 1), draw("real", 16, 1)):
        assert (select_groups(np.append(binary, other), ids, keep=6)[:16] == beside_binary).all()


def test_blocks_do_not_change_the_selection(monkeypatch):
    from pods_plugin.downsampling import selection

    ids = np.repeat(np.arange(500), 16)
    rewards = draw("0/1", len(ids))
    whole = select_groups(rewards, ids, keep=5)
    monkeypatch.setattr(selection, "_BLOCK_ROWS", 100)
    assert (select_groups(rewards, ids, keep=5) == whole).all()


@pytest.mark.parametrize("rule", [*RULES, "coin"])
def test_select_is_select_groups_of_one_group(rule):
    rewards = draw("few", 24)
    kept = select(rewards, keep=7, rule=rule, seed=9)
    mask = select_groups(rewards, np.zeros(24, dtype=int), keep=7, rule=rule, seed=9)
    assert kept.tolist() == np.flatnonzero(mask).tolist()


def test_seed_and_group_decide_ties():
    rewards, ids = draw("0/1", 64), np.zeros(64, dtype=int)
    base = select_groups(rewards, ids, keep=16, seed=(0, 1))
    assert (select_groups(rewards, ids, keep=16, seed=(0, 1)) == base).all()
    for seed in ((1, 0), (0, 2), (0, 1, 0), 1, -1, 2**80):
        assert (select_groups(rewards, ids, keep=16, seed=seed) != base).any()
    assert (select_groups(rewards, ids + 1, keep=16, seed=(0, 1)) != base).any()
    assert (
        select_groups(rewards, ids, keep=16, seed=(5,)) == select_groups(rewards, ids, keep=16, seed=5)
    ).all()


def test_ids_of_any_width_or_dtype():
    rewards = draw("0/1", 96)
    for ids in (np.arange(6) - 2, np.arange(6)):
        base = select_groups(rewards, np.repeat(ids.astype(np.int64), 16), keep=5)
        dtypes: list = [np.int32, np.int8, ">i8", object]
        if ids.min() >= 0:
            dtypes += [np.uint64, np.uint16]
        for dtype in dtypes:
            assert (select_groups(rewards, np.repeat(ids.astype(dtype), 16), keep=5) == base).all()
    names = ["a", "", "é", "长长的", "uid", "a-much-longer-name"]
    base = select_groups(rewards, np.repeat(np.array(names, dtype=object), 16), keep=5)
    assert (select_groups(rewards, np.repeat(names, 16), keep=5) == base).all()
    assert (select_groups(rewards, [name for name in names for _ in range(16)], keep=5) == base).all()
    assert (select_groups(rewards, np.repeat(np.array(names).astype(">U50"), 16), keep=5) == base).all()
    # A shorter array has narrower strings: the choice of a group must not change.
    assert (select_groups(rewards[:16], ["a"] * 16, keep=5) == base[:16]).all()


def test_similar_names_get_unrelated_ties():
    rewards = np.tile([0.0, 1.0], 32)
    picks = {
        select_groups(rewards, [name] * 64, keep=16).tobytes() for name in ("ab", "ba", "a", "aa", "b", "")
    }
    assert len(picks) == 6


def test_strings_with_equal_hashes_are_still_different_groups(monkeypatch):
    from pods_plugin.downsampling import selection

    monkeypatch.setattr(selection, "_as_words", lambda ids: np.zeros(len(ids), dtype=np.uint64))
    for ids in (["a", "a", "b", "b"], ["a", "b", "a", "b"]):
        kept = select_groups([0.0, 1.0, 2.0, 3.0], ids, keep=1)
        assert [kept[np.array(ids) == name].sum() for name in "ab"] == [1, 1]


def test_the_choice_is_the_same_in_every_process():
    code = (
        "import numpy as np; from pods_plugin.downsampling import select_groups;"
        "print(np.flatnonzero(select_groups(np.tile([0., 1.], 8), ['x'] * 16, keep=4, seed=(1, 2))).tolist())"
    )
    out = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout]
    here = np.flatnonzero(select_groups(np.tile([0.0, 1.0], 8), ["x"] * 16, keep=4, seed=(1, 2)))
    assert out[0].strip() == str(here.tolist())


def test_needs_neither_torch_nor_verl_nor_ray():
    code = (
        "import sys, pods_plugin.downsampling;"
        "print([m for m in ('torch', 'verl', 'ray', 'omegaconf', 'hydra') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_short_groups_are_kept_whole_and_no_rows_are_no_error():
    assert select_groups([1.0, 2.0, 3.0], ["a", "b", "a"], keep=4).all()
    empty = select_groups([], [], keep=4)
    assert empty.shape == (0,) and empty.dtype == np.bool_
    assert select([0.5, 0.25], keep=2).tolist() == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_drop_zero_variance_drops_groups_without_signal(rule):
    ids = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 3])
    rewards = np.array([1, 0, 1e8, 1, 1, 1e8 + 1e-7, 1, 0, 1e8, 5])
    kept = select_groups(rewards, ids, keep=2, rule=rule, drop_zero_variance=True)
    assert [int(kept[ids == i].sum()) for i in range(4)] == [0, 2, 2, 0]
    kept = select_groups(rewards, ids, keep=2, rule=rule)
    assert [int(kept[ids == i].sum()) for i in range(4)] == [2, 2, 2, 1]


def test_inputs_are_left_alone_and_may_be_read_only_strided_or_float32():
    rewards = np.arange(64, dtype=np.float32)[::2] % 5
    rewards.flags.writeable = False
    ids = np.repeat(np.arange(4), 8)
    kept = select_groups(rewards, ids, keep=3)
    assert (kept == select_groups(rewards.astype(float), ids, keep=3)).all()
    assert (rewards == np.arange(64)[::2] % 5).all()


def error_of(call, *args, **kwargs) -> str:
    with pytest.raises(DownsampleError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_names_the_group_and_the_value(value, rule):
    message = error_of(select_groups, [0.0, 1.0, value, 1.0], ["u1", "u1", "uid-7f", "u1"], keep=2, rule=rule)
    assert "group uid-7f" in message and str(value) in message and "finite" in message
    assert "nan" in error_of(select, [0.0, 1.0, float("nan")], keep=1, rule=rule)


def test_bad_arguments():
    assert "keep=5 of 4 rewards; expected keep <= 4" in error_of(select, [1, 2, 3, 4], keep=5)
    for keep in (0, -1, 1.5, True, "4", None):
        message = error_of(select_groups, [1.0, 2.0], [0, 0], keep=keep)
        assert f"keep={keep!r}" in message and "keep=16" in message
    assert "(2, 2)" in error_of(select_groups, [[1.0, 2.0]] * 2, [0, 0], keep=1)
    assert "(3,)" in error_of(select_groups, [1.0, 2.0], [0, 0, 0], keep=1)
    assert "array of numbers" in error_of(select_groups, ["a", "b"], [0, 0], keep=1)
    assert "array of numbers" in error_of(select_groups, ["1", "2"], [0, 0], keep=1)
    assert "group 0 is nan" in error_of(select_groups, [None, 1.0], [0, 0], keep=1)
    assert "array of numbers" in error_of(select_groups, [[1.0], [2.0, 3.0]], [0, 0], keep=1)
    for ids in ([0.5, 0.5], [True, False], [None, None], ["a", 1], [b"a", b"b"]):
        ids = np.array(ids, dtype=object) if ids in (["a", 1], [None, None]) else ids
        assert "all ints or all strings" in error_of(select_groups, [1.0, 2.0], ids, keep=1)
    for seed in (0.5, "1", None, True, (0, 1.5)):
        assert "seed=" in error_of(select_groups, [1.0, 2.0], [0, 0], keep=1, seed=seed)


def test_unknown_rule_says_the_nearest_and_all_names():
    message = error_of(select, [1.0, 2.0], keep=1, rule="max_varience")
    assert "'max_varience'" in message and "did you mean max_variance?" in message
    assert all(rule in message for rule in RULES) and "module:function" in message
    assert "did you mean" not in error_of(select, [1.0, 2.0], keep=1, rule="zzz")
    assert "unknown" in error_of(select, [1.0, 2.0], keep=1, rule=None)
