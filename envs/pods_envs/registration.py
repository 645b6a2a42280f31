"""The gymnasium ids of this package. An environment of your own is one more `gymnasium.register` call."""

from __future__ import annotations

import gymnasium

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
