"""What can be known of a down-sampled run before any worker starts: each problem is one clear line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from omegaconf import DictConfig, ListConfig, OmegaConf

from pods_plugin.downsampling import DownsampleConfig, DownsampleError

SUPPORTED_MODES = ("sync", "colocate_async", "separate_async")
KEYS = ("downsample", "downsample_kwargs")


def parse(config: DictConfig) -> DownsampleConfig | None:
    """The down-sampling settings of a verl config; None when it is off.

    Raises:
        DownsampleError: They are wrong.
    """
    algorithm = config.algorithm
    for key in algorithm:
        if key not in KEYS and difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.8):
            nearest = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.8)[0]
            raise DownsampleError(
                f"algorithm.{key} is no setting of verl or verl-pods; write algorithm.{nearest}"
            )
    kwargs = algorithm.get("downsample_kwargs")
    if isinstance(kwargs, DictConfig):
        kwargs = OmegaConf.to_container(kwargs, resolve=True)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise DownsampleError(
            f"algorithm.downsample_kwargs={kwargs!r} is not a mapping; write algorithm.downsample_kwargs.keep=16"
        )
    return DownsampleConfig.from_mapping(
        algorithm.get("downsample"), kwargs, config.actor_rollout_ref.rollout.n
    )


def check_config(config: DictConfig) -> DownsampleConfig | None:
    """Checks the settings of verl-pods in a verl config against the rest of it.

    Returns:
        The down-sampling settings; None when it is off (then only those of the agent loop are checked).

    Raises:
        DownsampleError: One line: what was given, what was expected, what to write instead.
    """
    _check_agent_loop(config)
    settings = parse(config)
    if settings is None:
        return None
    trainer = config.trainer
    if not trainer.get("use_v1", False):
        raise DownsampleError(
            "algorithm.downsample needs verl's V1 trainer, and trainer.use_v1 is False; write trainer.use_v1=True"
        )
    mode = trainer.v1.trainer_mode
    if mode not in SUPPORTED_MODES:
        raise DownsampleError(
            f"algorithm.downsample does not support trainer.v1.trainer_mode={mode}; "
            f"write one of {', '.join(SUPPORTED_MODES)}"
        )
    if OmegaConf.select(config, "skip.rollout_tq.enable", default=False):
        raise DownsampleError(
            "skip.rollout_tq replays recorded rollouts and counts on rollout.n of them, which down-sampling changes; "
            "write skip.rollout_tq.enable=False or algorithm.downsample=null"
        )
    _check_advantage(config, settings)
    _check_divisibility(config, settings)
    return settings


def _check_agent_loop(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    agent = rollout.get("agent") or {}
    name = str(agent.get("default_agent_loop"))
    if name != "pods_env":
        near_miss = difflib.get_close_matches(name, ["pods_env"], n=1, cutoff=0.7)
        if near_miss and agent.get("agent_loop_config_path") is None:  # such a file may register any name
            raise DownsampleError(
                f"actor_rollout_ref.rollout.agent.default_agent_loop={name} is no agent loop; write pods_env"
            )
        return
    # Here, not at the top: single-turn runs need none of it.
    from pods_plugin.integration.episodes import EpisodeSettings, check_files

    if not config.trainer.get("use_v1", False):
        raise DownsampleError(
            "the agent loop pods_env needs verl's V1 trainer, and trainer.use_v1 is False; write trainer.use_v1=True"
        )
    files = [config.data.get("train_files"), config.data.get("val_files")]
    paths = [
        path for value in files for path in (value if isinstance(value, ListConfig) else [value]) if path
    ]
    try:
        EpisodeSettings.of(rollout.get("custom"))
        check_files(paths)
    except ValueError as error:
        raise DownsampleError(str(error)) from None


def _check_advantage(config: DictConfig, settings: DownsampleConfig) -> None:
    estimator = config.algorithm.adv_estimator
    if estimator == "gdpo":
        raise DownsampleError(
            "algorithm.adv_estimator=gdpo does not run in verl's V1 trainer, which hands no reward components to it; "
            "write algorithm.adv_estimator=grpo"
        )
    if settings.advantage_stats == "group":
        if estimator != "grpo":
            raise DownsampleError(
                f"algorithm.downsample_kwargs.advantage_stats=group is defined for adv_estimator=grpo, "
                f"not for {estimator}; write advantage_stats=kept"
            )
        if config.algorithm.get("use_kl_in_reward", False):
            raise DownsampleError(
                "algorithm.downsample_kwargs.advantage_stats=group needs rewards without KL, since dropped rollouts "
                "have no log-probs; write algorithm.use_kl_in_reward=False or advantage_stats=kept"
            )


def data_parallel_size(config: DictConfig) -> int:
    """Replicas of the actor that share a mini-batch: all GPUs divided by the model-parallel ones."""
    actor = config.actor_rollout_ref.actor
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if actor.strategy == "megatron":
        megatron = actor.megatron
        parallel = (
            megatron.tensor_model_parallel_size
            * megatron.pipeline_model_parallel_size
            * megatron.get("context_parallel_size", 1)
        )
    else:
        parallel = (
            OmegaConf.select(config, "actor_rollout_ref.actor.ulysses_sequence_parallel_size", default=1) or 1
        )
    return max(1, gpus // parallel)


def _check_divisibility(config: DictConfig, settings: DownsampleConfig) -> None:
    """verl cuts a mini-batch into equal shares for the workers; n no longer counts there, m does."""
    actor = config.actor_rollout_ref.actor
    dp = data_parallel_size(config)
    rows = actor.ppo_mini_batch_size * settings.keep
    if rows % dp:
        raise DownsampleError(
            f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} prompts x keep={settings.keep} rollouts = {rows} "
            f"rows do not divide over {dp} data-parallel workers; choose them so that their product is a multiple "
            f"of {dp}"
        )
    if actor.use_dynamic_bsz:
        return
    micro = actor.get("ppo_micro_batch_size_per_gpu")
    if micro and (rows // dp) % micro:
        raise DownsampleError(
            f"actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {rows // dp} rows that each of {dp} "
            f"workers gets of a mini-batch (ppo_mini_batch_size={actor.ppo_mini_batch_size} x keep={settings.keep}); "
            f"write a divisor of {rows // dp}, or actor.use_dynamic_bsz=True"
        )
