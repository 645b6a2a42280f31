"""`pods/GSM8K-v0`: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), and made ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pods_envs.answer_env import AnswerEnv, make_from
from pods_envs.base import Problem


class GSM8KEnv(AnswerEnv):
    """Word problems whose answer is a number. See AnswerEnv for the keywords."""

    hub = "openai/gsm8k"
    dataset = "gsm8k"
    instruction = "hash"

    @staticmethod
    def to_problem(row: Mapping[str, Any]) -> Problem:
        """Columns `question` and `answer`, the latter a solution that ends in `#### number`."""
        answer = row["answer"].rsplit("####", 1)[-1].strip()
        return Problem(row["question"], answer, {"solution": row["answer"]})

    @staticmethod
    def make_problems(*, size: int, split: str, seed: int) -> list[Problem]:
        """Word problems of five kinds."""
        return make_from(
            (_shopping, _sharing, _saving, _travelling, _discount), "GSM8K", size=size, split=split, seed=seed
        )


def _problem(question: str, steps: str, answer: int) -> Problem:
    return Problem(question, str(answer), {"solution": f"{steps}\n#### {answer}"})


def _name(rng: random.Random) -> str:
    return rng.choice(("Ana", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ivy", "Jonas"))


def _shopping(rng: random.Random) -> Problem:
    name, pens, price, books, cost = (
        _name(rng),
        rng.randint(2, 12),
        rng.randint(1, 5),
        rng.randint(2, 6),
        rng.randint(6, 20),
    )
    question = (
        f"{name} buys {pens} pens at ${price} each and {books} books at ${cost} each. "
        f"How many dollars does {name} spend?"
    )
    total = pens * price + books * cost
    steps = (
        f"Pens: {pens}*{price}=${pens * price}.\nBooks: {books}*{cost}=${books * cost}.\nTogether ${total}."
    )
    return _problem(question, steps, total)


def _sharing(rng: random.Random) -> Problem:
    name, friends, each, left = _name(rng), rng.randint(2, 9), rng.randint(2, 12), rng.randint(0, 8)
    total = friends * each + left
    question = (
        f"{name} has {total} marbles, keeps {left} of them and shares the rest among {friends} friends. "
        "How many marbles does each friend get?"
    )
    return _problem(
        question,
        f"There are {total}-{left}={friends * each} to share, {friends * each}/{friends}={each} each.",
        each,
    )


def _saving(rng: random.Random) -> Problem:
    name, start, weekly, weeks, spent = (
        _name(rng),
        rng.randint(10, 80),
        rng.randint(3, 25),
        rng.randint(3, 12),
        rng.randint(1, 9),
    )
    total = start + weekly * weeks - spent
    question = (
        f"{name} has ${start} and saves ${weekly} a week for {weeks} weeks, then spends ${spent} on a snack. "
        f"How many dollars does {name} have then?"
    )
    return _problem(
        question,
        f"{weekly}*{weeks}=${weekly * weeks} saved.\n{start}+{weekly * weeks}-{spent}=${total}.",
        total,
    )


def _travelling(rng: random.Random) -> Problem:
    speed, hours, more, faster = (
        rng.randint(4, 15) * 5,
        rng.randint(2, 6),
        rng.randint(1, 4),
        rng.randint(5, 20),
    )
    total = speed * hours + (speed + faster) * more
    question = (
        f"A bus drives {hours} hours at {speed} km per hour, then {more} hours {faster} km per hour faster. "
        "How many kilometers does it drive in total?"
    )
    steps = (
        f"First {speed}*{hours}={speed * hours} km.\n"
        f"Then {speed + faster}*{more}={(speed + faster) * more} km.\n"
        f"Together {total} km."
    )
    return _problem(question, steps, total)


def _discount(rng: random.Random) -> Problem:
    price, percent, count = rng.randint(2, 30) * 20, rng.choice((5, 10, 15, 20, 25, 40)), rng.randint(1, 5)
    reduced = price * (100 - percent) // 100
    question = (
        f"A coat costs ${price} and is sold {percent}% cheaper today. "
        f"How many dollars do {count} such coats cost today?"
    )
    return _problem(
        question,
        f"One costs {price}*{100 - percent}/100=${reduced}, {count} cost ${reduced * count}.",
        reduced * count,
    )
