"""Rules of a user: registered or imported, their randomness, and what they may not return."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pods_plugin.downsampling import DownsampleError, register_rule, rule_names, rules, select, select_groups


@pytest.fixture(autouse=True)
def a_clean_registry(monkeypatch):
    monkeypatch.setattr(rules, "_REGISTERED", {})


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules that `module:function` can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def error_of(call, *args, **kwargs) -> str:
    with pytest.raises(DownsampleError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_registered_rule_is_called_for_each_group_that_is_too_large():
    calls = []

    @register_rule("lowest")
    def lowest(rewards, keep, rng):
        calls.append(rewards.copy())
        assert rewards.dtype == np.float64 and isinstance(keep, int) and isinstance(rng, np.random.Generator)
        return np.argsort(rewards)[:keep]

    assert "lowest" in rule_names()
    kept = select_groups([3, 1, 2, 5, 9, 8, 7], ["a", "a", "a", "b", "c", "c", "c"], keep=1, rule="lowest")
    assert kept.tolist() == [False, True, False, True, False, False, True]
    assert [c.tolist() for c in calls] == [[3, 1, 2], [9, 8, 7]]


def test_a_rule_may_keep_fewer_and_in_any_order_and_scribble_on_its_rewards():
    @register_rule("two")
    def two(rewards, keep, rng):
        rewards[:] = 0
        return [3, 1]

    rewards = np.arange(5.0)
    assert select(rewards, keep=4, rule="two").tolist() == [1, 3]
    assert rewards.tolist() == [0, 1, 2, 3, 4]


def test_the_generator_of_a_rule_depends_on_seed_and_group_alone():
    seen: dict = {}

    @register_rule("spy")
    def spy(rewards, keep, rng):
        seen.setdefault(int(rewards[0]), []).append(rng.integers(2**60))
        return [0]

    def run(ids, seed):
        select_groups(np.repeat(ids, 3).astype(float), np.repeat(ids, 3), keep=1, rule="spy", seed=seed)

    run([1, 2], (0, 1))
    run([2, 3, 1], (0, 1))
    run([1, 2, 3], (0, 2))
    assert seen[1][0] == seen[1][1] and seen[2][0] == seen[2][1]
    assert len({seen[1][0], seen[2][0], seen[3][0], seen[1][2], seen[2][2]}) == 5


BAD = {
    "duplicates": ([0, 0], "duplicates"),
    "out of range": ([0, 8], "out of range"),
    "negative": ([-1], "out of range"),
    "too many": ([0, 1, 2, 3], "4 are too many"),
    "floats": ([0.0, 1.0], "not integers"),
    "mask": ([True] * 8, "mask"),
    "empty": ([], "empty"),
    "None": (None, "0 dimensions"),
    "matrix": ([[0, 1]], "2 dimensions"),
    "text": ("all", "0 dimensions"),
    "ragged": ([[0], [1, 2]], "not an array"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_rule_may_not_return(case):
    result, problem = BAD[case]
    register_rule("mine")(lambda rewards, keep, rng: result)
    ids = ["u0"] * 2 + ["uid-3"] * 8
    message = error_of(select_groups, np.arange(10.0), ids, keep=3, rule="mine")
    assert problem in message and "'mine'" in message and "group uid-3" in message
    assert repr(result)[:20] in message and "expected 1 to 3 different integers in 0..7" in message


def test_a_long_wrong_answer_is_shortened():
    register_rule("mine")(lambda rewards, keep, rng: np.arange(10_000))
    message = error_of(select, np.arange(500.0), keep=3, rule="mine")
    assert len(message) < 300


def test_an_exception_in_a_rule_names_the_rule_and_the_group():
    @register_rule("mine")
    def mine(rewards, keep, rng):
        raise KeyError("first\nsecond")

    message = error_of(select_groups, np.arange(4.0), ["u9"] * 4, keep=3, rule="mine")
    assert "'mine'" in message and "u9" in message and "KeyError" in message


def test_names_are_taken_once():
    register_rule("mine")(lambda rewards, keep, rng: [0])
    for name in ("mine", "max_variance"):
        message = error_of(register_rule, name)
        assert repr(name) in message and "taken" in message
    for name in ("", "a:b", 3):
        assert "expected a non-empty name without a colon" in error_of(register_rule, name)
    assert "expected a function" in error_of(register_rule("other"), 3)
    assert "other" not in rule_names()


def test_a_rule_is_imported_from_module_and_function(module):
    module("my_pods_rules", "def first(rewards, keep, rng):\n    return list(range(keep))\nnumber = 3\n")
    assert select(np.arange(9.0), keep=4, rule="my_pods_rules:first").tolist() == [0, 1, 2, 3]
    message = error_of(select, np.arange(9.0), keep=4, rule="my_pods_rules:frist")
    assert "my_pods_rules has no frist" in message and "did you mean first?" in message
    assert "found 3" in error_of(select, np.arange(9.0), keep=4, rule="my_pods_rules:number")


def test_a_module_that_cannot_be_imported(module):
    message = error_of(select, np.arange(9.0), keep=4, rule="no_such_pods_module:first")
    assert "no module no_such_pods_module" in message and "PYTHONPATH" in message
    assert "no module numpy.nothing" in error_of(select, np.arange(9.0), keep=4, rule="numpy.nothing:first")
    module("broken_pods_rules", "import no_such_dependency\n")
    message = error_of(select, np.arange(9.0), keep=4, rule="broken_pods_rules:first")
    assert "importing broken_pods_rules failed" in message and "no_such_dependency" in message
    module("worse_pods_rules", "raise RuntimeError('one\\ntwo')\n")
    assert "RuntimeError: one two" in error_of(select, np.arange(9.0), keep=4, rule="worse_pods_rules:first")
    for rule in (":first", "my_pods_rules:"):
        assert "expected module:function" in error_of(select, np.arange(9.0), keep=4, rule=rule)
