"""verl's whole trainer on the Megatron engine with down-sampling, as `pods train` starts it: real Ray workers, gloo,
the `hf` rollout, weights handed over after each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron import stand_ins

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(stand_ins.missing()), reason=stand_ins.missing()),
]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, N, M = 4, 8, 4
SMALL = [
    "model_engine=megatron",
    # what the embedded default and the recipe set for FSDP alone
    "actor_rollout_ref.actor.strategy=megatron",
    "~actor_rollout_ref.actor.fsdp_config",
    "~actor_rollout_ref.ref.fsdp_config",
    "~actor_rollout_ref.actor.optim.lr_scheduler_type",
    "~actor_rollout_ref.actor.optim.min_lr_ratio",
    # as in the engine check
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.ref.megatron.dtype=float32",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
    # small
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={N}",
    f"algorithm.downsample_kwargs.keep={M}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "prepare.data.env_kwargs.size=64",
    "prepare.model.steps=150",
    "prepare.model.doubt_steps=0",
    "trainer.n_gpus_per_node=2",
]


def pods_train(runs: Path, *arguments: str) -> str:
    """Runs `pods train` with the stand-ins in each of its processes. Returns what it printed."""
    ours = ("VERL_", "PODS_", "RAY_", "TRANSFER_QUEUE", "TQ_", "GLOO_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    result = subprocess.run(
        [str(Path(sys.executable).parent / "pods"), "train", "--runs-dir", str(runs), *arguments],
        env={**environment, **stand_ins.ENVIRONMENT},
        cwd=runs,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    logs = "".join(file.read_text()[-5000:] for file in runs.glob("*/train.log"))
    assert result.returncode == 0, result.stdout + result.stderr + logs
    return result.stdout


def start(runs: Path, *overrides: str) -> Path:
    recipe = ["--config-dir", str(ROOT / "recipes/cpu"), "--config-name", "arithmetic", "--name", "run"]
    pods_train(runs, *recipe, *SMALL, *overrides)
    return runs / "run"


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


def assert_sound(metrics: dict[str, float]) -> None:
    """A step that kept m of n, moved the policy, and whose rollouts came from the weights of the engine."""
    assert (metrics["downsample/generated"], metrics["downsample/kept"]) == (PROMPTS * N, PROMPTS * M)
    assert metrics["critic/score/mean"] == pytest.approx(metrics["downsample/reward/mean_kept"], abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert abs(metrics["actor/pg_loss"]) < 10
    assert 0 < metrics["actor/grad_norm"] < 1e4


def test_tensor_parallel_with_reference_saved_and_resumed(tmp_path):
    overrides = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.04",
    ]
    runs = {name: tmp_path / name for name in ("whole", "halves")}
    for folder in runs.values():
        folder.mkdir()
    whole = steps_of(
        start(runs["whole"], *overrides, "trainer.total_training_steps=5", "trainer.save_freq=-1")
    )
    run = start(runs["halves"], *overrides, "trainer.total_training_steps=3", "trainer.save_freq=3")
    halves = steps_of(run)
    assert list(halves) == [1, 2, 3]
    pods_train(runs["halves"], "--resume", "run", "trainer.total_training_steps=5")
    resumed = steps_of(run)
    assert list(resumed) == [4, 5]

    halves |= resumed
    for step, metrics in whole.items():
        assert_sound(metrics)
        assert_sound(halves[step])
        assert "timing_s/ref" in metrics
        # Prompts, rollouts, weights and the optimizer's state are those of the run that was not interrupted.
        for name in ("critic/score/mean", "actor/kl_loss", "actor/pg_loss", "actor/grad_norm"):
            assert halves[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), (step, name)
    # The policy is the reference until the first update, and no longer.
    assert whole[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert whole[2]["actor/kl_loss"] > 1e-4 and whole[3]["actor/kl_loss"] > 1e-4


def test_pipeline_parallel(tmp_path):
    run = start(
        tmp_path,
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
    )
    steps = steps_of(run)
    assert list(steps) == [1, 2, 3]
    for metrics in steps.values():
        assert_sound(metrics)
