"""`+cpu=shrink`: a recipe for GPUs made small enough to run on a machine without one.

Replaced: the GPUs (by the embedded default), vLLM (by the `hf` rollout), the model (by a random one of the same
architecture with a byte tokenizer), the data (by procedural problems of the same environments), the weight transfer
of `separate_async` (by one over gloo), the loggers.
Scaled down: GPUs to at most two training processes, prompts, lengths and the token budget, and n and m by one factor.
Left as they are: algorithm, loss, advantages, KL, LoRA, optimizer and learning rate, mini-batches a step, the
down-sampling rule with its settings, dynamic batches, trainer mode, validation, checkpoints.
Left out, because they need a GPU or more of them: sequence parallelism, offloading, gradient checkpointing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

EMBEDDED = Path(__file__).resolve().parent.parent / "config" / "cpu" / "embedded.yaml"
_HEAD_DIM = 8


def shrink(config: DictConfig, facts: Mapping[str, Any] | None) -> DictConfig:
    """The config of a recipe, shrunk.

    Args:
        config: What was composed from a recipe and config/cpu/shrink.yaml.
        facts: The `config.json` of the recipe's model.

    Returns:
        A config of its own, for two steps of verl on this machine.

    Raises:
        ValueError: A recipe that cannot be shrunk; the message says why.
    """
    small = config.shrink
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        raise ValueError(
            "+cpu=shrink takes FSDP recipes; Megatron needs CUDA (tests/megatron goes as far as it gets)"
        )
    if facts is None:
        raise ValueError(
            f"+cpu=shrink knows no shape of the model {config.actor_rollout_ref.model.path}; give a folder with its "
            "config.json"
        )
    for split in ("train", "val"):
        if config.env_ids[split] is None:
            raise ValueError(f"+cpu=shrink needs env_ids.{split}, the environment that makes the data")

    workers = min(small.workers, config.trainer.nnodes * config.trainer.n_gpus_per_node)
    mini = min(small.prompts, actor.ppo_mini_batch_size)
    prompts = mini * max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    n, keep = _rollouts(config)
    tokens = small.max_prompt_length + small.max_response_length
    room = actor.ppo_max_token_len_per_gpu / (config.data.max_prompt_length + config.data.max_response_length)
    own_gpus = 0  # of the rollout
    env_kwargs = {"source": "procedural", "size": prompts, "prompt_template": "{question}"}

    changes: dict[str, Any] = {
        "data": {
            "train_files": "${run_dir}/data/train.parquet",
            "val_files": "${run_dir}/data/val/test.parquet",
            "train_batch_size": prompts,
            "max_prompt_length": small.max_prompt_length,
            "max_response_length": small.max_response_length,
        },
        "algorithm": {"downsample_kwargs": {"keep": keep}},
        "actor_rollout_ref": {
            "model": {
                "path": "${run_dir}/model",
                # the hf rollout has no adapters: it takes the merged weights
                "lora": {"merge": config.actor_rollout_ref.model.lora_rank > 0},
            },
            "actor": {
                "ppo_mini_batch_size": mini,
                "ppo_max_token_len_per_gpu": round(room * tokens),
                "ulysses_sequence_parallel_size": 1,
                "fsdp_config": {"param_offload": False, "optimizer_offload": False},
            },
            "ref": {"fsdp_config": {"param_offload": False}},
            "rollout": {"n": n, "data_parallel_size": 1, "max_num_seqs": 128},
        },
        "trainer": {
            "n_gpus_per_node": workers,
            "total_training_steps": small.steps,
            "total_epochs": 10**6,
            "test_freq": small.steps,
            "save_freq": small.steps,
            "val_before_train": False,
            "logger": ["console", "file"],
        },
        "prepare": {
            "data": _parquet(config.env_ids.train, "${run_dir}/data", {"train": None}, env_kwargs),
            "val_data": _parquet(
                config.env_ids.val, "${run_dir}/data/val", {"test": None}, {**env_kwargs, "size": 4}
            ),
            "model": {
                "_target_": "pods_plugin.cpu.shrink.tiny_model_like",
                "path": "${run_dir}/model",
                "facts": dict(facts),
                "env_id": config.env_ids.train,
                "env_kwargs": env_kwargs,
                "layers": small.layers,
                "warm_up_steps": small.warm_up_steps,
                "seed": "${seed}",
            },
        },
    }
    if config.trainer.v1.trainer_mode == "separate_async":
        own_gpus = 1
        changes["actor_rollout_ref"]["rollout"] |= {
            "nnodes": 1,
            "n_gpus_per_node": own_gpus,
            "checkpoint_engine": {
                "backend": "gloo",
                "custom_backend_module": "pods_plugin.cpu.checkpoint_engine",
            },
        }
    shrunk = OmegaConf.merge(config, OmegaConf.load(EMBEDDED), changes)
    assert isinstance(shrunk, DictConfig)
    shrunk.ray_kwargs.ray_init.num_gpus = workers + own_gpus
    del shrunk["shrink"]  # done: resuming must not shrink it again
    return shrunk


def _rollouts(config: DictConfig) -> tuple[int, Any]:
    """n and `keep`, scaled down by one factor; without down-sampling n still goes by the recipe's `keep`."""
    n, keep = config.actor_rollout_ref.rollout.n, config.algorithm.downsample_kwargs.keep
    most = config.shrink.keep
    if keep is None:
        return min(n, most), keep
    if isinstance(keep, float):
        return max(2, round(most / keep)), keep
    small = min(keep, most)
    return max(small, round(n * small / keep)), small


