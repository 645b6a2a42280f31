"""Arithmetic: its problems and its strict verifier."""

import gymnasium
import pods_envs
import pytest
from pods_envs.arithmetic import CHARACTERS, LEVELS, make_problems


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_problems_are_reproducible_and_right(level):
    problems = make_problems(level, size=50)
    assert problems == make_problems(level, size=60)[:50]
    assert problems != make_problems(level, size=50, split="test") != make_problems(level, size=50, seed=1)
    for problem in problems:
        assert set(problem.question + problem.answer) <= set(CHARACTERS)
        assert eval(problem.question.rstrip("=")) == int(problem.answer)


@pytest.mark.parametrize(
    ("response", "correct", "format_ok"),
    [
        ("7", True, True),
        (" 7\nand more 8", True, True),
        ("7</s>9", True, True),
        ("7<|im_end|>", True, True),
        ("77", False, True),
        ("7 apples", False, False),
        ("3+4=7", False, False),
        ("", False, False),
        ("\n7", False, False),
        ("٧", False, False),
        ("7" * 10_000, False, False),
    ],
)
def test_the_whole_field_is_compared(response, correct, format_ok):
    env = gymnasium.make("pods/Arithmetic-v0", format_weight=0.1).unwrapped
    verdict = env.verify(response, pods_envs.Problem("3+4=", "7"))
    assert (verdict.correct, verdict.format_ok) == (correct, format_ok)
    assert verdict.reward == pytest.approx(0.9 * correct + 0.1 * format_ok)


def test_unknown_level_says_what_to_write():
    with pytest.raises(ValueError, match=r"0\.\.5"):
        gymnasium.make("pods/Arithmetic-v0", level=9)
