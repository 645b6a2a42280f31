"""`+cpu=shrink`: every FSDP recipe runs two steps of real verl here, with its own algorithm and settings."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from pods_plugin.cli.driver import check
from pods_plugin.cpu.shrink import tiny_shape
from pods_plugin.integration.checks import check_config
from pods_plugin.integration.model_checks import check_model, model_facts
from tests.recipes.recipes import FSDP_RECIPES, load, name

fsdp = pytest.mark.parametrize("path", FSDP_RECIPES, ids=name)

# Whole blocks that shrinking leaves alone, and the keys in them that it scales down.
SAME = {
    "algorithm": {"downsample_kwargs.keep"},
    "actor_rollout_ref.actor": {
        "ppo_mini_batch_size",
        "ppo_max_token_len_per_gpu",
        "ulysses_sequence_parallel_size",
        "use_torch_compile",
        "fsdp_config.*",
        "rollout_n",
    },
    "actor_rollout_ref.model": {
        "path",
        "lora.merge",
        "override_config.*",
        "enable_gradient_checkpointing",
    },
    "actor_rollout_ref.rollout.val_kwargs": set(),
    "trainer.v1": set(),
    "reward": {"num_workers"},
}


def flat(config, prefix: str = "") -> dict[str, object]:
    found = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@fsdp
def test_what_stays_and_what_shrinks(path, tmp_path):
    large, small = load(path, run_dir=tmp_path), load(path, "+cpu=shrink", run_dir=tmp_path)
    for block, scaled in SAME.items():
        before, after = (
            flat(OmegaConf.to_container(OmegaConf.select(config, block), resolve=True))
            for config in (large, small)
        )
        for key in before.keys() | after.keys():
            if key in scaled or f"{key.split('.')[0]}.*" in scaled:
                continue
            assert before.get(key) == after.get(key), f"{block}.{key}"

    def ratios(config):
        keep = config.algorithm.downsample_kwargs.keep
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        tokens = config.data.max_prompt_length + config.data.max_response_length
        return (
            rollout.n / keep,
            config.data.train_batch_size / actor.ppo_mini_batch_size,
            pytest.approx(actor.ppo_max_token_len_per_gpu / tokens, rel=0.01),
        )

    assert ratios(small) == ratios(large)
    assert small.actor_rollout_ref.rollout.temperature == large.actor_rollout_ref.rollout.temperature
    gpus = large.trainer.nnodes * large.trainer.n_gpus_per_node
    assert small.trainer.n_gpus_per_node == min(2, gpus) and small.trainer.nnodes == 1
    assert small.actor_rollout_ref.model.lora.merge == (large.actor_rollout_ref.model.lora_rank > 0)
    assert "shrink" not in small
    check_config(small)
    check(small)


@fsdp
def test_the_tiny_model_is_of_the_same_kind(path):
    facts = model_facts(load(path).actor_rollout_ref.model.path)
    small = tiny_shape(facts)
    for key in ("model_type", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "rope_theta"):
        assert small[key] == facts[key]
    assert small["num_attention_heads"] / small["num_key_value_heads"] == (
        facts["num_attention_heads"] / facts["num_key_value_heads"]
    )
    assert small["hidden_size"] < 200 and small["num_hidden_layers"] == 2


def test_shrinking_a_fraction_and_the_baseline(tmp_path):
    path = FSDP_RECIPES[0]
    fraction = load(path, "+cpu=shrink", "algorithm.downsample_kwargs.keep=0.25", run_dir=tmp_path)
    assert fraction.actor_rollout_ref.rollout.n == 16 and fraction.algorithm.downsample_kwargs.keep == 0.25
    for n, small in ((64, 16), (16, 4)):  # as many rollouts, or as many updates, as with down-sampling
        plain = load(
            path,
            "+cpu=shrink",
            "algorithm.downsample=null",
            f"actor_rollout_ref.rollout.n={n}",
            run_dir=tmp_path,
        )
        assert plain.actor_rollout_ref.rollout.n == small
        check_model(plain)


def run(path: Path, tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    """Runs a shrunk recipe as a user does. Returns what each step reported."""
    ours = ("VERL_", "PODS_", "RAY_", "TRANSFER_QUEUE", "TQ_", "GLOO_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    words = ["train", "--config-dir", str(path.parent), "--config-name", path.stem, "--name", "shrunk"]
    result = subprocess.run(
        [
            str(Path(sys.executable).parent / "pods"),
            *words,
            "--runs-dir",
            str(tmp_path),
            "+cpu=shrink",
            *overrides,
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    log = tmp_path / "shrunk" / "train.log"
    assert result.returncode == 0, result.stdout + (log.read_text()[-3000:] if log.exists() else "")
    lines = (tmp_path / "shrunk" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


@pytest.mark.slow
@fsdp
def test_two_steps_of_verl(path, tmp_path):
    steps = run(path, tmp_path)
    config = OmegaConf.load(tmp_path / "shrunk" / "config.yaml")
    synchronous = config.trainer.v1.trainer_mode == "sync"
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    keep = config.algorithm.downsample_kwargs.keep
    with_updates = [step for step in steps if "actor/grad_norm" in step]
    assert len(with_updates) == 2
    for step in with_updates:
        assert step["downsample/generated"] == prompts * n and step["downsample/kept"] == prompts * keep
        assert math.isfinite(step["actor/grad_norm"]) and math.isfinite(step["actor/pg_loss"])
        # The rollout samples from the very weights that are trained; asynchronously, from some that are a little older.
        assert step["training/rollout_probs_diff_max"] < (1e-5 if synchronous else 1e-2)
        assert ("actor/kl_loss" in step) == config.actor_rollout_ref.actor.use_kl_loss
    # Rewards differed, and the update did something with it.
    assert any(
        step["downsample/group_variance/kept"] > 0 and step["actor/grad_norm"] > 0 for step in with_updates
    )
    assert any("val-core" in key for step in steps for key in step)
    assert (tmp_path / "shrunk" / "checkpoints" / "global_step_2" / "actor").is_dir()


@pytest.mark.slow
def test_lora_reaches_the_rollout(tmp_path):
    """At a learning rate that moves the policy: its log-probs still agree, so the adapters are in what was sent."""
    path = next(path for path in FSDP_RECIPES if "llama" in path.stem)
    steps = run(
        path,
        tmp_path,
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.clip_grad=1.0",
        "trainer.total_training_steps=4",
        "trainer.test_freq=-1",
    )
    assert (
        max(step["actor/kl_loss"] for step in steps) > 1e-2
    )  # far from the reference, which has no adapters
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in steps)
