"""Text environments that behave, and some that do not. `tests.text_envs:NAME` names them in any process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import gymnasium
from pods_envs import AnyText

events: Counter[str] = Counter()  # what happened in this process: made, closed
threads: set[str] = set()  # the threads it happened on


class Talk(gymnasium.Env[str, str]):
    """Answers `turns` responses, the seed of the episode and its own turn in each observation.

    Args:
        turns: Responses until it terminates; truncates instead with `truncate`.
        rewards: Of the turns; 0 where there are none.
        observation: What it answers.
        failure: (method, kind): `raise`, `exit`, `hang` (1.5 s), or the value to return from `reset` or `step`.
        fail_from: The step at which `failure` begins.
    """

    def __init__(
        self,
        *,
        turns: int = 2,
        rewards: tuple[float, ...] = (),
        observation: str = "on",
        truncate: bool = False,
        failure: tuple[str, Any] | None = None,
        fail_from: int = 1,
    ):
        self.observation_space, self.action_space = AnyText(), AnyText()
        self.turns, self.rewards, self.observation, self.truncate = turns, rewards, observation, truncate
        self.failure, self.fail_from = failure, fail_from
        self.count = 0
        self._fail("make")
        events["made"] += 1
        threads.add(threading.current_thread().name)

    def _fail(self, method: str) -> Any:
        if (
            self.failure is None
            or self.failure[0] != method
            or self.count < self.fail_from * (method == "step")
        ):
            return None
        kind = self.failure[1]
        if kind == "raise":
            raise ValueError(f"broken\n{method}")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "hang":
            time.sleep(1.5)
            return None
        return kind

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._fail("reset") or (f"start {seed}", {})

    def step(self, action: str) -> Any:
        self.count += 1
        threads.add(threading.current_thread().name)
        ended = self.count >= self.turns
        reward = self.rewards[self.count - 1] if self.count <= len(self.rewards) else 0.0
        result = (self.observation, reward, ended and not self.truncate, ended and self.truncate, {})
        return self._fail("step") or result

    def close(self) -> None:
        self._fail("close")
        events["closed"] += 1


class Noise(gymnasium.Env[str, str]):
    """What an untrained model says decides all: the reward, the end (three turns at most), and some failures."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = AnyText(), AnyText()
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return f"{seed}:", {}

    def step(self, action: str) -> Any:
        self.count += 1
        reward, ended, failure = self.judge(action)
        if failure == "raise":
            raise RuntimeError("no such move")
        if failure == "hang":
            time.sleep(300)
        return "?", reward, ended or self.count == 3, False, {"correct": reward == 1.0}

    @staticmethod
    def judge(action: str) -> tuple[float, bool, str | None]:
        """Reward, whether the episode ends, and how it fails."""
        code = ord(action[0]) if action else 0
        return (code % 5) / 4, code % 2 == 0, {1: "raise", 2: "hang"}.get(code % 16)


gymnasium.register("tests/Noise-v0", entry_point="tests.text_envs:Noise")
gymnasium.register("tests/Talk-v0", entry_point="tests.text_envs:Talk")
