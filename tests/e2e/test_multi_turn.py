"""Real verl with the agent loop `pods_env`: sessions of several turns, some of several rows, some that fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e import harness
from tests.e2e.test_pods_train import ROOT, SMALL, clean_environment, finish, rows, start
from tests.text_envs import Noise

N, M, PROMPTS, STEPS = 8, 4, 4, 3
NOISE = "tests.text_envs:tests/Noise-v0"
TURNS = ["--config-dir", str(ROOT / "recipes/cpu"), "--config-name", "arithmetic_turns"]


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pods_plugin.integration.data import write_parquet

    folder = tmp_path_factory.mktemp("noise")
    write_parquet(NOISE, folder, sizes={"train": 16, "test": 4})
    return folder


@dataclasses.dataclass
class Stage:
    """What went into the stage of one step, what came out, and what was trained on."""

    before: dict[str, dict[str, Any]]  # key -> fields of the row
    kept: set[str]
    queue: set[str]
    advantages: dict[str, float] = dataclasses.field(default_factory=dict)


def watch_stage(trainer: Any) -> list[Stage]:
    """Records every step's rows as they are in TransferQueue, before and after the stage."""
    import transfer_queue as tq

    stages: list[Stage] = []
    balance, advantage = trainer._balance_batch, trainer._compute_advantage

    def watched_balance(batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        names = ["prompts", "responses", "response_mask", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        before = {key: {name: data[name][i] for name in names} for i, key in enumerate(batch.keys)}
        result = balance(batch, metrics, *args, **kwargs)
        real = {key for key, tag in zip(result.keys, result.tags, strict=True) if not tag.get("is_padding")}
        stages.append(
            Stage(before, real, {key for key in tq.kv_list()["train"] if not key.startswith("pad")})
        )
        return result

    def watched_advantage(batch: Any, metrics: Any) -> Any:
        result = advantage(batch, metrics)
        data = tq.kv_batch_get(
            keys=result.keys, partition_id=result.partition_id, select_fields=["advantages"]
        )
        for key, values in zip(result.keys, data["advantages"], strict=True):
            stages[-1].advantages[key] = float(values.abs().max() * values.sum().sign())
        return result

    trainer._balance_batch, trainer._compute_advantage = watched_balance, watched_advantage
    return stages


def sessions_of(keys: Any) -> dict[str, dict[str, list[str]]]:
    """uid -> session -> its keys in the order of their index."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys, key=lambda key: (key.rsplit("_", 2)[0], *map(int, key.rsplit("_", 2)[1:]))):
        uid, session, _ = key.rsplit("_", 2)
        found[uid][session].append(key)
    return found


def turns_of(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """The texts of the model in a row: what stands between masked tokens."""
    groups = itertools.groupby(
        zip(row["responses"].tolist(), row["response_mask"].tolist(), strict=True), key=lambda pair: pair[1]
    )
    return [
        tokenizer.decode([token for token, _ in pairs], skip_special_tokens=True)
        for ours, pairs in groups
        if ours
    ]


@pytest.mark.parametrize(
    "layout", ["turn", pytest.param("episode", marks=pytest.mark.slow)]
)  # fmt: skip
def test_sessions_are_kept_or_dropped_whole_and_failures_cost_one_session(tiny, noise, queue, layout):
    config = harness.make_config(
        tiny,
        "algorithm.downsample=max_variance",
        f"algorithm.downsample_kwargs.keep={M}",
        f"data.train_files='{noise}/train.parquet'",
        f"data.val_files='{noise}/test.parquet'",
        f"data.max_response_length={4 if layout == 'turn' else 14}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=pods_env",
        "+actor_rollout_ref.rollout.custom.pods_env.step_timeout_s=3",
        f"+actor_rollout_ref.rollout.custom.pods_env.rows={layout}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        # sampled: what an untrained model says most often may be what this environment fails on
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    trainer = harness.make_trainer(config)
    stages = watch_stage(trainer)
    try:
        records = harness.fit(trainer)
    finally:
        tokenizer = trainer.tokenizer
        harness.shut_down(trainer)
    assert len(records) == len(stages) == STEPS
    lengths = set()
    failed = 0
    for record, stage in zip(records, stages, strict=True):
        before, kept = sessions_of(stage.before), sessions_of(stage.kept)
        assert len(before) == PROMPTS
        failed += PROMPTS * N - sum(map(len, before.values()))
        for uid, sessions in before.items():
            rewards = {}
            for session, keys in sessions.items():
                assert [int(key.rsplit("_", 1)[1]) for key in keys] == list(range(len(keys)))
                texts = [text for key in keys for text in turns_of(stage.before[key], tokenizer)]
                judged = [Noise.judge(text) for text in texts]
                assert len(keys) == (len(texts) if layout == "turn" else 1)
                assert all(failure is None for _, _, failure in judged)
                assert not any(ended for _, ended, _ in judged[:-1]) and len(texts) <= 3
                rewards[session] = sum(reward for reward, _, _ in judged)
                for key in keys:  # verl gives every row of a session its reward, on the last token
                    scores = stage.before[key]["rm_scores"]
                    assert float(scores[-1]) == float(scores.sum()) == pytest.approx(rewards[session])
                info = stage.before[keys[-1]]["extra_fields"]
                info = getattr(info, "data", info)["reward_extra_info"]
                assert info == {"num_turns": len(texts), "acc": float(judged[-1][0] == 1.0)}
                lengths.add(len(keys) if layout == "turn" else len(texts))
            assert all(kept[uid][session] == sessions[session] for session in kept[uid]), (
                "rows of a session parted"
            )
            assert len(kept[uid]) == min(M, len(sessions))
            best = max(np.var(some) for some in itertools.combinations(rewards.values(), len(kept[uid])))
            assert np.var([rewards[session] for session in kept[uid]]) == pytest.approx(best)
            for session, keys in kept[uid].items():
                values = {round(stage.advantages[key], 5) for key in keys}
                assert len(values) == 1, f"rows of session {session} have advantages {values}"
        assert stage.queue == stage.kept
        assert record.queue_before == set()
        metrics = record.metrics
        assert metrics["downsample/generated"] == sum(map(len, before.values()))
        assert metrics["downsample/kept"] == sum(map(len, kept.values()))
        assert record.trained - record.padding == len(stage.kept)
        assert record.trained % (PROMPTS * M) == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        assert 0 < metrics["actor/grad_norm"] < 1e4
    assert lengths >= {1, 2}, "no session had several turns"
    assert 0 < failed < STEPS * PROMPTS * N / 2
    assert f"val-core/{NOISE}/acc/mean@3" in records[-1].metrics


@pytest.mark.slow
def test_pods_train_and_verls_own_command(tmp_path):
    # Warmed up enough to end an answer: who rambles has no second attempt.
    settings = [*SMALL, "prepare.model.steps=80", "trainer.total_training_steps=2"]
    code, output = finish(start(tmp_path, *TURNS, *settings, "--name", "turns"))
    assert code == 0, output
    steps = rows(tmp_path / "turns")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert (row["data"]["downsample/generated"], row["data"]["downsample/kept"]) == (32, 8)
        assert row["data"]["num_turns/max"] == 4  # two questions, two answers

    from pods_plugin.cpu import ENVIRONMENT

    environment = {
        **clean_environment(),
        **ENVIRONMENT,
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "verl.jsonl"),
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(tmp_path / "turns"), "--config-name", "config"]
    command += ["algorithm.downsample=null", "trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    # A short path: Ray's sockets lie there.
    with tempfile.TemporaryDirectory(prefix="pods-", ignore_cleanup_errors=True) as temp:
        command += [f"ray_kwargs.ray_init._temp_dir={temp}", f"hydra.run.dir={tmp_path}/hydra"]
        result = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    (line,) = (tmp_path / "verl.jsonl").read_text().splitlines()
    assert json.loads(line)["data"]["num_turns/max"] == 4


@pytest.mark.slow
def test_the_recipe_learns(tmp_path):
    code, output = finish(start(tmp_path, *TURNS, "--name", "learns"), timeout=1800)
    assert code == 0, output
    rewards = [row["data"]["downsample/reward/mean_all"] for row in rows(tmp_path / "learns")]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:3]) > 0.3, rewards


def test_what_is_wrong_with_the_loop_is_one_line_before_anything_starts(tmp_path):
    for override, words in (
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=pods-env",
            "pods-env is no agent loop; write pods_env",
        ),
        ("actor_rollout_ref.rollout.custom.pods_env.rows=rows", "rows='rows' is not one of episode, turn"),
        ("trainer.use_v1=False", "trainer.use_v1=True"),
    ):
        code, output = finish(start(tmp_path, *TURNS, override), timeout=120)
        lines = [line for line in output.splitlines() if line.startswith("pods: ")]
        assert code == 2 and len(lines) == 1 and words in lines[0], output
