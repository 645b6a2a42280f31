"""`pods/MATH-v0`, `pods/MATH500-v0`: competition problems, and a maker of simple ones.

MATH: Hendrycks et al. 2021, arXiv 2103.03874. The 500 test problems: Lightman et al. 2023, arXiv 2305.20050.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pods_envs.answer_env import AnswerEnv, make_from
from pods_envs.base import Problem
from pods_envs.verifiers.extraction import last_box


class MATHEnv(AnswerEnv):
    """Competition problems whose answer is LaTeX. See AnswerEnv for the keywords."""

    hub = "EleutherAI/hendrycks_math"
    dataset = "math"
    instruction = "boxed"

    @staticmethod
    def to_problem(row: Mapping[str, Any]) -> Problem:
        r"""Columns `problem` and `answer`; without the latter, the last `\boxed{}` of `solution`."""
        answer = row.get("answer")
        if answer is None:
            box = last_box(row["solution"])
            answer = (box and box.answer) or ""
        info = {key: value for key, value in row.items() if key not in ("problem", "answer")}
        return Problem(row["problem"], answer, info)

    @staticmethod
    def make_problems(*, size: int, split: str, seed: int) -> list[Problem]:
        """Problems of six kinds; the answers are numbers, fractions, lists, intervals and pairs."""
        return make_from(
            (_linear, _fractions, _roots, _power, _inequality, _midpoint),
            "MATH",
            size=size,
            split=split,
            seed=seed,
        )


class MATH500Env(MATHEnv):
    """The 500 test problems of MATH that most papers report. See AnswerEnv for the keywords."""

    hub = "HuggingFaceH4/MATH-500"
    dataset = "math500"
    splits = ("test",)

    def __init__(self, *, split: str = "test", **kwargs: Any):
        super().__init__(split=split, **kwargs)


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _linear(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 9), rng.randint(-20, 20), rng.randint(-20, 20)
    return Problem(f"Solve ${a}x{b:+d}={c}$ for $x$.", _latex(Fraction(c - b, a)))


def _fractions(rng: random.Random) -> Problem:
    one, other = (Fraction(rng.randint(1, 9), rng.randint(2, 12)) for _ in range(2))
    question = f"Compute ${_latex(one)}+{_latex(other)}$ and write it as a common fraction in lowest terms."
    return Problem(question, _latex(one + other))


def _roots(rng: random.Random) -> Problem:
    one = rng.randint(-9, 9)
    other = one + rng.randint(1, 9)
    question = f"Find all solutions of $x^2{-(one + other):+d}x{one * other:+d}=0$, separated by commas."
    return Problem(question, f"{one},{other}")


def _power(rng: random.Random) -> Problem:
    base, exponent, factor = rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 9)
    return Problem(f"Compute ${factor}\\cdot{base}^{{{exponent}}}$.", str(factor * base**exponent))


def _inequality(rng: random.Random) -> Problem:
    low, high = rng.randint(-9, 0), rng.randint(1, 9)
    shift = rng.randint(1, 9)
    question = f"For which $x$ is ${low + shift}<x+{shift}\\le {high + shift}$? Answer in interval notation."
    return Problem(question, f"({low},{high}]")


def _midpoint(rng: random.Random) -> Problem:
    a, b, c, d = (rng.randint(-9, 9) for _ in range(4))
    question = f"What is the midpoint of $({a},{b})$ and $({c},{d})$?"
    return Problem(question, f"\\left({_latex(Fraction(a + c, 2))},{_latex(Fraction(b + d, 2))}\\right)")
