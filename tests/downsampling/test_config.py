"""The settings under `algorithm`: what is accepted, what each becomes, and one line for each mistake."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pods_plugin.downsampling import DownsampleConfig, DownsampleError

read = DownsampleConfig.from_mapping


def test_defaults():
    assert read("max_variance", {"keep": 16}, 64) == DownsampleConfig(
        rule="max_variance",
        generated=64,
        keep=16,
        metric="reward",
        advantage_stats="kept",
        drop_zero_variance=False,
        seed=0,
    )


def test_every_setting():
    kwargs = {
        "keep": 0.25,
        "metric": "acc",
        "advantage_stats": "group",
        "drop_zero_variance": True,
        "seed": 5,
    }
    config = read("random", kwargs, 64)
    assert config is not None and dataclasses.asdict(config) == {
        "rule": "random",
        "generated": 64,
        **kwargs,
        "keep": 16,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.keep = 3  # type: ignore[misc]


def test_null_is_off_whatever_else_is_written():
    assert read(None, None, 1) is None
    assert read(None, {"keep": "nonsense", "x": 1}, 64) is None


@pytest.mark.parametrize(
    ("keep", "n", "kept"),
    [
        (1, 8, 1),
        (8, 8, 8),
        (1.0, 8, 8),
        (0.5, 8, 4),
        (0.3, 8, 2),
        (0.07, 8, 1),
        (np.int64(3), 8, 3),
        (0.999, 8, 8),
    ],
)
def test_keep_is_a_count_or_a_fraction(keep, n, kept):
    config = read("max_variance", {"keep": keep}, n)
    assert config is not None and config.keep == kept and type(config.keep) is int


def test_identity():
    assert read("max_variance", {"keep": 8}, 8).identity
    assert read("max_variance", {"keep": 1.0}, 8).identity
    assert not read("max_variance", {"keep": 7}, 8).identity
    assert not read("max_variance", {"keep": 8, "drop_zero_variance": True}, 8).identity


KWARGS = "algorithm.downsample_kwargs"
KEEP = f"{KWARGS}.keep"
OK = {"keep": 4}
MISTAKES = {
    # downsample, downsample_kwargs, rollout.n, what the line says
    "typo in rule": (
        "max_varaince",
        OK,
        16,
        ["algorithm.downsample=max_varaince", "did you mean max_variance?"],
    ),
    "no such rule": (
        "zzz",
        OK,
        16,
        ["algorithm.downsample=zzz", "max_variance, max_reward, random, percentile"],
    ),
    "rule true": (True, OK, 16, ["algorithm.downsample=True", "write algorithm.downsample=max_variance"]),
    "rule false": (False, OK, 16, ["algorithm.downsample=False", "algorithm.downsample=null"]),
    "rule empty": ("", OK, 16, ["algorithm.downsample=''", "write algorithm.downsample=max_variance"]),
    "rule blank": (" ", OK, 16, ["algorithm.downsample=' '", "write algorithm.downsample=max_variance"]),
    "rule number": (3, OK, 16, ["algorithm.downsample=3", "write algorithm.downsample=max_variance"]),
    "rule none": ("None", OK, 16, ["'None' is no rule", "write algorithm.downsample=null"]),
    "rule of no module": ("no_such_m:f", OK, 16, ["algorithm.downsample=no_such_m:f", "no module no_such_m"]),
    "keep missing": ("random", {}, 16, [f"{KEEP} is missing", f"write {KEEP}=4"]),
    "no kwargs": ("random", None, 16, [f"{KEEP} is missing", f"write {KEEP}=4"]),
    "keep null": ("random", {"keep": None}, 16, [f"{KEEP} is missing", f"write {KEEP}=4"]),
    "keep 0": ("random", {"keep": 0}, 16, [f"{KEEP}=0;", "expected an int in 1..16", f"write {KEEP}=4"]),
    "keep 0.0": ("random", {"keep": 0.0}, 16, [f"{KEEP}=0.0;", "(0, 1]", f"write {KEEP}=4"]),
    "keep negative": ("random", {"keep": -3}, 16, [f"{KEEP}=-3;", "1..16", f"write {KEEP}=4"]),
    "keep -0.5": ("random", {"keep": -0.5}, 16, [f"{KEEP}=-0.5;", "(0, 1]", f"write {KEEP}=4"]),
    "keep 1.5": ("random", {"keep": 1.5}, 16, [f"{KEEP}=1.5;", "(0, 1]", f"write {KEEP}=4"]),
    "keep 16.0": ("random", {"keep": 16.0}, 64, [f"{KEEP}=16.0;", "expected an int", f"write {KEEP}=16"]),
    "keep nan": ("random", {"keep": float("nan")}, 16, [f"{KEEP}=nan;", f"write {KEEP}=4"]),
    "keep inf": ("random", {"keep": float("inf")}, 16, [f"{KEEP}=inf;", f"write {KEEP}=4"]),
    "keep > n": (
        "random",
        {"keep": 17},
        16,
        [f"{KEEP}=17 is more than actor_rollout_ref.rollout.n=16", "write"],
    ),
    "keep quoted": (
        "random",
        {"keep": "16"},
        64,
        [f"{KEEP}='16' is a string", f"write {KEEP}=16 without quotes"],
    ),
    "keep text": ("random", {"keep": "half"}, 64, [f"{KEEP}='half' is a string", f"write {KEEP}=16"]),
    "keep true": ("random", {"keep": True}, 16, [f"{KEEP}=True;", "expected an int", f"write {KEEP}=4"]),
    "keep list": ("random", {"keep": [4]}, 16, [f"{KEEP}=[4];", "expected an int", f"write {KEEP}=4"]),
    "keep rounds to 0": (
        "random",
        {"keep": 0.01},
        16,
        [f"{KEEP}=0.01 of rollout.n=16 rounds to 0", f"write {KEEP}=4"],
    ),
    "n is 1": (
        "random",
        {"keep": 1},
        1,
        ["actor_rollout_ref.rollout.n=1", "nothing to choose", "rollout.n=64"],
    ),
    "n is text": (
        "random",
        OK,
        "16",
        ["actor_rollout_ref.rollout.n='16'", "write actor_rollout_ref.rollout.n=64"],
    ),
    "n is 0": ("random", OK, 0, ["actor_rollout_ref.rollout.n=0", "write actor_rollout_ref.rollout.n=64"]),
    "typo in key": ("random", {"kep": 4}, 16, [f"{KWARGS}.kep is unknown", "did you mean keep?"]),
    "rule is no key": (
        "random",
        {"keep": 4, "rule": "x"},
        16,
        [f"{KWARGS}.rule is unknown", "advantage_stats"],
    ),
    "no mapping": ("random", 16, 64, [f"{KWARGS}=16", f"write {KWARGS}.keep=16"]),
    "stats": (
        "random",
        {**OK, "advantage_stats": "all"},
        16,
        [f"{KWARGS}.advantage_stats='all'", "kept or group"],
    ),
    "stats null": ("random", {**OK, "advantage_stats": None}, 16, [".advantage_stats=None", "kept or group"]),
    "seed negative": (
        "random",
        {**OK, "seed": -1},
        16,
        [f"{KWARGS}.seed=-1", "int >= 0", f"write {KWARGS}.seed=0"],
    ),
    "seed float": ("random", {**OK, "seed": 0.5}, 16, [f"{KWARGS}.seed=0.5", "int >= 0"]),
    "seed true": ("random", {**OK, "seed": True}, 16, [f"{KWARGS}.seed=True", "int >= 0"]),
    "seed text": ("random", {**OK, "seed": "0"}, 16, [f"{KWARGS}.seed='0'", "int >= 0"]),
    "flag text": (
        "random",
        {**OK, "drop_zero_variance": "true"},
        16,
        [".drop_zero_variance='true'", "true or false"],
    ),
    "flag number": (
        "random",
        {**OK, "drop_zero_variance": 1},
        16,
        [".drop_zero_variance=1", "true or false"],
    ),
    "metric number": (
        "random",
        {**OK, "metric": 3},
        16,
        [f"{KWARGS}.metric=3", f"write {KWARGS}.metric=reward"],
    ),
    "metric empty": (
        "random",
        {**OK, "metric": ""},
        16,
        [f"{KWARGS}.metric=''", f"write {KWARGS}.metric=reward"],
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case):
    downsample, kwargs, n, parts = MISTAKES[case]
    with pytest.raises(DownsampleError) as caught:
        read(downsample, kwargs, n)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message and len(message) < 300
    for part in parts:
        assert part in message


def test_an_int_beside_n_of_two_still_gets_a_usable_hint():
    with pytest.raises(DownsampleError, match=r"write algorithm\.downsample_kwargs\.keep=1$"):
        read("random", {"keep": 0}, 2)
