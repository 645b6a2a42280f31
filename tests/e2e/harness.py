"""Real trainers on real workers, with rollouts that a test puts into TransferQueue itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from pods_plugin.cli.compose import compose


def make_config(folder: Path, *overrides: str) -> DictConfig:
    """A resolved verl config of a tiny run whose model and data lie in `folder` (see the fixture `tiny`)."""
    config = compose(
        None,
        "pods_trainer",
        [
            "+cpu=embedded",
            f"run_dir='{folder}'",
            "run_name=test",
            f"actor_rollout_ref.model.path='{folder}/model'",
            f"data.train_files='{folder}/data/train.parquet'",
            f"data.val_files='{folder}/data/test.parquet'",
            "data.train_batch_size=4",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            "data.seed=0",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            "reward.custom_reward_function.path=pkg://pods_plugin.integration.reward",
            "reward.custom_reward_function.name=compute_score",
            "trainer.resume_mode=disable",
            "trainer.val_before_train=False",
            "trainer.logger=[]",
            *overrides,
        ],
    )
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def make_trainer(config: DictConfig) -> Any:
    """verl's trainer class for the config, initialised: workers, rollout server, reward workers."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    trainer.init()
    trainer.global_steps = 1
    trainer.timing_raw = {}
    trainer.curr_step_profile = False
    return trainer


def as_plain(trainer: Any, config: DictConfig) -> Any:
    """verl's own trainer class, without the plugin's mixin, on the workers of `trainer` and a config of its own."""
    from verl.trainer.ppo.v1 import PPOTrainerSync

    plain = object.__new__(PPOTrainerSync)
    plain.__dict__.update(trainer.__dict__)
    plain.config = copy.deepcopy(config)
    with open_dict(plain.config):  # what _init_dataloader adds
        plain.config.actor_rollout_ref.actor.optim = trainer.config.actor_rollout_ref.actor.optim
    return plain


def fit(trainer: Any, each_step: Callable[[int], None] | None = None) -> list[StepRecord]:
    """verl's `fit`, with generation, for `config.trainer.total_training_steps` steps.

    Args:
        each_step: Called with the number of a step before it begins.

    Returns:
        What each step reported and moved.
    """
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    manager = AgentLoopManagerTQ.create(
        config=trainer.config,
        llm_client=trainer.get_llm_client(),
        teacher_client=trainer.get_teacher_client(),
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    records: list[StepRecord] = []
    on_step_begin, sample, compute_metrics = (
        trainer.on_step_begin,
        trainer.replay_buffer.sample,
        trainer._compute_metrics,
    )

    def recording_begin() -> None:
        left = {key for keys in (tq.kv_list() or {}).values() for key in keys}
        records.append(StepRecord(queue_before=left))
        if each_step is not None:
            each_step(trainer.global_steps)
        on_step_begin()

    def recording_sample(*args: Any, **kwargs: Any) -> Any:
        batch, metrics = sample(*args, **kwargs)
        if records:
            records[-1].sampled.setdefault(kwargs["partition_id"], []).append(len(batch.keys))
        return batch, metrics

    def recording_metrics(batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        compute_metrics(batch, metrics, *args, **kwargs)
        records[-1].trained = len(batch.keys)
        records[-1].padding = sum(tag.get("is_padding", False) for tag in batch.tags)
        records[-1].metrics = dict(metrics)

    trainer.on_step_begin = recording_begin
    trainer.replay_buffer.sample = recording_sample
    trainer._compute_metrics = recording_metrics
    trainer.global_steps = 0
    trainer.on_init_end()
    try:
        trainer.fit(manager)
    finally:
        for worker in manager.agent_loop_workers:
            ray.kill(worker)
        del trainer.on_step_begin, trainer._compute_metrics, trainer.replay_buffer.sample
    return records


@dataclasses.dataclass
class StepRecord:
    """What one step of `fit` reported and moved."""

    queue_before: set[str]
    sampled: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # partition -> rows
    trained: int = 0
    padding: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


def finish_groups(uids: Sequence[str], step: int = 1) -> None:
    """Marks the prompts of the rollouts in the queue as finished, as the agent loop does."""
    import transfer_queue as tq

    tags = [{"is_prompt": True, "status": "finished", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)


def run_step(trainer: Any, uids: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """verl's `_step_once` on the rollouts that are in the queue. Returns its metrics and the batch trained on."""
    metrics: dict[str, Any] = {}
    finish_groups(uids)
    batch = trainer._step_once(metrics, trainer.timing_raw, len(uids))
    return metrics, batch


def set_loss(trainer: Any, **actor: Any) -> None:
    """Gives the workers' loss other settings of the actor, such as loss_agg_mode."""
    from functools import partial

    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    config = copy.deepcopy(trainer.config.actor_rollout_ref.actor)
    with open_dict(config):
        config.update(actor)
        config.rollout_n = trainer.config.actor_rollout_ref.rollout.n
    actor_config = omega_conf_to_dataclass(config)
    trainer.actor_rollout_wg.set_loss_fn(partial(ppo_loss, config=actor_config))


@contextmanager
def running(config: DictConfig) -> Iterator[Any]:
    """A trainer whose workers end with the block."""
    trainer = make_trainer(config)
    try:
        yield trainer
    finally:
        shut_down(trainer)


def shut_down(trainer: Any) -> None:
    """Ends the workers, so that the cluster's slots are free for the next trainer."""
    if trainer._watchdog is not None:
        trainer._watchdog.stop()  # it would end this process when the workers go
    handles = [*trainer.actor_rollout_wg.workers, *(trainer.get_reward_handles() or [])]
    for replica in trainer.llm_server_manager.get_replicas():
        handles += replica.servers
    for handle in handles:
        ray.kill(handle)
    for pool in trainer.resource_pool_manager.resource_pool_dict.values():
        for group in pool.pgs or []:
            ray.util.remove_placement_group(group)


def gradient_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What must agree between two runs that train on the same rollouts."""
    names = (
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/kl_loss",
    )
    return {name: float(torch.as_tensor(metrics[name]).float().mean()) for name in names if name in metrics}
