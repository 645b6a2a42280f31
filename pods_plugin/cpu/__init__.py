"""The embedded default: run real verl (V1 trainer, Ray, FSDP, weight sync) on a machine without an
accelerator.

`activate()` is called by the `verl.plugins` entry point, only in processes whose environment has
`VERL_PLATFORM=cpu`: the driver and every Ray worker of a run that `pods train` started with
`trainer.device=cpu`. Importing this package imports neither torch nor verl and changes nothing.

platform.py    the `cpu` platform for verl's registry
patches.py     what verl's own hooks do not reach, one function a patch
generation.py  batched generation with a KV cache, in plain torch and transformers
attention.py   decoding without copies of the KV cache
hf_rollout.py  the `hf` rollout: Ray actor, replica, weight sync
trainers.py    fast polling of the replay buffer, and a watchdog instead of a hang
models.py      tiny models, and SmolLM2-135M out of its wheel
"""

from __future__ import annotations

from pods_plugin.cpu.settings import ENVIRONMENT

__all__ = ["ENVIRONMENT", "activate"]

_activated = False


def activate() -> None:
    """Register the platform, the rollout, the patches and the embedded trainers in this process. Idempotent.

    Runs at the end of `import verl`, in every process: everything that needs more of verl than is already
    imported waits for that import.
    """
    global _activated
    if _activated:
        return
    _activated = True

    from pods_plugin.cpu import patches, platform

    platform.register()
    patches.install()
