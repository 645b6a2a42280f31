"""Environments with one fault each, for test_checking.py; found as `tests.envs.checked_envs:checked/NAME-v0`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time

import gymnasium
from pods_envs import AnyText, Problem, ReasoningEnv, Verdict


def verify(response: str, problem: Problem) -> Verdict:
    correct = response.strip() == problem.answer
    return Verdict(
        float(correct), correct, response.strip() or None, "exact", format_ok=bool(response.strip())
    )


class Good(ReasoningEnv):
    def __init__(self, *, split="train", verifier=verify, words=("red", "green", "blue"), **kwargs):
        problems = [Problem(f"Say {word}.", word, {"number": n}) for n, word in enumerate(words)]
        super().__init__(problems, verifier, max_turns=2, **kwargs)


class NoSplit(Good):
    def __init__(self):
        super().__init__()


class WrongSpace(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gymnasium.spaces.Text(5)


class NotText(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, 0.0, True, False, {}


class GuessingGame(gymnasium.Env):
    """A good text environment that is no ReasoningEnv."""

    observation_space = action_space = AnyText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.left = int(self.np_random.integers(10)), 4
        return "Guess a digit.", {}

    def step(self, action):
        self.left -= 1
        right = action.strip() == str(self.number)
        return ("right" if right else "wrong"), float(right), right, self.left == 0, {}


class NumericAnswer(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.problems = [Problem("Say 3.", 3)]


class InfoOfObjects(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.problems = [Problem("Say a.", "a", {"when": {1, 2}})]


class UnseededProblems(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs, words=random.sample(["red", "green", "blue", "black", "white", "grey"], 6))


class UnseededReset(Good):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return super().reset(options={"index": random.randrange(len(self.problems)), **(options or {})})


class OneProblemOnly(Good):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return super().reset(options=options or {"index": 0})


class IgnoresIndex(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class HashOrder(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs, words=sorted((f"word{n}" for n in range(50)), key=hash))


class WrongReference(Good):
    def reference_response(self, problem):
        return problem.question if problem.answer == "blue" else problem.answer


def _always(response, problem):
    return Verdict(1.0, True, response, "exact", format_ok=True)


def _index(response, problem):
    return verify(response, problem) if response.split()[0] else None


def _utf8(response, problem):
    response.encode("utf-8")
    return verify(response, problem)


def _slow(response, problem):
    re.match(r"(a|a)*$", response[:30] + "!") if len(response) > 10_000 else None  # exponential
    return verify(response, problem)


def _evaluates(response, problem):
    with contextlib.suppress(BaseException):
        eval(re.sub("<.*?>", "", response)) if "__import__" in response else None
    return verify(response, problem)


def _nan(response, problem):
    return Verdict(
        float("nan") if "\x00" in response else float(response == problem.answer),
        response == problem.answer,
        None,
        "",
        format_ok=True,
    )


def _truth(response, problem):
    return Verdict(1.0, response.strip() == problem.answer and 1, None, "", format_ok=True)


def _by_number(response, problem):
    return verify(response, problem) if problem.info["number"] >= 0 else None


VERIFIERS = {
    "always": _always,
    "index": _index,
    "utf8": _utf8,
    "slow": _slow,
    "evaluates": _evaluates,
    "nan": _nan,
    "truth": _truth,
    "info": _by_number,
}


class Verifies(Good):
    """With one of VERIFIERS."""

    def __init__(self, *, name, **kwargs):
        super().__init__(verifier=VERIFIERS[name], **kwargs)


class Hangs(Good):
    def verify(self, response, problem):
        if "{question}" in response:
            time.sleep(1000)
        return super().verify(response, problem)


class NeverEnds(Good):
    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        self._problem = self.problems[0]
        return observation, reward, False, truncated, info


class OtherVerifier(Good):
    @classmethod
    def for_verification(cls, **kwargs):
        return Good(verifier=_always, **kwargs)


class Unpicklable(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs, verifier=lambda response, problem: verify(response, problem))


class LeavesThread(Good):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        threading.Thread(target=time.sleep, args=(5,), name="watcher").start()


class ClosesOnce(Good):
    def close(self):
        del self.problems


class Dies(Good):
    def step(self, action):
        os.kill(os.getpid(), 9)


CLASSES = [
    Good,
    *(
        NoSplit,
        WrongSpace,
        NotText,
        GuessingGame,
        NumericAnswer,
        InfoOfObjects,
        UnseededProblems,
        UnseededReset,
    ),
    *(OneProblemOnly, IgnoresIndex, HashOrder, WrongReference, Hangs, NeverEnds, OtherVerifier, Unpicklable),
    *(LeavesThread, ClosesOnce, Dies),
]
for cls in CLASSES:
    gymnasium.register(f"checked/{cls.__name__}-v0", entry_point=f"{__name__}:{cls.__name__}")
for name in VERIFIERS:
    gymnasium.register(f"checked/{name}-v0", entry_point=f"{__name__}:Verifies", kwargs={"name": name})
