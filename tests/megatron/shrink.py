"""A Megatron recipe at a size for a CPU: its own settings, few ranks, few parameters, few tokens."""

from __future__ import annotations

import math
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tests.recipes.recipes import load

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
ROWS, PROMPT, RESPONSE = 8, 8, 8


def shrink(recipe: Path, folder: Path, *overrides: str, limit: int) -> DictConfig:
    """The recipe's config for an engine check, with parallel sizes of at most `limit`.

    What is changed, and all that is: the model; the parallel sizes; the tokens of a micro-batch, so that there are
    several; float32, in which runs can be compared; a learning rate that shows in three steps; no offloading, which has
    nowhere to go; mbridge instead of Megatron-Bridge, which imports a GPU's packages.

    Args:
        recipe: A file of recipes/megatron.
        folder: Where the model is, see small_model.
        overrides: For the recipe.
        limit: 1 for a single process, 2 for the check.
    """
    config = load(recipe, *overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    config.actor_rollout_ref.model.path = str(folder / "model")
    megatron = actor.megatron
    for key in PARALLEL:
        megatron[key] = min(megatron[key], limit)
    if megatron.expert_tensor_parallel_size is not None:  # null: as tensor_model_parallel_size
        megatron.expert_tensor_parallel_size = min(megatron.expert_tensor_parallel_size, limit)
    megatron.dtype = "float32"
    megatron.vanilla_mbridge = True
    megatron.param_offload = megatron.optimizer_offload = False
    actor.ppo_mini_batch_size = ROWS
    tokens = 2 * (PROMPT + RESPONSE)
    actor.ppo_max_token_len_per_gpu = rollout.log_prob_max_token_len_per_gpu = tokens
    if not actor.use_dynamic_bsz:
        actor.ppo_micro_batch_size_per_gpu = rollout.log_prob_micro_batch_size_per_gpu = 2
    actor.optim.lr = 1e-4
    actor.optim.lr_warmup_steps = 0
    actor.optim.total_training_steps = 100
    OmegaConf.resolve(config)
    return config


def ranks(config: DictConfig) -> int:
    """The fewest processes that the parallel sizes of a config can be laid out on."""
    megatron = config.actor_rollout_ref.actor.megatron
    tensor, pipeline, expert = (megatron[key] for key in PARALLEL)
    expert_tensor = megatron.expert_tensor_parallel_size or tensor
    return pipeline * math.lcm(tensor, expert * expert_tensor)


def small_model(recipe: Path, folder: Path) -> None:
    """Write into `folder`/model a small model of the same architecture as the recipe's, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pods_plugin.cpu.models import build_tiny_model
    from pods_plugin.cpu.shrink import tiny_shape
    from pods_plugin.integration.model_checks import model_facts

    build_tiny_model(folder / "model", layers=1)  # for its tokenizer, of 258 tokens
    config = load(recipe).actor_rollout_ref
    facts = model_facts(config.model.path)
    assert facts is not None, f"pods_plugin/planning/models has no facts of {config.model.path}"
    stages = min(2, config.actor.megatron.pipeline_model_parallel_size)
    shape = tiny_shape(facts, layers=2 * stages) | {"vocab_size": 258, "eos_token_id": 1, "pad_token_id": 0}
    for key in ("_name_or_path", "architectures", "torch_dtype", "bos_token_id"):
        shape.pop(key, None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # No weight, bias or norm at a value that hides where it goes.
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
