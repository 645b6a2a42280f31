"""Off, or keeping all n, is verl without the plugin: the same numbers to the last bit, rollouts fixed."""

from __future__ import annotations

import pytest
import torch

from tests.e2e import harness
from tests.rollouts import put_rollouts

N = 4
STEPS = [
    {
        "a": [0.0, 1.0, 1.0, 0.0],
        "b": [1.0, 0.5, 0.25, 0.0],
        "c": [1.0, 1.0, 1.0, 1.0],
        "d": [0.0, 0.0, 0.0, 1.0],
    },
    {
        "e": [0.3, 1.0, 0.1, 0.0],
        "f": [0.0, 0.0, 0.0, 0.0],
        "g": [1.0, 0.0, 1.0, 1.0],
        "h": [0.5, 0.0, 0.0, 1.0],
    },
]


@pytest.fixture(scope="module")
def trainer(tiny, transfer_queue, tmp_path_factory):
    trainer = harness.make_trainer(harness.make_config(tiny, f"actor_rollout_ref.rollout.n={N}"))
    start = tmp_path_factory.mktemp("start")
    trainer.actor_rollout_wg.save_checkpoint(str(start), None, 0)
    yield trainer, str(start)
    harness.shut_down(trainer)


def train(trainer, start: str, queue) -> list[dict]:
    """Two steps on the same rollouts from the same weights; every number of them."""
    trainer.actor_rollout_wg.load_checkpoint(start)
    numbers = []
    for seed, rewards in enumerate(STEPS):
        put_rollouts(rewards, seed=seed)
        metrics, batch = harness.run_step(trainer, list(rewards))
        data = queue.kv_batch_get(
            keys=sorted(batch.keys), partition_id="train", select_fields=["old_log_probs", "advantages"]
        )
        numbers.append(
            {
                **harness.gradient_metrics(metrics),
                "keys": batch.keys,
                "old_log_probs": torch.cat(list(data["old_log_probs"].unbind())).tolist(),
                "advantages": torch.cat(list(data["advantages"].unbind())).tolist(),
            }
        )
        queue.kv_clear(keys=batch.keys, partition_id="train")
    return numbers


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["algorithm.downsample=null"], id="null"),
        pytest.param(
            ["algorithm.downsample=max_variance", f"algorithm.downsample_kwargs.keep={N}"], id="keep-n"
        ),
        pytest.param(["algorithm.downsample=random", "algorithm.downsample_kwargs.keep=1.0"], id="keep-all"),
    ],
)
def test_the_same_numbers_as_verl(trainer, tiny, queue, overrides):
    from pods_plugin.integration.checks import parse

    ours, start = trainer
    config = harness.make_config(tiny, f"actor_rollout_ref.rollout.n={N}", *overrides)
    verls = train(harness.as_plain(ours, config), start, queue)
    ours._downsample = parse(config)
    assert (ours._downsample is None) == ("null" in overrides[0])
    assert train(ours, start, queue) == verls
    assert verls[0]["actor/grad_norm"] > 1e-3
    assert verls[0]["old_log_probs"] != verls[1]["old_log_probs"]
