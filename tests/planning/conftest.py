"""Jobs and shapes that the planner's tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pods_plugin.planning.job import Engine, Job, Trainer
from pods_plugin.planning.model import ModelShape, find_model


@pytest.fixture(scope="session")
def qwen7b() -> ModelShape:
    return find_model("Qwen/Qwen2.5-7B-Instruct")


@pytest.fixture(scope="session")
def moe() -> ModelShape:
    return find_model("Qwen/Qwen3-30B-A3B")


@pytest.fixture(scope="session")
def make_job(qwen7b: ModelShape) -> Callable[..., Job]:
    """A 7B job on 8 GPUs; keywords replace fields of the job, its trainer or its engine."""

    def make(**changes: object) -> Job:
        job = Job(
            name="test",
            model=qwen7b,
            trainer=Trainer(backend="fsdp2", gpus=8, shard=8),
            engine=Engine(name="vllm", gpus=8, tp=1, max_tokens=3072, sequences=1024),
            gpus_per_node=8,
            prompts=128,
            mini_prompts=64,
            epochs=1,
            n=64,
            m=16,
            max_prompt=1024,
            max_response=2048,
            workers=8,
        )
        for part in ("trainer", "engine"):
            given = changes.pop(part, {})
            assert isinstance(given, dict)
            changes[part] = dataclasses.replace(getattr(job, part), **given)
        return dataclasses.replace(job, **changes)  # type: ignore[arg-type]

    return make
