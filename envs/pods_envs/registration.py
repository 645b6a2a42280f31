"""The gymnasium ids of this package. An environment of your own is one more `gymnasium.register` call."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from pods_envs.base import ReasoningEnv

ENTRY_POINTS = {
    "pods/Arithmetic-v0": "pods_envs.arithmetic:ArithmeticEnv",
    "pods/GSM8K-v0": "pods_envs.gsm8k:GSM8KEnv",
    "pods/MATH-v0": "pods_envs.math:MATHEnv",
    "pods/MATH500-v0": "pods_envs.math:MATH500Env",
}


def register_envs() -> None:
    """Registers the ids; strings, so that nothing but gymnasium is imported until `gymnasium.make`."""
    for env_id, entry_point in ENTRY_POINTS.items():
        gymnasium.register(env_id, entry_point=entry_point)


def env_class(env_id: str) -> tuple[type[ReasoningEnv], dict[str, Any]]:
    """The class of a registered reasoning environment, and the keywords it was registered with.

    Raises:
        gymnasium.error.Error: Nothing is registered under the id.
        TypeError: What is registered is not a ReasoningEnv.
    """
    spec = gymnasium.spec(env_id)
    cls = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if not (isinstance(cls, type) and issubclass(cls, ReasoningEnv)):
        name = getattr(cls, "__name__", repr(cls))
        raise TypeError(f"{env_id} is {name}, expected an environment derived from pods_envs.ReasoningEnv")
    return cls, dict(spec.kwargs)
