"""An environment's problems -> the parquet files that verl trains on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium


def write_parquet(
    env_id: str,
    out: str | Path,
    *,
    sizes: Mapping[str, int | None] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    """Writes `train.parquet` and `test.parquet` of a registered environment, in verl's columns.

    Columns: `data_source` (the id), `prompt` (chat messages), `ability`, `reward_model` (style, ground_truth) and
    `extra_info` (index, split, env_kwargs as JSON, from which the reward function makes the same verifier).

    Args:
        env_id: A gymnasium id whose environment is a `pods_envs.ReasoningEnv`.
        out: The folder; made if absent.
        sizes: Problems per split; None for all there are. Default: all of `train` and `test`.
        env_kwargs: Passed to `gymnasium.make` beside `split`.

    Returns:
        Split -> file written.

    Raises:
        TypeError: The id is registered, but not to a reasoning environment.
    """
    import pandas
    import pods_envs

    pods_envs.env_class(env_id)  # refuses what is no reasoning environment before anything is made
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    env_kwargs = dict(env_kwargs or {})
    written = {}
    for split, size in (sizes or {"train": None, "test": None}).items():
        env: Any = gymnasium.make(env_id, split=split, **env_kwargs).unwrapped
        rows = []
        for index in range(len(env.problems) if size is None else min(size, len(env.problems))):
            problem = env.problems[index]
            rows.append(
                {
                    "data_source": env_id,
                    "prompt": env.messages(problem),
                    "ability": "reasoning",
                    "reward_model": {"style": "rule", "ground_truth": problem.answer},
                    "extra_info": {"index": index, "split": split, "env_kwargs": json.dumps(env_kwargs)},
                }
            )
        path = folder / f"{split}.parquet"
        partial = path.with_suffix(".partial")  # a crash leaves no half-written file under the final name
        pandas.DataFrame(rows).to_parquet(partial)
        partial.rename(path)
        written[split] = path
    return written
