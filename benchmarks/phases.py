"""Seconds of each phase of a step with and without down-sampling, real runs one after the other on this machine.

    python benchmarks/phases.py [--steps 10] [--config-dir recipes/cpu --config-name arithmetic] [overrides ...]

Three runs of the recipe: n rollouts of which m are kept, n rollouts all trained on, and m rollouts. The medians over
the steps after the first two are shown: log-prob and update of the first should be those of the last.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pods_plugin.reporting.runs import load_run, phase_seconds, reward_all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--m", type=int, default=4)
    parser.add_argument("--config-dir", default="recipes/cpu")
    parser.add_argument("--config-name", default="arithmetic")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    n, m = arguments.n, arguments.m
    runs = {
        f"PODS {n} -> {m}": [f"actor_rollout_ref.rollout.n={n}", f"algorithm.downsample_kwargs.keep={m}"],
        f"GRPO n={n}": [f"actor_rollout_ref.rollout.n={n}", "algorithm.downsample=null"],
        f"GRPO n={m}": [f"actor_rollout_ref.rollout.n={m}", "algorithm.downsample=null"],
    }
    print("| run | step s | generate | select | log-prob | update | rows trained on |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="pods-phases-") as folder:
        for number, (name, overrides) in enumerate(runs.items()):
            command = [
                str(Path(sys.executable).parent / "pods"),
                "train",
                "--runs-dir",
                folder,
                "--name",
                str(number),
            ]
            command += ["--config-dir", arguments.config_dir, "--config-name", arguments.config_name]
            command += [f"trainer.total_training_steps={arguments.steps}", "trainer.save_freq=-1", *overrides]
            subprocess.run([*command, *arguments.overrides], check=True, stdout=subprocess.DEVNULL)
            run = load_run(Path(folder) / str(number))
            steps = run.steps[2:]
            assert all(reward_all(step) is not None for step in steps)

            def median(key: str, steps: list = steps) -> float:
                return statistics.median(phase_seconds(step).get(key, 0.0) for step in steps)

            total = statistics.median(step.get("timing_s/step") or 0.0 for step in steps)
            assert run.config is not None
            prompts = run.config["data"]["train_batch_size"]
            rows = int(steps[-1].get("downsample/kept") or prompts * (n if f"n={n}" in name else m))
            print(
                f"| {name} | {total:.2f} | {median('generate'):.2f} | {median('select'):.3f} | "
                f"{median('log-prob'):.2f} | {median('update'):.2f} | {rows} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
