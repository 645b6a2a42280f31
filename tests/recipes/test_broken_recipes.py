"""A recipe broken on purpose ends `pods train --dry-run` with one line that says what to write instead."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from pods_plugin.cli.compose import LaunchError
from pods_plugin.cli.train import train
from tests.recipes.recipes import FOLDER, load
from tests.recipes.test_recipes import dry_run

LORA = FOLDER / "fsdp" / "gsm8k_qwen2.5_3b_lora_1gpu.yaml"
FULL = FOLDER / "fsdp" / "gsm8k_qwen2.5_3b_8gpu.yaml"
ULYSSES = FOLDER / "fsdp" / "math_qwen2.5_32b_32gpu.yaml"
ASYNC = FOLDER / "fsdp" / "math_qwen2.5_7b_16gpu_async.yaml"
DENSE = FOLDER / "megatron" / "math_qwen2.5_7b_8gpu.yaml"
PIPELINE = FOLDER / "megatron" / "math_qwen2.5_32b_32gpu.yaml"
MOE = FOLDER / "megatron" / "math_qwen3_30b_a3b_64gpu.yaml"

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MEGATRON = f"{ACTOR}megatron."
CASES = [
    (LORA, ["algorithm.downsample_kwargs.keep=65"], "keep=65 .*64"),
    (LORA, ["algorithm.downsample=max_varianse"], "max_varianse.*max_variance"),
    (LORA, [f"{ACTOR}ppo_mini_batch_size=3"], "ppo_mini_batch_size=3 does not divide .*=8.*write 2"),
    (LORA, [f"{ACTOR}ppo_mini_batch_size=16"], "ppo_mini_batch_size=16 is more than .*=8; write 8"),
    (
        FULL,
        [f"{ACTOR}ppo_mini_batch_size=1", "algorithm.downsample_kwargs.keep=12"],
        "12 rows .*8 data-parallel",
    ),
    (
        FULL,
        [f"{ACTOR}use_dynamic_bsz=false", f"{ACTOR}ppo_micro_batch_size_per_gpu=7"],
        "ppo_micro_batch_size_per_gpu=7 does not divide the 64 rows",
    ),
    (
        FULL,
        [f"{ROLLOUT}tensor_model_parallel_size=3"],
        "tensor_model_parallel_size.*=3 does not divide .*8 GPUs",
    ),
    (
        ULYSSES,
        [f"{ACTOR}ulysses_sequence_parallel_size=16"],
        "=16 does not divide the 40 attention heads.*write 20",
    ),
    (ULYSSES, [f"{ACTOR}ppo_max_token_len_per_gpu=512"], "512 does not hold .*write 768 or more"),
    (LORA, ["data.max_response_length=40000"], "more than the 32768 positions.*write .*32256"),
    (LORA, ["actor_rollout_ref.model.lora_rank=1024"], "lora_rank=1024 is more than vLLM serves; write 512"),
    (
        DENSE,
        [f"{MEGATRON}tensor_model_parallel_size=8"],
        "tensor_model_parallel_size=8 does not divide the 28 .*write 7",
    ),
    (DENSE, [f"{MEGATRON}tensor_model_parallel_size=3"], "= 3 does not divide the 8 training GPUs"),
    (
        PIPELINE,
        [f"{MEGATRON}pipeline_model_parallel_size=2", f"{MEGATRON}virtual_pipeline_model_parallel_size=3"],
        "does not divide the 64 layers",
    ),
    (
        MOE,
        [f"{MEGATRON}expert_model_parallel_size=5"],
        "expert_model_parallel_size=5 does not divide the 128 experts",
    ),
    (MOE, [f"{MEGATRON}sequence_parallel=false"], "sequence_parallel=False with experts"),
    (DENSE, [f"{MEGATRON}expert_model_parallel_size=2"], "has no experts; write 1"),
    (
        MOE,
        [f"{MEGATRON}expert_tensor_parallel_size=16"],
        "x expert_tensor_parallel_size=16 does not divide the 64",
    ),
    (
        ASYNC,
        ["data.train_batch_size=128"],
        "train_batch_size=128 must be .*=4 x .*=16; write data.train_batch_size=64",
    ),
    (ASYNC, [f"{ROLLOUT}nnodes=0"], "generates on GPUs of its own.*write 1 or more"),
    (ASYNC, [f"{ROLLOUT}checkpoint_engine.backend=naive"], "backend=naive does not; write nccl"),
    (LORA, [f"{ACTOR}ppo_minibatch_size=4"], "Could not override .*nearest: .*actor.ppo_mini_batch_size"),
    (
        LORA,
        ["data.train_files=nowhere.parquet"],
        r"nowhere.parquet does not exist.*pods data pods/GSM8K-v0 --out",
    ),
    (LORA, ["actor_rollout_ref.model.path=./nowhere"], "nowhere is no folder"),
    (DENSE, ["+cpu=shrink"], r"\+cpu=shrink takes FSDP recipes"),
]


def refused(path: Path, tmp_path: Path, *overrides: str) -> str:
    """The line with which a dry run of a recipe ends; its data is there."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()
    data = [f"data.train_files='{tmp_path}/train.parquet'", f"data.val_files='{tmp_path}/test.parquet'"]
    with pytest.raises(LaunchError) as error:
        train(
            path.parent,
            path.stem,
            [*data, *overrides],
            name=None,
            runs_dir=tmp_path / "runs",
            resume=None,
            dry_run=True,
            console=Console(file=io.StringIO()),
        )
    assert not (tmp_path / "runs").exists()
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    ("path", "overrides", "expected"), CASES, ids=lambda value: getattr(value, "stem", None)
)
def test_one_line(path, overrides, expected, tmp_path):
    message = refused(path, tmp_path, *overrides)
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        (
            {"actor_rollout_ref": {"actor": {"ppo_minibatch_size": 4}}},
            "actor_rollout_ref.actor.ppo_mini_batch_size",
        ),
        ({"actor_rollout_ref": {"actor": {"fsdp_config": {"mixed_precison": {}}}}}, "mixed_precision"),
        ({"algorithm": {"downsample_kwargs": {"kep": 4}}}, "algorithm.downsample_kwargs.keep"),
        ({"actor_rolout_ref": {}}, "actor_rollout_ref"),
        ({"trainer": {"entirely_new": 1}}, None),
    ],
)
def test_unknown_key_in_the_file(wrong, nearest, tmp_path):
    content = OmegaConf.merge(OmegaConf.load(LORA), wrong)
    folder = tmp_path / "recipes" / "fsdp"
    folder.mkdir(parents=True)
    (tmp_path / "recipes" / "_base").symlink_to(FOLDER / "_base")
    OmegaConf.save(content, folder / "broken.yaml")
    message = refused(folder / "broken.yaml", tmp_path)
    assert "is no key of verl or verl-pods" in message
    assert message.endswith(f"{nearest}") if nearest else "nearest" not in message


def test_a_key_added_on_the_command_line_is_the_users_own_affair():
    config = load(LORA, "+trainer.mine=1", "+data.mine.too=2")
    assert (config.trainer.mine, config.data.mine.too) == (1, 2)


def test_what_only_verl_finds_is_one_line_too(tmp_path):
    message = refused(LORA, tmp_path, f"{ACTOR}loss_agg_mode=mean-of-means")
    assert message.startswith("verl refuses this config: ") and "mean-of-means" in message


def test_on_the_screen_it_is_one_line(tmp_path):
    result = dry_run(DENSE, tmp_path, f"{MEGATRON}tensor_model_parallel_size=8")
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("pods: ")
