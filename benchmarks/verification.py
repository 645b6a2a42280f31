"""Speed of `pods_envs.verify` beside verl's math_verify and prime_math scorers, on the same texts in turns.

    python benchmarks/verification.py [--shared ../shared] [--limit 3000]

Prints milliseconds a text, ratios of the totals, percentiles, and the share that each method decided. All
runs one text after the other. verl's math_verify hops to a worker process, so it is also timed without that.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pods_envs import Verdict, verify

Text = tuple[str, str]  # response, gold
TURN = 100  # texts that one scorer judges before it is the next one's turn


def rows(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def texts(shared: Path, limit: int) -> dict[str, tuple[str, list[Text]]]:
    """Name -> (data set, texts)."""
    rng = random.Random(0)
    completions = rows(shared / "cases/model_completions.jsonl")
    rng.shuffle(completions)
    gsm8k = [(row["completion"], row["answer"]) for row in completions if row["dataset"] == "gsm8k"]
    other = [(row["completion"], row["answer"]) for row in completions if row["dataset"] != "gsm8k"]
    golds = [row["answer"] for row in rows(shared / "data/math_train.jsonl") if row["answer"]]
    rng.shuffle(golds)
    return {
        "GSM8K completions": ("gsm8k", gsm8k[:limit]),
        "AMC and MATH completions": ("math", other[:limit]),
        "MATH golds, boxed": ("math", [(f"\\boxed{{{gold}}}", gold) for gold in golds[:limit]]),
        "MATH golds against others": (
            "math",
            [(f"\\boxed{{{golds[i]}}}", golds[i + 1]) for i in range(limit)],
        ),
    }


def timed(score: Callable[[str, str], object], pairs: list[Text]) -> tuple[list[float], list[object]]:
    seconds, results = [], []
    with contextlib.redirect_stdout(io.StringIO()):
        for response, gold in pairs:
            start = time.perf_counter()
            results.append(score(response, gold))
            seconds.append(time.perf_counter() - start)
    return seconds, results


def import_seconds(module: str) -> float:
    """Processor time of importing a module in a fresh interpreter; the least of five."""
    script = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    return min(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--limit", type=int, default=3000, help="texts of each kind")
    arguments = parser.parse_args()

    ours, gymnasium = import_seconds("pods_envs"), import_seconds("gymnasium")
    print(f"import pods_envs: {ours:.2f} s of processor time, of which gymnasium {gymnasium:.2f} s")

    from verl.utils.reward_score import math_verify, prime_math

    def in_process(response: str, gold: str) -> float:
        return math_verify._verify_in_subprocess(f"\\boxed{{{gold}}}", response)

    verify("\\boxed{x+1}", "1+x")  # workers and imports are not what is measured
    math_verify.compute_score("\\boxed{1}", "1")
    in_process("\\boxed{1}", "1")
    with contextlib.redirect_stdout(io.StringIO()):
        prime_math.compute_score("\\boxed{1}", "1")

    for name, (dataset, pairs) in texts(arguments.shared, arguments.limit).items():
        scorers: dict[str, Callable[[str, str], object]] = {
            "pods_envs.verify": lambda response, gold, dataset=dataset: verify(response, gold, dataset),  # type: ignore[misc]
            "verl math_verify": math_verify.compute_score,
            "the same, in process": in_process,
            "verl prime_math": prime_math.compute_score,
        }
        seconds: dict[str, list[float]] = {scorer: [] for scorer in scorers}
        verdicts = []
        # In turns, since the speed of a shared machine changes from minute to minute.
        for start in range(0, len(pairs), TURN):
            for scorer, score in scorers.items():
                taken, results = timed(score, pairs[start : start + TURN])
                seconds[scorer] += taken
                verdicts += [result for result in results if isinstance(result, Verdict)]
        methods = collections.Counter(verdict.method for verdict in verdicts)
        shares = ", ".join(f"{method} {count / len(pairs):.1%}" for method, count in methods.most_common())
        print(f"\n{name} ({len(pairs)} texts; decided by: {shares})")
        ours = seconds["pods_envs.verify"]
        ordered = sorted(ours)
        for scorer, taken in seconds.items():
            line = f"  {scorer:22s}  {1e3 * sum(taken) / len(pairs):9.3f} ms a text   "
            if taken is ours:
                p50, p99 = (1e3 * ordered[int(share * len(ordered))] for share in (0.5, 0.99))
                line += f"p50 {p50:.3f}   p99 {p99:.3f}"
            else:
                line += f"{sum(taken) / sum(ours):8.1f} times ours"
            print(line, flush=True)


if __name__ == "__main__":
    main()
