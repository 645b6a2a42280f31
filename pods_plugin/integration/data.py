"""An environment's problems -> the parquet files that verl trains on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
from rich.console import Console
from rich.progress import track

# Rows of an environment without a list of problems, of which each seed is another episode.
SEEDS = {"train": range(1024), "test": range(1_000_000, 1_000_128)}


def write_parquet(
    env_id: str,
    out: str | Path,
    *,
    sizes: Mapping[str, int | None] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> dict[str, Path]:
    """Writes `train.parquet` and `test.parquet` of a registered environment, in verl's columns.

    Columns: `data_source` (the id), `prompt` (chat messages), `ability`, `reward_model` (style, ground_truth) and
    `extra_info`: `index`, `split` and `env_kwargs` as JSON, from which the reward function makes the same verifier and
    the agent loop `pods_env` the same environment, reset to the problem `index`; `question` and `info` (JSON), so that
    the reward function has the whole problem.

    A text environment that is no `pods_envs.ReasoningEnv` has no problems to list: its rows are seeds (`index`), its
    prompts the first observations; it is not given a `split`, and can be trained on by the agent loop only.

    Args:
        env_id: A gymnasium id whose environment is a `pods_envs.ReasoningEnv`, or one with texts for observations.
        out: The folder; made if absent.
        sizes: Problems per split; None for all there are (of seeds: 1,024 and 128). Default: all of the
            environment's `splits`, as a rule `train` and `test`.
        env_kwargs: Passed to `gymnasium.make`, for a ReasoningEnv beside `split`.
        progress: Show a bar on standard error.

    Returns:
        Split -> file written.

    Raises:
        gymnasium.error.Error: Nothing is registered under the id.
        TypeError: What is registered is no text environment, or an `info` holds what JSON cannot.
    """
    import pandas
    import pods_envs

    env_kwargs = dict(env_kwargs or {})
    try:
        splits = pods_envs.env_class(env_id)[0].splits
        rows_of = _problem_rows
    except TypeError as error:
        _check_text(env_id, env_kwargs, error)
        splits = tuple(SEEDS)
        rows_of = _seed_rows
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, size in (sizes or dict.fromkeys(splits)).items():
        path = folder / f"{split}.parquet"
        partial = path.with_suffix(".partial")  # a crash leaves no half-written file under the final name
        pandas.DataFrame(rows_of(env_id, split, size, env_kwargs, progress)).to_parquet(partial)
        partial.rename(path)
        written[split] = path
    return written


def same_problems(written: Mapping[str, Path]) -> bool:
    """Whether all of several files written ask the same: one local file was the source of every split."""
    import pandas

    prompts = [pandas.read_parquet(path, columns=["prompt"])["prompt"].map(str) for path in written.values()]
    return len(prompts) > 1 and all(prompt.equals(prompts[0]) for prompt in prompts)


def _problem_rows(
    env_id: str, split: str, size: int | None, env_kwargs: dict[str, Any], progress: bool
) -> list[dict[str, Any]]:
    env: Any = gymnasium.make(env_id, split=split, **env_kwargs).unwrapped
    count = len(env.problems) if size is None else min(size, len(env.problems))
    rows = []
    for index in _bar(range(count), split, progress):
        problem = env.problems[index]
        extra = {"index": index, "split": split, "env_kwargs": json.dumps(env_kwargs)}
        extra |= {"question": problem.question, "info": problem.info_json()}
        rows.append(_row(env_id, env.messages(problem), problem.answer, extra))
    return rows


def _bar(indices: range, split: str, progress: bool) -> Iterable[int]:
    return track(indices, description=split, console=Console(stderr=True), disable=not progress)


def _seed_rows(
    env_id: str, split: str, size: int | None, env_kwargs: dict[str, Any], progress: bool
) -> list[dict[str, Any]]:
    if split not in SEEDS:
        raise ValueError(f"split {split!r} of {env_id} is not one of {', '.join(SEEDS)}: its rows are seeds")
    seeds = SEEDS[split] if size is None else range(SEEDS[split].start, SEEDS[split].start + size)
    env = gymnasium.make(env_id, **env_kwargs)
    rows = []
    for seed in _bar(seeds, split, progress):
        observation, _ = env.reset(seed=seed, options={"index": seed})
        message = {"role": "user", "content": observation}
        rows.append(_row(env_id, [message], "", {"index": seed, "env_kwargs": json.dumps(env_kwargs)}))
    env.close()
    return rows


def _row(env_id: str, messages: list[dict[str, str]], answer: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": env_id,
        "prompt": messages,
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": extra,
    }


def _check_text(env_id: str, env_kwargs: dict[str, Any], error: TypeError) -> None:
    env = gymnasium.make(env_id, **env_kwargs)
    observation, _ = env.reset(seed=0)
    env.close()
    if not isinstance(observation, str):
        raise TypeError(
            f"{error}, or one whose observations are texts, not {type(observation).__name__}"
        ) from None
