"""The gymnasium ids of this package, those of packages that announce theirs, and what stands behind an id."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec, load_env_creator

from pods_envs.base import ReasoningEnv
from pods_envs.reasoning_gym import TASKS

logger = logging.getLogger(__name__)

ENTRY_POINTS = {
    "pods/Arithmetic-v0": "pods_envs.arithmetic:ArithmeticEnv",
    "pods/GSM8K-v0": "pods_envs.gsm8k:GSM8KEnv",
    "pods/MATH-v0": "pods_envs.math:MATHEnv",
    "pods/MATH500-v0": "pods_envs.math:MATH500Env",
}
GROUP = "pods.envs"


def register_envs() -> None:
    """Registers the ids; strings, so that nothing but gymnasium is imported until `gymnasium.make`."""
    for env_id, entry_point in ENTRY_POINTS.items():
        gymnasium.register(env_id, entry_point=entry_point)
    # gymnasium's pattern has one "/" at most and `pods/reasoning-gym/TASK-v0` two: a namespace may have more.
    registration.ENV_ID_RE = re.compile(
        r"^(?:(?P<namespace>[\w:-]+(?:/[\w:-]+)*)/)?(?P<name>[\w:.-]+?)(?:-v(?P<version>\d+))?$"
    )
    for task in TASKS:
        gymnasium.register(
            f"pods/reasoning-gym/{task}-v0",
            entry_point="pods_envs.reasoning_gym:ReasoningGymEnv",
            kwargs={"task": task},
        )


def load_entry_points() -> None:
    """Imports the modules that installed packages name in the entry point group `pods.envs`.

    Importing one registers its environments. One that fails is left out with a warning.
    """
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        try:
            if entry_point.attr:
                raise ValueError(f"expected a module without {':' + entry_point.attr!r}")
            importlib.import_module(entry_point.module)
        except (Exception, SystemExit) as error:
            package = entry_point.dist.name if entry_point.dist is not None else "?"
            logger.warning(
                "the environments of package %s are not registered: its entry point %s = %r of the group %s "
                "cannot be imported (%s: %s)",
                *(package, entry_point.name, entry_point.value, GROUP),
                *(type(error).__name__, " ".join(str(error).split())),
            )


def env_spec(env_id: str) -> EnvSpec:
    """What is registered under an id, or under the id of `module:id` once the module is imported.

    Raises:
        gymnasium.error.Error: Nothing is.
        ModuleNotFoundError: The module does not exist.
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise type(error)(
            f"{error} (an environment of your own is found as module:{name}, or by an entry point of the group "
            f"{GROUP} in its package)"
        ) from error
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}, to import for {env_id}: install its package, here and for every worker, or put its folder "
            "into PYTHONPATH"
        ) from error


def env_class(env_id: str) -> tuple[type[ReasoningEnv], dict[str, Any]]:
    """The class of a registered reasoning environment, and the keywords it was registered with.

    Args:
        env_id: The id, or `module:id` where importing the module registers it.

    Raises:
        gymnasium.error.Error: Nothing is registered under the id.
        ModuleNotFoundError: The module does not exist.
        TypeError: What is registered is not a ReasoningEnv.
    """
    spec = env_spec(env_id)
    cls = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if not (isinstance(cls, type) and issubclass(cls, ReasoningEnv)):
        what = getattr(cls, "__name__", repr(cls))
        raise TypeError(f"{env_id} is {what}, expected an environment derived from pods_envs.ReasoningEnv")
    return cls, dict(spec.kwargs)