def _parquet(
    env_id: str, out: str, sizes: Mapping[str, Any], env_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "_target_": "pods_plugin.integration.data.write_parquet",
        "env_id": env_id,
        "out": out,
        "sizes": dict(sizes),
        "env_kwargs": dict(env_kwargs),
    }


def tiny_shape(facts: Mapping[str, Any], *, layers: int = 2) -> dict[str, Any]:
    """A `config.json` of the same architecture with small numbers.

    Kept: the type, tied or untied embeddings, rotary base, norms, and the proportions of the attention: query heads
    a key-value head, width of all heads to width of the model. Experts: 8 at most, 2 of them active.

    Args:
        facts: The `config.json` of the large model.
        layers: Transformer blocks.
    """
    heads, groups = facts["num_attention_heads"], facts["num_key_value_heads"]
    head_dim = facts.get("head_dim") or facts["hidden_size"] // heads
    small_groups = min(2, groups)
    small_heads = heads // groups * small_groups
    hidden = small_heads * _HEAD_DIM * facts["hidden_size"] // (heads * head_dim)
    shape = {
        **facts,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_groups,
        "max_position_embeddings": 2048,
    }
    if "head_dim" in facts:
        shape["head_dim"] = _HEAD_DIM
    if "num_experts" in facts:
        shape |= {
            "num_experts": min(8, facts["num_experts"]),
            "num_experts_per_tok": min(2, facts["num_experts_per_tok"]),
            "moe_intermediate_size": hidden,
        }
    return shape


def tiny_model_like(
    path: str | Path,
    facts: Mapping[str, Any],
    env_id: str,
    *,
    env_kwargs: Mapping[str, Any],
    layers: int = 2,
    warm_up_steps: int = 60,
    seed: int = 0,
) -> float:
    """Write a tiny model of the architecture in `facts` that guesses among the answers of an environment.

    Args:
        path: The folder; made if absent.
        facts: The `config.json` of the large model.
        env_id: A gymnasium id whose environment is a `pods_envs.ReasoningEnv`.
        env_kwargs: Passed to `gymnasium.make`.
        layers: Transformer blocks.
        warm_up_steps: Updates on pairs of a question and the answer to any of the questions, in the form that the
            environment wants: the right answer is then one guess of as many as there are questions. A random model
            never gets one right, and a step whose rewards are all equal tests nothing.
        seed: Of weights and pairs.

    Returns:
        The last loss of the warm-up.
    """
    import gymnasium
    import pods_envs  # noqa: F401  registers the ids
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from pods_plugin.cpu.models import _no_progress_bars, build_tiny_model, warm_up

    build_tiny_model(path, seed=seed)  # for its tokenizer; the model is replaced
    tokenizer = AutoTokenizer.from_pretrained(path)
    shape = tiny_shape(facts, layers=layers)
    for key in ("_name_or_path", "architectures", "torch_dtype", "bos_token_id"):
        shape.pop(key, None)
    config = AutoConfig.for_model(
        **shape
        | {
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with _no_progress_bars():
        model.save_pretrained(path)

    env: Any = gymnasium.make(env_id, **dict(env_kwargs)).unwrapped
    draw = random.Random(seed)
    pairs = [
        (env.messages(problem)[-1]["content"], env.reference_response(draw.choice(env.problems)))
        for problem in env.problems
        for _ in range(8)
    ]
    return warm_up(path, pairs, steps=warm_up_steps, batch_size=8, lr=3e-3, seed=seed)
