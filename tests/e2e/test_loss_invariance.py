"""One step with down-sampling = one step of verl fed exactly the kept rollouts: same loss, same gradient norm.

The rollouts are fixed, the weights too (learning rate 0), so that one set of workers serves all cases.
"""

from __future__ import annotations

import pytest

from tests.e2e import harness
from tests.rollouts import keys_in_queue, put_rollouts

N, M = 8, 4
REWARDS = {
    "a": [0.0, 1.0, 0.2, 0.8, 0.4, 0.5, 0.6, 0.7],
    "b": [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5],
    "c": [0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.3, 0.2],
    "d": [0.0, 0.3, -2.0, 0.3, 0.1, 0.2, 2.5, 0.4],
}


@pytest.fixture(scope="module", params=[1, 2], ids=["dp1", "dp2"])
def trainers(request, tiny, transfer_queue):
    """(config of plain verl with rollout.n=m, the down-sampling trainer), on the same workers."""
    common = [f"trainer.n_gpus_per_node={request.param}", "actor_rollout_ref.actor.optim.lr=0.0"]
    common += ["actor_rollout_ref.actor.optim.weight_decay=0.0"]
    config = harness.make_config(
        tiny, "algorithm.downsample=max_variance", f"algorithm.downsample_kwargs.keep={M}", *common
    )
    plain_config = harness.make_config(tiny, f"actor_rollout_ref.rollout.n={M}", *common)
    trainer = harness.make_trainer(config)
    yield plain_config, trainer
    harness.shut_down(trainer)


CASES = [
    pytest.param(mini, agg, dynamic, id=f"mini{mini}-{agg}-{'dynamic' if dynamic else 'fixed'}")
    for mini in (4, 2)
    for agg in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    for dynamic in (False, True)
]


@pytest.mark.parametrize(("mini", "agg", "dynamic"), CASES)
def test_same_loss_and_gradient_as_verl_fed_the_kept_rollouts(trainers, queue, mini, agg, dynamic):
    plain_config, trainer = trainers
    plain = harness.as_plain(trainer, plain_config)
    results = []
    kept: list[str] = []
    for one in (trainer, plain):
        one.config.actor_rollout_ref.actor.ppo_mini_batch_size = mini
        harness.set_loss(one, loss_agg_mode=agg)
        batch = put_rollouts(REWARDS)
        if one is plain:
            queue.kv_clear(keys=[key for key in batch.keys if key not in kept], partition_id="train")
        with_dynamic(one, dynamic)
        metrics, trained = harness.run_step(one, list(REWARDS))
        kept = trained.keys
        assert len(kept) == len(REWARDS) * M, "dummy rows"
        assert keys_in_queue() == set(kept)
        queue.kv_clear(keys=trained.keys, partition_id="train")
        results.append(harness.gradient_metrics(metrics))
    ours, verls = results
    assert ours["actor/grad_norm"] > 1e-3
    assert ours == pytest.approx(verls, rel=1e-5, abs=1e-7)


def with_dynamic(trainer, dynamic: bool) -> None:
    """Lets the engine cut micro-batches by tokens instead of rows; it takes the setting from the batch first."""
    update = type(trainer)._update_actor

    def _update_actor(batch, metrics):
        batch.extra_info["use_dynamic_bsz"] = dynamic
        if dynamic:
            batch.extra_info["max_token_len_per_gpu"] = 24
        return update(trainer, batch, metrics)

    trainer._update_actor = _update_actor


def test_the_gradient_shrinks_if_verl_is_left_with_n(trainers, queue):
    """What goes wrong without `rollout.n = m`: the test above would notice."""
    plain_config, trainer = trainers
    plain = harness.as_plain(trainer, plain_config)
    with_dynamic(plain, False)
    plain.config.actor_rollout_ref.actor.ppo_mini_batch_size = len(REWARDS)
    norms = []
    for n in (M, N):
        plain.config.actor_rollout_ref.rollout.n = n
        harness.set_loss(plain, loss_agg_mode="seq-mean-token-mean")
        put_rollouts({uid: rewards[:M] for uid, rewards in REWARDS.items()})
        metrics, trained = harness.run_step(plain, list(REWARDS))
        assert len(trained.keys) == len(REWARDS) * n  # verl fills up with dummy rows
        queue.kv_clear(keys=trained.keys, partition_id="train")
        norms.append(harness.gradient_metrics(metrics)["actor/grad_norm"])
    assert norms[1] == pytest.approx(norms[0] * M / N, rel=1e-3)
