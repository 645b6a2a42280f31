"""The child process of `pods train`: verl's own entry point on a config that is already composed.

    python -m pods_plugin.cli.driver RUN_DIR/config.yaml [--check]

Its output is verl's log. It ends itself when its parent is gone, so that a killed `pods train` leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from omegaconf import DictConfig, OmegaConf


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)  # Ray's exit handlers end its processes
        time.sleep(10.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def check(config: DictConfig) -> None:
    """Runs verl's own validation of a config, which needs no GPU, however many the config names."""
    from importlib.util import find_spec

    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = config.copy()
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and find_spec("vllm") is None:
        # verl asks vLLM for the LoRA ranks it serves; where it is not installed, as on a login node, ours is the check
        # of that (integration/model_checks.py).
        rollout.name = "vllm (not installed here)"
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )


def main(config_path: str, check_only: bool = False) -> None:
    """Runs verl's `main_ppo` on the config at `config_path`, or only its validation."""
    _end_with_parent()
    config = OmegaConf.load(config_path)
    assert isinstance(config, DictConfig)

    import verl  # noqa: F401  # loads the plugins; before anything else of verl
    from verl.trainer import main_ppo

    from pods_plugin.integration import plugin  # noqa: F401  # also where verl's discovery was switched off

    if check_only:
        try:
            check(config)
        except Exception as error:
            cause = error.__cause__ or error  # Hydra wraps what a dataclass of verl says
            text = " ".join(str(cause).split()) or repr(cause)
            raise SystemExit(f"verl-pods: verl refuses this config: {text}") from None
        print("verl-pods: verl accepts this config")
        return
    main_ppo.main(config)


if __name__ == "__main__":
    main(sys.argv[1], check_only="--check" in sys.argv[2:])
