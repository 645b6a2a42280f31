"""Problems from where they are kept: a local jsonl or parquet file, the Hugging Face hub, or any iterable."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pods_envs.base import Problem

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

# The configurations of a data set of the hub that make up the whole of it, where it has more than one.
HUB_CONFIGS: dict[str, tuple[str | None, ...]] = {
    "openai/gsm8k": ("main",),
    "EleutherAI/hendrycks_math": (
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    ),
}


def once_per_process(load: Callable[..., tuple[Problem, ...]]) -> Callable[..., tuple[Problem, ...]]:
    """Decorator: problems are made once for the same arguments, by one thread, and shared after that.

    A multi-turn run makes an environment for every session, hundreds at a time.
    """
    kept = functools.lru_cache(maxsize=16, typed=True)(load)
    lock = threading.Lock()

    @functools.wraps(load)
    def shared(*arguments: Any) -> tuple[Problem, ...]:
        with lock:
            return kept(*arguments)

    return shared


def question_answer(row: Row) -> Problem:
    """The default schema: columns `question` and `answer`, every other column goes to `info`."""
    info = {key: value for key, value in row.items() if key not in ("question", "answer")}
    return Problem(row["question"], str(row["answer"]), info)


def load_problems(
    source: str | Path | Iterable[Row | Problem],
    *,
    split: str = "train",
    to_problem: Callable[[Row], Problem] = question_answer,
) -> list[Problem]:
    """Reads problems.

    Args:
        source: A path that ends in `.jsonl` or `.parquet`; a dataset of the Hugging Face hub, `owner/name` or
            `owner/name:config`; or an iterable of rows (mappings) or Problems.
        split: The split to take from the hub. A file or an iterable is taken whole.
        to_problem: Turns a row in the schema of the source into a Problem.

    Returns:
        The problems in the order of the source, without those whose reference answer is empty (logged).

    Raises:
        FileNotFoundError: A path that does not exist.
        ValueError: A row lacks a column, or nothing was left.
    """
    problems = []
    empty = []
    for number, row in enumerate(_rows(source, split)):
        try:
            problem = row if isinstance(row, Problem) else to_problem(row)
        except KeyError as error:
            raise ValueError(
                f"row {number} of {_name(source)} lacks {error}; it has {sorted(row)}"
            ) from error
        if problem.answer.strip():
            problems.append(problem)
        else:
            empty.append(number)
    if empty:
        logger.warning(
            "%s: dropped %d rows without a reference answer: %s", _name(source), len(empty), empty[:10]
        )
    if not problems:
        raise ValueError(f"{_name(source)} holds no problem with a reference answer")
    return problems


def _rows(source: str | Path | Iterable[Row | Problem], split: str) -> Iterator[Any]:
    if not isinstance(source, (str, Path)):
        yield from source
        return
    path = Path(source)
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    elif path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    else:
        import datasets  # type: ignore[import-untyped]

        name, _, config = str(source).partition(":")
        try:
            for part in (config,) if config else HUB_CONFIGS.get(name, (None,)):
                yield from datasets.load_dataset(name, part, split=split)
        except Exception as error:
            raise ValueError(
                f"cannot load split {split!r} of {str(source)!r} from the Hugging Face hub ({error}); give a "
                "local file that ends in .jsonl or .parquet, a hub name owner/name[:config], or rows"
            ) from error


def _name(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__
