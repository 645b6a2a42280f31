"""What a model's shape and the GPUs forbid, known before any worker starts: each problem is one clear line.

verl and its engines find these too, but minutes later, in a worker, with an assertion about one number. Facts about a
model come from its folder, or by its name on the hub from pods_plugin/planning/models; a model that is neither is not
checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

FACTS = Path(__file__).resolve().parent.parent / "planning" / "models"
VLLM_MAX_LORA_RANK = 512  # vllm.config.lora.MaxLoRARanks


class ModelError(ValueError):
    """A config that the model or the GPUs do not allow; its text is one line."""


def model_facts(path: str) -> dict[str, Any] | None:
    """The `config.json` of a model.

    Args:
        path: A folder with a config.json, or a name on the Hugging Face hub.

    Returns:
        Its content; None for a name on the hub that pods_plugin/planning/models does not have.
    """
    local = Path(path).expanduser() / "config.json"
    known = FACTS / f"{path.rsplit('/', 1)[-1]}.json"
    if local.is_file():
        return json.loads(local.read_text(encoding="utf-8"))
    if known.is_file():
        facts = json.loads(known.read_text(encoding="utf-8"))
        if facts["_name_or_path"] == path:
            return facts
    return None


def check_model(config: DictConfig) -> None:
    """Checks parallel sizes, lengths and batch sizes of a verl config against each other and against the model.

    Raises:
        ModelError: One line: what was given, what was expected, what to write instead.
    """
    facts = model_facts(str(config.actor_rollout_ref.model.path)) or {}
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if config.actor_rollout_ref.actor.strategy == "megatron":
        _check_megatron(config, facts, gpus)
    else:
        _check_fsdp(config, facts, gpus)
    _check_rollout(config, facts, gpus)
    _check_lengths(config, facts)
    _check_batches(config)


def _check_fsdp(config: DictConfig, facts: Mapping[str, Any], gpus: int) -> None:
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    size = OmegaConf.select(config, key, default=1) or 1
    _divides(size, gpus, key, f"{gpus} training GPUs")
    _divides(size, facts.get("num_attention_heads"), key, "{} attention heads of the model")


def _check_megatron(config: DictConfig, facts: Mapping[str, Any], gpus: int) -> None:
    key = "actor_rollout_ref.actor.megatron."
    megatron = config.actor_rollout_ref.actor.megatron
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context = megatron.get("context_parallel_size", 1)
    expert = megatron.get("expert_model_parallel_size", 1)
    expert_tensor = megatron.get("expert_tensor_parallel_size") or tensor
    virtual = megatron.get("virtual_pipeline_model_parallel_size") or 1
    if gpus % (tensor * pipeline * context):
        raise ModelError(
            f"{key}tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline} x "
            f"context_parallel_size={context} = {tensor * pipeline * context} does not divide the {gpus} training "
            "GPUs; choose sizes whose product does"
        )
    _divides(
        tensor, facts.get("num_attention_heads"), f"{key}tensor_model_parallel_size", "{} attention heads"
    )
    _divides(
        tensor, facts.get("num_key_value_heads"), f"{key}tensor_model_parallel_size", "{} key-value heads"
    )
    _divides(
        tensor, facts.get("vocab_size"), f"{key}tensor_model_parallel_size", "{} tokens of the vocabulary"
    )
    _divides(
        pipeline * virtual, facts.get("num_hidden_layers"), f"{key}pipeline_model_parallel_size", "{} layers"
    )
    experts = facts.get("num_experts") or facts.get("num_local_experts")
    if expert > 1 and facts and experts is None:
        raise ModelError(
            f"{key}expert_model_parallel_size={expert}, and {config.actor_rollout_ref.model.path} has no experts; "
            "write 1"
        )
    _divides(expert, experts, f"{key}expert_model_parallel_size", "{} experts")
    if (gpus // pipeline) % (expert * expert_tensor):
        raise ModelError(
            f"{key}expert_model_parallel_size={expert} x expert_tensor_parallel_size={expert_tensor} does not divide "
            f"the {gpus // pipeline} GPUs of a pipeline stage; choose sizes whose product does"
        )
    if experts and tensor > 1 and not megatron.sequence_parallel:
        raise ModelError(
            f"{key}sequence_parallel=False with experts and tensor_model_parallel_size={tensor}, which Megatron "
            "refuses; write True"
        )


def _check_rollout(config: DictConfig, facts: Mapping[str, Any], gpus: int) -> None:
    rollout = config.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    tensor = rollout.tensor_model_parallel_size
    size = tensor * rollout.get("data_parallel_size", 1) * rollout.get("pipeline_model_parallel_size", 1)
    if rollout.name == "hf":  # one process, whatever the sizes
        return
    _divides(size, gpus, f"{key} x data_parallel_size", f"{gpus} GPUs")
    _divides(tensor, facts.get("num_attention_heads"), key, "{} attention heads")
    heads = facts.get("num_key_value_heads")
    if heads and heads % tensor and tensor % heads:
        raise ModelError(
            f"{key}={tensor} neither divides the {heads} key-value heads of the model nor is a multiple of them; "
            f"write {_divisor(heads, tensor)}"
        )
    if config.trainer.v1.trainer_mode == "separate_async":
        own = rollout.nnodes * rollout.n_gpus_per_node
        if own < 1:
            raise ModelError(
                "trainer.v1.trainer_mode=separate_async generates on GPUs of its own, and "
                "actor_rollout_ref.rollout.nnodes is 0; write 1 or more"
            )
        _divides(size, own, f"{key} x data_parallel_size", f"{own} GPUs of the rollout")
    rank = config.actor_rollout_ref.model.get("lora_rank", 0)
    if rollout.name == "vllm" and rank > VLLM_MAX_LORA_RANK:
        raise ModelError(
            f"actor_rollout_ref.model.lora_rank={rank} is more than vLLM serves; write {VLLM_MAX_LORA_RANK} or less"
        )


def _check_lengths(config: DictConfig, facts: Mapping[str, Any]) -> None:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = facts.get("max_position_embeddings")
    if longest and prompt + response > longest:
        raise ModelError(
            f"data.max_prompt_length={prompt} + max_response_length={response} is more than the {longest} positions "
            f"of the model; write data.max_response_length={max(1, longest - prompt)} or less"
        )
    limit = config.actor_rollout_ref.rollout.max_model_len
    if limit is not None and prompt + response > limit:
        raise ModelError(
            f"data.max_prompt_length={prompt} + max_response_length={response} is more than "
            f"actor_rollout_ref.rollout.max_model_len={limit}; write {prompt + response}"
        )
    actor = config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz:
        return
    split = OmegaConf.select(config, "actor_rollout_ref.actor.ulysses_sequence_parallel_size", default=1) or 1
    if actor.strategy == "megatron":
        split = actor.megatron.get("context_parallel_size", 1)
    if actor.ppo_max_token_len_per_gpu * split < prompt + response:
        raise ModelError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} does not hold one "
            f"sequence of max_prompt_length={prompt} + max_response_length={response} tokens over {split} GPUs; "
            f"write {-(-(prompt + response) // split)} or more"
        )


def _check_batches(config: DictConfig) -> None:
    prompts, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    trainer = config.trainer.v1
    if trainer.trainer_mode == "separate_async":
        steps = trainer.separate_async.parameter_sync_step
        if prompts != steps * mini:
            raise ModelError(
                f"data.train_batch_size={prompts} must be trainer.v1.separate_async.parameter_sync_step={steps} x "
                f"actor.ppo_mini_batch_size={mini}; write data.train_batch_size={steps * mini}"
            )
        if config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive":
            raise ModelError(
                "trainer.v1.trainer_mode=separate_async sends weights to other GPUs, and "
                "rollout.checkpoint_engine.backend=naive does not; write nccl"
            )
    elif mini > prompts:
        raise ModelError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} is more than data.train_batch_size={prompts}; "
            f"write {prompts} or a divisor of it"
        )
    elif prompts % mini:
        raise ModelError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={prompts}: "
            f"verl would fill the last mini-batch up with dummy rows; write {_divisor(prompts, mini)}"
        )


def _divides(size: int, whole: int | None, key: str, what: str) -> None:
    """Raises unless `size` divides `whole`; an unknown whole passes."""
    if size < 1:
        raise ModelError(f"{key}={size} is not a positive number; write 1 or more")
    if whole and whole % size:
        raise ModelError(
            f"{key}={size} does not divide the {what.format(whole)}; write {_divisor(whole, size)}"
        )


def _divisor(whole: int, near: int) -> int:
    """The divisor of `whole` nearest to `near`, the smaller of two."""
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - near), d))
