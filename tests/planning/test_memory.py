from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_plugin.planning.gpus import GIB, find_gpu
from pods_plugin.planning.job import Job
from pods_plugin.planning.memory import ASLEEP, advice, memory_plan
from pods_plugin.planning.model import ModelShape

MakeJob = Callable[..., Job]
H100 = find_gpu("h100")
STATES = ("weights", "gradients", "optimizer")


def test_fsdp_states_are_sixteen_bytes_a_parameter(make_job: MakeJob, qwen7b: ModelShape) -> None:
    """fp32 weights, gradients and two moments of Adam, sharded over all GPUs (ZeRO-3)."""
    update = memory_plan(make_job(), H100).update
    assert [update[part] * 8 / qwen7b.parameters for part in STATES] == pytest.approx([4, 4, 8])


def test_stored_in_bf16_they_are_half(make_job: MakeJob, qwen7b: ModelShape) -> None:
    update = memory_plan(make_job(trainer={"weight": 2}), H100).update
    assert [update[part] * 8 / qwen7b.parameters for part in STATES] == pytest.approx([2, 2, 4])


@pytest.mark.parametrize(("distributed", "bytes_"), [(True, 6 + 12 / 8), (False, 18)])
def test_megatron_states_are_those_of_its_guide(
    make_job: MakeJob, qwen7b: ModelShape, distributed: bool, bytes_: float
) -> None:
    """bf16 parameters and fp32 gradients: 6 + 12/d bytes a parameter with the distributed optimizer, 18 without."""
    trainer = {"backend": "megatron", "distributed_optimizer": distributed, "weight": 2}
    update = memory_plan(make_job(trainer=trainer), H100).update
    counted = qwen7b.parameters - qwen7b.hidden  # the last norm is left out
    assert sum(update[part] for part in STATES) / counted == pytest.approx(bytes_)


def test_tensor_and_pipeline_parallel_split_the_weights(make_job: MakeJob, qwen7b: ModelShape) -> None:
    update = memory_plan(make_job(trainer={"backend": "megatron", "tp": 2, "pp": 2}), H100).update
    layer = qwen7b.layer_parameters - qwen7b.layer_vectors
    stage = 14 * (layer / 2 + qwen7b.layer_vectors) + qwen7b.vocabulary_matrix / 2
    assert update["weights"] == pytest.approx(2 * stage)


def test_experts_are_split_over_their_own_groups(make_job: MakeJob, moe: ModelShape) -> None:
    trainer = {"backend": "megatron", "gpus": 64, "tp": 4, "ep": 8, "etp": 1}
    job = make_job(model=moe, trainer=trainer, engine={"gpus": 64, "tp": 4})
    states = memory_plan(job, H100).update
    experts = 48 * moe.expert_matrices / 8
    dense = 48 * ((moe.layer_parameters - moe.expert_matrices - moe.layer_vectors) / 4 + moe.layer_vectors)
    dense += 2 * moe.vocabulary_matrix / 4
    assert states["weights"] == pytest.approx(2 * (dense + experts))
    assert states["optimizer"] == pytest.approx(
        12 * (dense / 16 + experts / 8)
    )  # dp 16, copies of an expert 8


def test_lora_trains_its_adapters_only(make_job: MakeJob, qwen7b: ModelShape) -> None:
    update = memory_plan(make_job(trainer={"lora_rank": 64}), H100).update
    assert update["optimizer"] == pytest.approx(8 * qwen7b.lora_parameters(64) / 8)
    assert update["weights"] == pytest.approx(4 * (qwen7b.parameters + qwen7b.lora_parameters(64)) / 8)


def test_offloaded_states_are_away_while_generating_only(make_job: MakeJob) -> None:
    here = memory_plan(make_job(), H100)
    away = memory_plan(make_job(trainer={"param_offload": True, "optimizer_offload": True}), H100)
    assert here.update == away.update
    assert set(here.generate) - set(away.generate) == {"weights", "optimizer"}
    policy = memory_plan(make_job(trainer={"cpu_policy": True}), H100)
    assert not set(STATES) & set(policy.update)


def test_kv_cache_by_hand(make_job: MakeJob, qwen7b: ModelShape) -> None:
    job = make_job(engine={"utilization": 0.6})
    plan = memory_plan(job, H100)
    assert H100.memory is not None
    other = plan.generate["vLLM"] - 1.0 * GIB  # the CUDA graphs are outside of the budget
    assert plan.generate["vLLM weights"] == 2 * qwen7b.parameters
    assert plan.generate["KV cache"] == pytest.approx(0.6 * H100.memory - 2 * qwen7b.parameters - other)
    assert plan.kv_tokens == pytest.approx(plan.generate["KV cache"] / 57344)


