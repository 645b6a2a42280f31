"""Problems made on the spot in the manner of GSM8K and MATH: reproducible, and right by another way of reckoning."""

import re
from fractions import Fraction

import pytest
from pods_envs.gsm8k import GSM8KEnv
from pods_envs.math import MATHEnv


@pytest.mark.parametrize("cls", [GSM8KEnv, MATHEnv])
def test_problems_repeat_and_splits_and_seeds_differ(cls):
    def make(size=100, split="train", seed=0):
        return cls.make_problems(size=size, split=split, seed=seed)

    assert make() == make() == make(size=120)[:100]
    kinds = [
        {problem.question for problem in make(**other)} for other in ({}, {"split": "test"}, {"seed": 1})
    ]
    assert all(len(kind) > 80 for kind in kinds)
    # There are few small powers and fractions: some come twice, most do not.
    assert len(kinds[0] & kinds[1]) < 30 and len(kinds[0] & kinds[2]) < 30
    with pytest.raises(ValueError, match="split='dev' is not 'train' or 'test'"):
        make(split="dev")


def test_gsm8k_solutions_hold_at_each_step():
    for problem in GSM8KEnv.make_problems(size=500, split="train", seed=0):
        solution = problem.info["solution"]
        steps = re.findall(r"([\d+*/-]+)=\$?(\d+)", solution)
        assert steps and all(eval(step) == int(value) for step, value in steps), solution
        assert solution.endswith(f"\n#### {problem.answer}") and int(problem.answer) > 0
        values = [int(value) for _, value in steps]
        many = re.search(r"(\d+) cost \$", solution)
        results = {*values, sum(values), values[-1] * int(many[1] if many else 1)}
        assert int(problem.answer) in results, solution


def number(latex):
    latex = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", latex)
    return Fraction(latex)


def check_linear(match, answer):
    a, b, c = map(int, match.groups())
    return a * number(answer) + b == c


def check_fractions(match, answer):
    return number(match[1]) + number(match[2]) == number(answer)


def check_roots(match, answer):
    b, c = map(int, match.groups())
    roots = [int(root) for root in answer.split(",")]
    return len(set(roots)) == 2 and all(x * x + b * x + c == 0 for x in roots)


def check_power(match, answer):
    factor, base, exponent = map(int, match.groups())
    return factor * base**exponent == int(answer)


def check_inequality(match, answer):
    low, shift, high = int(match[1]), int(match[2]), int(match[3])
    return answer == f"({low - shift},{high - shift}]"


def check_midpoint(match, answer):
    a, b, c, d = map(int, match.groups())
    x, y = answer.removeprefix("\\left(").removesuffix("\\right)").split(",")
    return (number(x), number(y)) == (Fraction(a + c, 2), Fraction(b + d, 2))


FRACTION = r"(-?(?:\\frac\{\d+\}\{\d+\}|\d+))"
CHECKS = {
    r"Solve \$(\d+)x([+-]\d+)=(-?\d+)\$": check_linear,
    rf"Compute \${FRACTION}\+{FRACTION}\$ and": check_fractions,
    r"Find all solutions of \$x\^2([+-]\d+)x([+-]\d+)=0\$": check_roots,
    r"Compute \$(\d+)\\cdot(\d+)\^\{(\d+)\}\$": check_power,
    r"For which \$x\$ is \$(-?\d+)<x\+(\d+)\\le (-?\d+)\$": check_inequality,
    r"midpoint of \$\((-?\d+),(-?\d+)\)\$ and \$\((-?\d+),(-?\d+)\)\$": check_midpoint,
}


def test_math_answers_are_right():
    seen = set()
    for problem in MATHEnv.make_problems(size=600, split="test", seed=0):
        ((pattern, match),) = [(p, m) for p in CHECKS if (m := re.search(p, problem.question))]
        assert CHECKS[pattern](match, problem.answer), problem
        seen.add(pattern)
    assert seen == set(CHECKS)
