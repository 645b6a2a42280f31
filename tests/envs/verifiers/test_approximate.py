"""Floating point may tell two values apart, and never says so of equal ones."""

import contextlib
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pods_envs import verify
from pods_envs.verifiers import comparison, pool
from pods_envs.verifiers.approximate import differ
from pods_envs.verifiers.latex import clean
from pods_envs.verifiers.rational import NotRationalError, TooLargeError, evaluate

SHARED = Path(__file__).parents[3].parent / "shared"

DIFFERENT = [
    (r"2\sqrt{3}", r"\sqrt{13}"),
    (r"2\pi", "6"),
    (r"\pi r^2", r"2\pi r"),
    ("x^2+2x+1", "x^2+2x+2"),
    ("2x", "2X"),
    ("2x", "2y"),
    ("x^{400}", "x^{401}"),
    ("3+4i", "3-4i"),
    (r"e^{i\pi}", "1"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"\frac{-1+\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2}"),
    ("13p-30", "8"),
    (r"6 \cdot a", "a"),
    (r"0.\overline{3}x", "0.3x"),
]
NOT_TOLD_APART = [
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sqrt{-4}", "2i"),
    (r"\sqrt{-4}", "2"),
    (r"(x-9)^{3/2}", r"\sqrt{(x-9)^3}"),
    (r"\frac{\sqrt{x}}{\sqrt{x-9}}", r"\sqrt{\frac{x}{x-9}}"),
    ("2e-1", "-1+2e"),
    ("(-1)^n", "(-1)^{-n}"),
    ("i^{4n}", "1"),
    (r"e^{i\pi}", "-1"),
    (r"(-1)^{1/2}", "i"),
    (r"\sqrt{i\cdot i}", "i"),
    (r"\sqrt{-(2+0i)}", r"i\sqrt{2}"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"10^{20}\pi+1-10^{20}\pi", "1"),  # all digits cancel
    (r"\frac{x}{x+10^{-20}-x}", r"10^{20}x"),
    (r"\sqrt{x+10^{-30}-x}", "10^{-15}"),
    (r"\sqrt{2}+10^{-12}", r"\sqrt{2}"),  # different, but too close
    ("x^{90000}", "x^{90001}"),
    ("10^{200}x", "10^{201}x"),
    (r"\sin x", "1"),
    ("f(x)", "1"),
    ("x/2y", "1"),
    (r"\frac{dy}{dx}", "1"),
    ("x!", "1"),
    (r"\binom{n}{k}", "1"),
    ("x_1", "1"),
    ("|x|", "1"),
    ("1/0", "x"),
    ("x+", "1"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different(one, other):
    assert differ(clean(one), clean(other)) and differ(clean(other), clean(one))
    verdict = verify(f"\\boxed{{{one}}}", other)
    assert (verdict.correct, verdict.method) == (False, "numeric")


@pytest.mark.parametrize(("one", "other"), NOT_TOLD_APART)
def test_not_told_apart(one, other):
    assert not differ(clean(one), clean(other)) and not differ(clean(other), clean(one))


def test_a_list_with_one_wrong_member_needs_no_computer_algebra():
    verdict = verify(r"\boxed{\sqrt{2}, \sqrt{3}}", r"\sqrt{2}, \sqrt{5}")
    assert (verdict.correct, verdict.method) == (False, "numeric")
    assert verify(r"\boxed{\sqrt{8}, \sqrt{3}}", r"\sqrt{3}, 2\sqrt{2}").correct


numbers = st.one_of(st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=3).map(str))
sums = st.recursive(
    numbers,
    lambda part: st.one_of(
        st.builds("({}{}{})".format, part, st.sampled_from(["+", "-", "*", "/", r"\cdot "]), part),
        st.builds(r"\frac{{{}}}{{{}}}".format, part, part),
        st.builds("({})^{}".format, part, st.integers(1, 9)),
        st.builds("-{}".format, part),
    ),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(sums)
def test_arithmetic_does_not_differ_from_its_exact_value(text):
    try:
        value = evaluate(text)
    except (NotRationalError, TooLargeError):
        return
    exact = rf"\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    assert not differ(text, f"-{exact}" if value < 0 else exact)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there")
def test_computer_algebra_agrees():
    """Every pair of MATH golds that floating point tells apart is different to computer algebra as well."""
    with (SHARED / "data/math_train.jsonl").open(encoding="utf-8") as lines:
        golds = [gold for line in lines if (gold := json.loads(line)["answer"]) and not gold.isdecimal()]
    random.Random(0).shuffle(golds)
    told_apart, wrong = 0, []

    def ask(kind, gold, response):
        nonlocal told_apart
        if kind == "value" and differ(gold, response):
            told_apart += 1
            request = {"kind": kind, "gold": gold, "response": response}
            if pool.shared_pool().ask(request, pool.Budget(30)):
                wrong.append((gold, response))
        raise comparison.UndecidedError

    for gold, response in itertools.pairwise(golds[:1500]):
        with contextlib.suppress(comparison.UndecidedError, comparison.UnparsableError):
            comparison.equal(clean(gold), clean(response), ask)
    assert wrong == []
    assert told_apart > 300
