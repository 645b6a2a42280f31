"""Times batched max-variance selection against numpy.argsort and the paper's algorithm as a plain loop.

All three see the same rewards in the same run, turn by turn; what is printed are ratios of medians.

    python benchmarks/selection.py --repeats 31
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from pods_plugin.downsampling import select_groups


def paper_loop(rewards: torch.Tensor, keep: int) -> list[torch.Tensor]:
    """The paper's algorithm as it stands: each group is sorted, then keep + 1 variances are compared.

    Args:
        rewards: (groups, n) float64.
        keep: m.

    Returns:
        For each group the (keep,) indices of its rollouts.
    """
    kept = []
    for group in rewards:
        n = len(group)
        values, order = torch.sort(group)
        best, best_i = torch.tensor(-1.0, dtype=group.dtype), 0
        for i in range(keep + 1):
            variance = torch.var(torch.cat((values[:i], values[n - keep + i :])), correction=0)
            if variance > best:
                best, best_i = variance, i
        kept.append(torch.cat((order[:best_i], order[n - keep + best_i :])))
    return kept


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def check(rewards: np.ndarray, mask: np.ndarray, loop: list[torch.Tensor]) -> None:
    """Both select subsets of equal variance in each group, or the comparison means nothing."""
    ours = np.array([row[kept].var() for row, kept in zip(rewards, mask, strict=True)])
    theirs = np.array([row[i.numpy()].var() for row, i in zip(rewards, loop, strict=True)])
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def measure(rewards: np.ndarray, keep: int, repeats: int, loop_repeats: int) -> tuple[float, float, float]:
    """Returns the median seconds of (select_groups, argsort, loop) for (groups, n) rewards."""
    groups, n = rewards.shape
    flat, ids, tensor = rewards.ravel(), np.repeat(np.arange(groups), n), torch.from_numpy(rewards)
    check(rewards, select_groups(flat, ids, keep=keep).reshape(groups, n), paper_loop(tensor, keep))
    ours, sort, loop = [], [], []
    for turn in range(repeats):
        sort.append(seconds(lambda: np.argsort(rewards, axis=-1)))
        ours.append(seconds(lambda turn=turn: select_groups(flat, ids, keep=keep, seed=turn)))
        if turn < loop_repeats:
            loop.append(seconds(lambda: paper_loop(tensor, keep)))
    return median(ours), median(sort), median(loop)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=1024, help="prompts of a step (default: %(default)s)")
    parser.add_argument(
        "--n", type=int, nargs="+", default=[16, 64, 512], help="rollouts of each prompt; n/4 are kept"
    )
    parser.add_argument(
        "--repeats", type=int, default=101, help="turns of selection and argsort (default: %(default)s)"
    )
    parser.add_argument(
        "--loop-repeats", type=int, default=3, help="turns that time the loop too (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print(f"{args.groups} groups, keep = n/4; numpy {np.__version__}, torch {torch.__version__}\n")
    print(
        "| n | rewards | select_groups | time / argsort (aim: at most 3) | loop / time (aim: at least 100) |"
    )
    print("|---:|:---|---:|---:|---:|")
    for n in args.n:
        for name in ("real", "0/1"):
            shape = (args.groups, n)
            rewards = (
                rng.normal(size=shape)
                if name == "real"
                else rng.integers(0, 2, size=shape).astype(np.float64)
            )
            ours, sort, loop = measure(rewards, n // 4, args.repeats, args.loop_repeats)
            print(
                f"| {n} | {name} | {ours * 1e3:.2f} ms | {ours / sort:.2f} | {loop / ours:,.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
