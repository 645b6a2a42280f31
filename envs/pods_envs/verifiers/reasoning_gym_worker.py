"""Scorers of reasoning-gym for worker.py. It imports nothing of ours."""

import ast
import contextlib
import functools
import json
from typing import Any

import reasoning_gym


@functools.lru_cache(maxsize=64)
def dataset(task: str, settings: str) -> Any:
    """The task with its settings, which some scorers read."""
    return reasoning_gym.create_dataset(task, **json.loads(settings))


def warm() -> None:
    """Nothing: the import was all."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The score of `answer`. A scorer that raises could not make sense of it."""
    text = request["metadata"]
    try:
        metadata = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        metadata = json.loads(text)
    entry = {"question": request["question"], "answer": request["reference"], "metadata": metadata}
    task = dataset(request["task"], json.dumps(request["settings"]))
    try:
        with contextlib.redirect_stdout(None):
            return {"value": float(task.score_answer(request["answer"], entry))}
    except MemoryError:
        raise
    except Exception as error:
        return {"method": "unparsable", "error": repr(error)[:200]}
