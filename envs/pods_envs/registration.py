"""The gymnasium ids of this package. An environment of your own is one more `gymnasium.register` call."""

from __future__ import annotations

import gymnasium

ENTRY_POINTS = {
    "pods/Arithmetic-v0": "pods_envs.arithmetic:ArithmeticEnv",
}


def register_envs() -> None:
    """Registers the ids; strings, so that nothing but gymnasium is imported until `gymnasium.make`."""
    for env_id, entry_point in ENTRY_POINTS.items():
        gymnasium.register(env_id, entry_point=entry_point)
