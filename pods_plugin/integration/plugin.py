"""The `verl.plugins` entry point: loaded by `import verl` in every process, so it imports nothing heavy.

verl logs an error of a plugin at DEBUG level and goes on without it, which would train on all rollouts without a
word. So this module keeps to calls that cannot fail in a healthy installation, and prints what fails all the same.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def install_config_check(module: Any) -> None:
    """Makes verl's `validate_config`, which every entry point calls before it starts Ray, check ours too.

    PATCH of verl: there is no hook between composing a config and starting workers, and a config error that surfaces
    in a Ray actor is a page of traceback after a minute. Guard: tests/integration/test_checks.py.
    """
    validate = module.validate_config
    if getattr(validate, "_checks_downsampling", False):
        return

    @functools.wraps(validate)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        # Here, not at the top: `import verl` should not pay for what only a launcher needs.
        from pods_plugin.downsampling import DownsampleError
        from pods_plugin.integration.checks import check_config

        try:
            check_config(config)
        except DownsampleError as error:
            # One line and exit code 1 instead of Hydra's traceback.
            raise SystemExit(f"verl-pods: {error}") from None
        validate(config, *args, **kwargs)

    validate_config._checks_downsampling = True  # type: ignore[attr-defined]
    module.validate_config = validate_config


try:
    import wrapt

    # Each hook runs when verl imports the module, or at once if it is already there.
    @wrapt.when_imported("verl.utils.config")
    def _check_before_any_worker_starts(module: object) -> None:
        install_config_check(module)

    @wrapt.when_imported("verl.trainer.ppo.v1")
    def _add_the_stage(module: object) -> None:
        from pods_plugin.integration.trainers import install_trainers

        install_trainers()

    @wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
    def _add_the_agent_loop(module: Any) -> None:
        # What verl's @register("pods_env") does, without the import of the class: every process of a run passes here,
        # and only the agent loop workers of a multi-turn run need it. Guard: tests/integration/test_agent_loop.py.
        target = "pods_plugin.integration.agent_loop.EnvAgentLoop"
        module._agent_loop_registry.setdefault("pods_env", {"_target_": target})

    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        # Set by `pods train` for a config with trainer.device=cpu; never by importing this package.
        from pods_plugin.cpu import activate

        activate()
except Exception as error:
    print(f"verl-pods: the plugin could not be loaded, down-sampling is OFF: {error!r}", file=sys.stderr)
    raise
