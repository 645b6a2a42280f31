"""From an environment to verl's parquet, and back from its columns to a verdict."""

from __future__ import annotations

import asyncio
import inspect
import json

import gymnasium
import pytest

pandas = pytest.importorskip("pandas")

from pods_plugin.integration.data import write_parquet
from pods_plugin.integration.reward import compute_score


def judge(row, response: str) -> dict:
    arguments = (row.data_source, response, row.reward_model["ground_truth"], row.extra_info)
    return asyncio.run(compute_score(*arguments))


def test_parquet_has_verls_columns_and_every_gold_scores_itself(tmp_path):
    written = write_parquet(
        "pods/Arithmetic-v0", tmp_path, env_kwargs={"level": 1, "size": 20, "format_weight": 0.1}
    )
    assert set(written) == {"train", "test"}
    frame = pandas.read_parquet(written["train"])
    assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert len(frame) == 20
    env = gymnasium.make("pods/Arithmetic-v0", level=1, size=20, split="train").unwrapped
    for row, problem in zip(frame.itertuples(), env.problems, strict=True):
        assert [dict(message) for message in row.prompt] == env.messages(problem)
        gold = row.reward_model["ground_truth"]
        assert judge(row, gold) == {
            "score": 1.0,
            "acc": 1.0,
            "format_ok": 1.0,
            "extracted": gold,
            "method": "exact",
        }
        assert judge(row, str(int(gold) + 1))["score"] == pytest.approx(0.1)  # well-formed and wrong
        assert judge(row, "no idea")["score"] == 0.0


def test_gsm8k_needs_its_file_for_the_data_only(tmp_path):
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(json.dumps({"question": "What is 6 times 7?", "answer": "6*7=42\n#### 42"}) + "\n")
    written = write_parquet(
        "pods/GSM8K-v0",
        tmp_path,
        sizes={"train": 1},
        env_kwargs={"source": str(source), "answer_format": "boxed"},
    )
    source.unlink()
    row = next(pandas.read_parquet(written["train"]).itertuples())
    assert judge(row, "It is \\boxed{42}.")["acc"] == 1.0
    assert judge(row, "It is 42.")["acc"] == 0.0


def test_verl_awaits_the_reward_function():
    assert inspect.iscoroutinefunction(compute_score)


def test_a_data_source_that_is_no_reasoning_env_says_so():
    with pytest.raises(
        TypeError,
        match="CartPole-v1 is CartPoleEnv, expected an environment derived from pods_envs.ReasoningEnv",
    ):
        asyncio.run(compute_score("CartPole-v1", "x", "y"))


def test_write_parquet_refuses_other_environments(tmp_path):
    with pytest.raises(TypeError, match="derived from pods_envs.ReasoningEnv"):
        write_parquet("CartPole-v1", tmp_path, sizes={"train": 1}, env_kwargs={})
