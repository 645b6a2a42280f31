"""The down-sampling trainers: one mixin over each of verl's V1 trainers, under their own names.

The names must stay (`sync`, `colocate_async`, `separate_async`): verl compares them in several places, and existing
configs use them. So the registry entries are replaced by subclasses; without `algorithm.downsample` a subclass does
nothing of its own.
"""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.utils.padding import response_to_nested

from pods_plugin.downsampling import DownsampleConfig
from pods_plugin.downsampling.metrics import SUMS
from pods_plugin.integration.checks import SUPPORTED_MODES, parse
from pods_plugin.integration.stage import downsample


class DownsamplingMixin:
    """Generates n rollouts per prompt, and lets verl see the m kept ones only, everywhere after the rewards."""

    def __init__(self, config: DictConfig):
        self._downsample: DownsampleConfig | None = parse(config)
        self._session_rewards: dict[str, float] = {}
        self._prompts_named = (0, 0)  # at which step, how many
        self._sums: Counter[str] = Counter()
        if self._downsample is not None:
            # verl derives the mini-batch size, the batch's padding multiple and the loss normalisation from
            # rollout.n; left at n, the gradient shrinks by m/n and dummy rows fill the batch up to n. So for verl
            # n is m, and the number really generated travels with each prompt (_fetch_one_gen_batch).
            with open_dict(config):
                config.actor_rollout_ref.rollout.n = self._downsample.keep
        super().__init__(config)  # type: ignore[call-arg]

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()  # type: ignore[misc]
        if self._downsample is not None:
            # verl's own per-prompt override of rollout.n; a tensor, not NonTensorData, since the async trainers
            # persist only such fields for the prompts they re-issue after a restart.
            batch["__rollout_n__"] = torch.full((len(batch),), self._downsample.generated, dtype=torch.int64)
            self._name_prompts(batch)
        return batch

    def _name_prompts(self, batch: TensorDict) -> None:
        """Uids that repeat from run to run, since they decide ties; verl's are random.

        Only in sync mode, where the queue is empty between steps: an async run may restore prompts of an earlier one.
        """
        seed = self.config.data.get("seed")  # type: ignore[attr-defined]
        if seed is None or self.trainer_mode != "sync":  # type: ignore[attr-defined]
            return
        step: int = self.global_steps  # type: ignore[attr-defined]
        # Counted within the step, so that a resumed run names its prompts as an uninterrupted one does.
        named = self._prompts_named[1] if self._prompts_named[0] == step else 0
        uids = [
            str(uuid.uuid5(uuid.NAMESPACE_OID, f"{seed}/{step}/{named + i + 1}")) for i in range(len(batch))
        ]
        self._prompts_named = (step, named + len(batch))
        batch["uid"] = get_tensordict({"uid": np.array(uids, dtype=object)})["uid"]

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        """One step of verl; an asynchronous one makes several selections, whose metrics verl averages."""
        self._sums.clear()
        batch: KVBatchMeta = super().step(metrics, timing_raw)  # type: ignore[misc]
        metrics.update(self._sums)
        return batch

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> KVBatchMeta:
        # The one place that all modes pass between the rewards and the log-probs.
        if self._downsample is not None:
            result = downsample(batch, self._downsample, self.global_steps)  # type: ignore[attr-defined]
            batch = result.batch
            self._session_rewards = result.rewards
            metrics.update(result.metrics)
            self._sums.update({name: result.metrics[name] for name in SUMS})
        return super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        output = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if self._downsample is not None and self._downsample.advantage_stats == "group":
            write_group_advantages(
                batch,
                self._session_rewards,
                normalise=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),  # type: ignore[attr-defined]
            )
        return output


def group_advantages(session_rewards: dict[str, float], *, normalise: bool) -> dict[str, float]:
    """GRPO's advantage of each session, with the mean and the deviation of all n rollouts of its prompt.

    The formula is verl's `compute_grpo_outcome_advantage`: (r - mean) / (std + 1e-6), std with n - 1 in the
    denominator, mean 0 and std 1 for a lone rollout.

    Args:
        session_rewards: `{uid}_{session}` -> reward, for all rollouts generated.
        normalise: verl's `algorithm.norm_adv_by_std_in_grpo` (False: Dr.GRPO).
    """
    groups: dict[str, list[float]] = {}
    for name, reward in session_rewards.items():
        groups.setdefault(name.rsplit("_", 1)[0], []).append(reward)
    stats = {
        uid: (0.0, 1.0) if len(values) == 1 else (float(np.mean(values)), float(np.std(values, ddof=1)))
        for uid, values in groups.items()
    }
    advantages = {}
    for name, reward in session_rewards.items():
        mean, std = stats[name.rsplit("_", 1)[0]]
        advantages[name] = (reward - mean) / (std + 1e-6) if normalise else reward - mean
    return advantages


def write_group_advantages(batch: KVBatchMeta, session_rewards: dict[str, float], *, normalise: bool) -> None:
    """Replaces the advantages that verl computed of the kept rollouts (`advantage_stats=group`)."""
    advantages = group_advantages(session_rewards, normalise=normalise)
    # A padding row has no session; its mask is all zero, so its advantage is too.
    per_row = torch.tensor(
        [advantages.get(key.rsplit("_", 1)[0], 0.0) for key in batch.keys], dtype=torch.float32
    )
    mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])[
        "response_mask"
    ]
    values = response_to_nested(per_row.unsqueeze(-1) * mask.to_padded_tensor(0), mask)
    fields = TensorDict({"advantages": values, "returns": values}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def install_trainers() -> None:
    """Puts the mixin over verl's V1 trainers."""
    from verl.trainer.ppo.v1 import trainer_base  # not at the top: importing it is what calls this function

    for name in SUPPORTED_MODES:
        cls = trainer_base.TRAINER_REGISTRY[name]
        if not issubclass(cls, DownsamplingMixin):
            # PATCH of verl: register_trainer refuses a second class under a name, so the entry is replaced.
            # Guard: tests/integration/test_trainers.py.
            trainer_base.TRAINER_REGISTRY[name] = type(
                f"Downsampling{cls.__name__}", (DownsamplingMixin, cls), {"__module__": __name__}
            )
