"""The mixin's own arithmetic, and guards of what it replaces in verl."""

from __future__ import annotations

import inspect
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from pods_plugin.downsampling import DownsampleConfig
from pods_plugin.integration.trainers import DownsamplingMixin, group_advantages, write_group_advantages
from tests.rollouts import put_rollouts


@pytest.mark.parametrize("normalise", [True, False])
def test_group_advantages_are_verls_grpo_over_all_n(normalise):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = {"a": [0.0, 1.0, 0.25, 0.5], "b": [1.0, 1.0, 1.0, 1.0], "c": [2.0]}
    flat = [(uid, i, r) for uid, values in rewards.items() for i, r in enumerate(values)]
    expected, _ = compute_grpo_outcome_advantage(
        token_level_rewards=torch.tensor([[r] for _, _, r in flat]),
        response_mask=torch.ones(len(flat), 1),
        index=np.array([uid for uid, _, _ in flat], dtype=object),
        norm_adv_by_std_in_grpo=normalise,
    )
    ours = group_advantages({f"{uid}_{i}": r for uid, i, r in flat}, normalise=normalise)
    assert [ours[f"{uid}_{i}"] for uid, i, _ in flat] == pytest.approx(expected.squeeze(1).tolist(), abs=1e-5)


def test_group_advantages_reach_every_row_of_a_session_and_no_padding(queue):
    batch = put_rollouts({"a": [[0.0, 0.0], 1.0], "pad": [0.0]}, response_lens=(2, 3))
    padding = batch.keys.index("pad_0_0")
    lengths = [tag["response_len"] for tag in batch.tags]
    write_group_advantages(batch, {"a_0": 0.0, "a_1": 1.0}, normalise=False)
    data = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages", "returns"])
    rows = [row.tolist() for row in data["advantages"].unbind()]
    assert [len(row) for row in rows] == lengths
    assert rows[0] == [-0.5] * lengths[0] and rows[1] == [-0.5] * lengths[1]
    assert rows[2] == [0.5] * lengths[2]
    assert rows[padding] == [0.0] * lengths[padding]
    assert [row.tolist() for row in data["returns"].unbind()] == rows


def test_a_step_of_several_updates_reports_the_rollouts_of_all(queue):
    """As in separate_async with parameter_sync_step=2; verl's own aggregation would give the counts of one."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    updates = [
        {"a": [0.0, 1.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0, 1.0]},
        {"c": [0.0, 0.0, 1.0, 1.0], "d": [0.0, 0.5]},
    ]

    class TwoUpdates(PPOTrainer):
        def _balance_batch(self, batch, metrics):
            return batch

        def _step_once(self, metrics, timing_raw, sample_batch_size):
            return self._balance_batch(put_rollouts(updates[self.local_trigger_step]), metrics)

        def prepare_step(self):
            return {}

        def on_sample_end(self): ...

        def on_step_end(self): ...

    class Trainer(DownsamplingMixin, TwoUpdates):
        def __init__(self):
            self._downsample = DownsampleConfig(rule="max_variance", generated=4, keep=2)
            self._sums = Counter()
            self.parameter_sync_step, self.global_steps = 2, 1
            self.config = OmegaConf.create({"data": {"train_batch_size": 4}})

    trainer = Trainer()
    for _ in range(2):  # each step counts its own
        metrics = {}
        batch = trainer.step(metrics, {})
        assert len(batch.keys) == 8
        names = ("generated", "kept", "dropped", "zero_variance_groups")
        assert [metrics[f"downsample/{name}"] for name in names] == [14, 8, 6, 1]
        assert metrics["downsample/reward/mean_all"] == pytest.approx((5 / 8 + 2.5 / 6) / 2, abs=0.02)


def test_guard_the_seams_of_the_v1_trainer():
    """What the mixin relies on: the order of a step, and who reads rollout.n."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    step = inspect.getsource(trainer_base.PPOTrainer._step_once)
    order = ["replay_buffer.sample", "_compute_reward_colocate", "_balance_batch", "_compute_old_log_prob"]
    order += [
        "_compute_ref_log_prob",
        "_compute_values",
        "_compute_advantage",
        "_update_critic",
        "_update_actor",
    ]
    positions = [step.index(name) for name in order]
    assert positions == sorted(positions)
    assert inspect.getsource(trainer_base).count("self._balance_batch(") == 1
    for method in ("_get_required_batch_multiple", "_compute_advantage", "_update_actor", "_update_critic"):
        assert "rollout.n" in inspect.getsource(getattr(trainer_base.PPOTrainer, method))
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert '"__rollout_n__"' in inspect.getsource(worker._run_prompt)


def test_guard_the_registry_refuses_a_second_class():
    """Why the entries are replaced instead of registered: the day this fails, use register_trainer."""
    from verl.trainer.ppo.v1 import trainer_base

    class Another(trainer_base.PPOTrainer):
        pass

    with pytest.raises(ValueError, match="already registered"):
        trainer_base.register_trainer("sync")(Another)
    assert issubclass(trainer_base.TRAINER_REGISTRY["sync"], DownsamplingMixin)
