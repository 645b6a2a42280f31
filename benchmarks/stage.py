"""The down-sampling stage in a real TransferQueue: seconds, and its share of a step.

    python benchmarks/stage.py [--sizes 16x32 64x64 1024x64] [--repeats 3]

Compared with, in the same run and on the same rows: writing the rollouts into the queue, which every run does, and
reading what verl's own advantage needs of the kept ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from pods_plugin.cpu import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]


def measure(prompts: int, n: int, repeats: int) -> dict[str, float]:
    import transfer_queue as tq

    from pods_plugin.downsampling import DownsampleConfig
    from pods_plugin.integration.stage import downsample
    from tests.rollouts import put_rollouts

    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"put": [], "stage": [], "get": []}
    settings = DownsampleConfig(rule="max_variance", generated=n, keep=n // 4)
    for repeat in range(repeats):
        rewards = {f"{i:032x}": rng.integers(0, 2, n).astype(float).tolist() for i in range(prompts)}
        start = time.perf_counter()
        batch = put_rollouts(rewards, response_lens=(64, 96, 128), prompt_len=64)
        times["put"].append(time.perf_counter() - start)
        start = time.perf_counter()
        result = downsample(batch, settings, global_step=repeat)
        times["stage"].append(time.perf_counter() - start)
        fields = ["response_mask", "rm_scores", "rollout_log_probs"]
        start = time.perf_counter()
        tq.kv_batch_get(keys=result.batch.keys, partition_id="train", select_fields=fields)
        times["get"].append(time.perf_counter() - start)
        tq.kv_clear(keys=result.batch.keys, partition_id="train")
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["16x32", "64x64", "1024x64"], help="prompts x rollouts"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the median is shown")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(ROOT))

    from tests.cluster import local_queue, local_ray

    with local_ray(num_cpus=8, object_store_memory=500_000_000, log_to_driver=False), local_queue():
        print(
            "| prompts x n | rollouts | stage s | a rollout, us | of writing the rollouts | of reading the kept |"
        )
        print("|---:|---:|---:|---:|---:|---:|")
        for size in arguments.sizes:
            prompts, n = map(int, size.split("x"))
            seconds = measure(prompts, n, arguments.repeats)
            rows = prompts * n
            print(
                f"| {prompts} x {n} | {rows} | {seconds['stage']:.3f} | {seconds['stage'] / rows * 1e6:.0f} | "
                f"{seconds['stage'] / seconds['put']:.1%} | {seconds['stage'] / seconds['get']:.2f} x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
