"""`pods/Arithmetic-v0`: sums such as `3+4=`, made on the spot, in levels of difficulty."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

from pods_envs.base import Problem, ReasoningEnv, Verdict
from pods_envs.sources import once_per_process

CHARACTERS = "0123456789+-*()="  # all that questions and answers are made of


def _level0(rng: random.Random) -> str:
    return f"{rng.randint(0, 9)}+{rng.randint(0, 9)}"


def _level1(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}{rng.choice('+-')}{rng.randint(10, 99)}"


def _level2(rng: random.Random) -> str:
    return (
        f"{rng.randint(10, 99)}{rng.choice('+-')}{rng.randint(10, 99)}{rng.choice('+-')}{rng.randint(10, 99)}"
    )


def _level3(rng: random.Random) -> str:
    return f"{rng.randint(2, 9)}*{rng.randint(2, 99)}"


def _level4(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}{rng.choice('+-')}{rng.randint(2, 9)}*{rng.randint(10, 99)}"


def _level5(rng: random.Random) -> str:
    return f"({rng.randint(10, 99)}{rng.choice('+-')}{rng.randint(10, 99)})*{rng.randint(10, 99)}"


LEVELS: tuple[Callable[[random.Random], str], ...] = (_level0, _level1, _level2, _level3, _level4, _level5)


def make_problems(level: int, *, size: int, split: str = "train", seed: int = 0) -> list[Problem]:
    """`size` sums of a level; the same arguments give the same, and a longer list starts with the shorter.

    The splits come from different seeds. Level 0 has only 100 different sums, so there both splits hold the
    same ones.
    """
    if not (isinstance(level, int) and 0 <= level < len(LEVELS)):
        raise ValueError(f"level={level!r} is not in 0..{len(LEVELS) - 1}")
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is not 'train' or 'test'")
    rng = random.Random(f"pods/Arithmetic/{level}/{split}/{seed}")
    expressions = (LEVELS[level](rng) for _ in range(size))
    # Our own digits and operators, nothing of a user's: eval is safe here.
    return [Problem(f"{text}=", str(eval(text)), {"level": level}) for text in expressions]


@once_per_process
def _shared_problems(level: int, size: int, split: str, seed: int) -> tuple[Problem, ...]:
    return tuple(make_problems(level, size=size, split=split, seed=seed))


def verify_integer(response: str, problem: Problem) -> Verdict:
    """The whole first line must be the integer.

    What follows a newline or an end token (`</s>`, `<eos>`) is ignored.
    """
    start = time.perf_counter()
    field = re.split(r"\n|</?\|?\w+\|?>", response, maxsplit=1)[0].strip()
    format_ok = re.fullmatch(r"[+-]?[0-9]{1,100}", field) is not None
    correct = format_ok and int(field) == int(problem.answer)
    method = "exact" if format_ok else ("unparsable" if field else "no_answer")
    seconds = time.perf_counter() - start
    return Verdict(float(correct), correct, field or None, method, seconds, format_ok)


class ArithmeticEnv(ReasoningEnv):
    """Sums whose answer is an integer.

    Args:
        level: 0: one-digit addition; 1: two-digit addition and subtraction; 2: three numbers;
            3: multiplication; 4: multiplication before addition; 5: parentheses.
        split: `train` or `test`.
        size: Number of problems.
        seed: Makes another set of problems.
        answer_format: `plain`: the response is the bare integer.
        kwargs: See ReasoningEnv.
    """

    def __init__(
        self,
        *,
        level: int = 0,
        split: str = "train",
        size: int = 1024,
        seed: int = 0,
        answer_format: str = "plain",
        **kwargs: Any,
    ):
        if answer_format != "plain":
            raise ValueError(f"answer_format={answer_format!r} is not 'plain'")
        super().__init__(_shared_problems(level, size, split, seed), verify_integer, **kwargs)

    async def verify_async(self, response: str, problem: Problem) -> Verdict:
        """`verify`, which takes microseconds: no thread is worth it."""
        return self.verify(response, problem)
