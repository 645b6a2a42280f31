"""Real verl, real rollouts: every engine, number of workers and estimator takes steps with down-sampling."""

from __future__ import annotations

import pytest

from tests.e2e import harness

N, M, PROMPTS = 8, 4, 4

ESTIMATORS = [
    {"adv_estimator": "grpo"},
    {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},  # Dr.GRPO, with loss_agg_mode below
    {"adv_estimator": "rloo"},
    {"adv_estimator": "reinforce_plus_plus_baseline"},
    {"adv_estimator": "reinforce_plus_plus"},
    {"adv_estimator": "opo"},
    {"adv_estimator": "gpg"},
    {"adv_estimator": "grpo_passk"},
]


def config_of(tiny, *overrides):
    return harness.make_config(
        tiny, "algorithm.downsample=max_variance", f"algorithm.downsample_kwargs.keep={M}", *overrides
    )


def assert_sound(record: harness.StepRecord) -> None:
    """A step that generated n, trained on m, left nothing behind and moved the policy by finite numbers."""
    assert record.queue_before == set(), "the step before left rows in TransferQueue"
    assert record.sampled["train"] == [PROMPTS * N]
    assert (record.trained, record.padding) == (PROMPTS * M, 0)
    metrics = record.metrics
    assert metrics["downsample/generated"] == PROMPTS * N
    assert metrics["downsample/kept"] == PROMPTS * M
    assert metrics["downsample/kept_fraction"] == M / N
    assert metrics["downsample/group_variance/kept"] >= metrics["downsample/group_variance/all"]
    assert metrics["critic/score/mean"] == pytest.approx(metrics["downsample/reward/mean_kept"], abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert 0 <= metrics["actor/grad_norm"] < 1e4


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        pytest.param("fsdp", 2, id="fsdp1-2"),
        pytest.param("fsdp2", 2, id="fsdp2-2", marks=pytest.mark.slow),
        pytest.param("fsdp", 1, id="fsdp1-1", marks=pytest.mark.slow),
        pytest.param("fsdp2", 1, id="fsdp2-1", marks=pytest.mark.slow),
    ],
)
def test_engines_estimators_reference_policy_and_validation(tiny, queue, strategy, workers):
    config = config_of(
        tiny,
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"trainer.n_gpus_per_node={workers}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.04",
        f"trainer.total_training_steps={len(ESTIMATORS)}",
        f"trainer.test_freq={len(ESTIMATORS)}",
        "data.val_max_samples=6",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    with harness.running(config) as trainer:

        def another_estimator(step: int) -> None:
            settings = {"norm_adv_by_std_in_grpo": True, **ESTIMATORS[step - 1]}
            trainer.config.algorithm.update(settings)
            dr_grpo = not settings["norm_adv_by_std_in_grpo"]
            harness.set_loss(trainer, loss_agg_mode="seq-mean-token-sum-norm" if dr_grpo else "token-mean")

        records = harness.fit(trainer, another_estimator)
    assert len(records) == len(ESTIMATORS)
    for record in records:
        assert_sound(record)
        assert record.metrics["actor/kl_loss"] >= 0
        assert "timing_s/ref" in record.metrics
    # Validation generates what it is told, and all of it is judged.
    assert records[-1].sampled["val"] == [6 * 3]
    assert any(name.startswith("val-core/pods/Arithmetic-v0/acc/mean@3") for name in records[-1].metrics)
    assert all(set(record.sampled) == {"train"} for record in records[:-1])


def test_group_statistics_and_zero_variance_groups(tiny, queue):
    """`advantage_stats=group` and `drop_zero_variance` through real steps; an untrained model mostly has no signal."""
    config = config_of(
        tiny,
        "algorithm.downsample_kwargs.advantage_stats=group",
        "algorithm.downsample_kwargs.drop_zero_variance=True",
        "trainer.total_training_steps=2",
    )
    with harness.running(config) as trainer:
        records = harness.fit(trainer)
    for record in records:
        groups = PROMPTS - record.metrics["downsample/zero_variance_groups"]
        assert record.metrics["downsample/kept"] == (groups or PROMPTS) * M
        assert record.trained == PROMPTS * M  # verl fills up to its mini-batch
        assert record.padding == PROMPTS * M - record.metrics["downsample/kept"]


@pytest.mark.slow
def test_colocate_async(tiny, queue):
    config = config_of(
        tiny,
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.total_training_steps=4",
    )
    with harness.running(config) as trainer:
        records = harness.fit(trainer)
    assert len(records) == 4
    for record in records:
        assert record.sampled["train"] == [PROMPTS * N]
        assert (record.trained, record.padding) == (PROMPTS * M, 0)
        assert record.metrics["downsample/kept"] == PROMPTS * M


@pytest.mark.slow
def test_fifty_steps_leak_nothing(tiny, queue):
    import gc

    import psutil

    memory: list[int] = []

    def measure(step: int) -> None:
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)

    with harness.running(config_of(tiny, "trainer.total_training_steps=50")) as trainer:
        records = harness.fit(trainer, measure)
    assert len(records) == 50
    for record in records:
        assert_sound(record)
    growth = memory[-1] - memory[15]
    assert growth < 0.05 * memory[15], f"{growth / 1e6:.1f} MB in 35 steps"
