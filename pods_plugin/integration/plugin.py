"""The `verl.plugins` entry point: loaded by `import verl` in every process, so it imports nothing heavy.

verl logs an error of a plugin at DEBUG level and goes on without it, which would train on all rollouts without a
word. So this module keeps to calls that cannot fail in a healthy installation, and prints what fails all the same.
"""

from __future__ import annotations

import os
import sys

try:
    import wrapt

    # Each hook runs when verl imports the module, or at once if it is already there.
    @wrapt.when_imported("verl.utils.config")
    def _check_before_any_worker_starts(module: object) -> None:
        from pods_plugin.integration.checks import install_config_check

        install_config_check(module)

    @wrapt.when_imported("verl.trainer.ppo.v1")
    def _add_the_stage(module: object) -> None:
        from pods_plugin.integration.trainers import install_trainers

        install_trainers()

    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        # Set by `pods train` for a config with trainer.device=cpu; never by importing this package.
        from pods_plugin.cpu import activate

        activate()
except Exception as error:
    print(f"verl-pods: the plugin could not be loaded, down-sampling is OFF: {error!r}", file=sys.stderr)
    raise