def test_separate_gpus_share_nothing(make_job: MakeJob) -> None:
    plan = memory_plan(make_job(engine={"separate": True, "on_trainer": False}), H100)
    assert not set(STATES) & set(plan.generate)
    assert "vLLM" not in plan.update


def test_separate_generation_leaves_a_sleeping_engine_on_the_training_gpus(make_job: MakeJob) -> None:
    plan = memory_plan(make_job(engine={"separate": True}), H100)
    assert plan.update["vLLM"] == ASLEEP
    assert {"weights", "optimizer", "KV cache"} <= set(plan.generate)


def test_a_cpu_is_not_judged(make_job: MakeJob) -> None:
    plan = memory_plan(make_job(engine={"name": "hf"}), find_gpu("cpu"))
    assert plan.fits and plan.limit is None and plan.kv_tokens == float("inf")


sizes = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(
    gpus=sizes, micro=st.integers(3072, 65536), checkpointing=st.booleans(), lora=st.sampled_from([0, 16, 64])
)
@settings(max_examples=80, deadline=None)
def test_fsdp_memory_is_monotone(
    make_job: MakeJob, gpus: int, micro: int, checkpointing: bool, lora: int
) -> None:
    trainer = {
        "gpus": gpus,
        "shard": gpus,
        "micro_tokens": micro,
        "checkpointing": checkpointing,
        "lora_rank": lora,
    }

    def total(**more: object) -> float:
        return sum(
            memory_plan(make_job(trainer={**trainer, **more}, engine={"gpus": gpus}), H100).update.values()
        )

    now = total()
    if gpus > 1:
        assert total(gpus=2 * gpus, shard=2 * gpus) < now
    assert total(micro_tokens=micro + 1024) > now
    assert total(checkpointing=True) <= now
    assert total(lora_rank=0) >= now
    assert total(fused_head=True) <= now


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), micro=st.integers(3072, 32768))
@settings(max_examples=60, deadline=None)
def test_megatron_memory_is_monotone(make_job: MakeJob, tp: int, pp: int, micro: int) -> None:
    trainer = {
        "backend": "megatron",
        "gpus": 32,
        "tp": tp,
        "pp": pp,
        "micro_tokens": micro,
        "checkpointing": False,
    }

    def total(**more: object) -> float:
        return sum(memory_plan(make_job(trainer={**trainer, **more}), H100).update.values())

    now = total()
    assert total(micro_tokens=micro + 1024) > now
    assert total(checkpointing=True) < now
    assert total(distributed_optimizer=False) >= now
    assert total(sequence_parallel=False) >= now
    assert total(gpus=64) <= now  # more copies, smaller shards of the optimizer


@pytest.mark.parametrize("gpu", ["h100", "a100-40", "l40s"])
@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_there_is_advice_for_what_does_not_fit(make_job: MakeJob, gpu: str, gpus: int, backend: str) -> None:
    """tests/planning/test_plan_cli.py writes the advice into recipes, and looks whether they fit then."""
    trainer = {"backend": backend, "gpus": gpus, "shard": gpus, "checkpointing": False}
    job = make_job(trainer=trainer, engine={"gpus": gpus, "utilization": 0.8})
    assert not memory_plan(job, find_gpu(gpu)).fits
    keys = [text.split("=")[0] for text in " ".join(advice(job, find_gpu(gpu))).split()]
    assert keys and len(keys) == len(set(keys))


def test_one_change_is_enough_where_it_is(make_job: MakeJob) -> None:
    job = make_job(trainer={"micro_tokens": 65536})
    assert advice(job, H100) == ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"]
    job = make_job(engine={"utilization": 0.9})
    assert advice(job, H100) == ["actor_rollout_ref.rollout.gpu_memory_utilization=0.75"]
    assert advice(make_job(), H100) == []


def test_a_kv_cache_without_room_for_a_sequence_is_a_problem(make_job: MakeJob) -> None:
    job = make_job(engine={"utilization": 0.2})
    assert "fewer than one sequence of 3072" in " ".join(memory_plan(job, H100).problems)
    (change,) = advice(job, H100)
    value = float(change.split("=")[1])
    assert memory_plan(
        dataclasses.replace(job, engine=dataclasses.replace(job.engine, utilization=value)), H100
    ).fits
