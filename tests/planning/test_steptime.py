from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_plugin.planning.choose import Situation
from pods_plugin.planning.gpus import find_gpu
from pods_plugin.planning.job import Job
from pods_plugin.planning.model import ModelShape
from pods_plugin.planning.signal import PassRates
from pods_plugin.planning.steptime import (
    DEFAULT,
    STEP_S,
    Efficiencies,
    Lengths,
    generate_roofline,
    log_prob_roofline,
    step_seconds,
    update_roofline,
)

MakeJob = Callable[..., Job]
H100 = find_gpu("h100")
LENGTHS = Lengths(prompt=200, response=800, longest=2048)


@given(st.floats(1, 4000), st.floats(1, 8))
@settings(max_examples=60, deadline=None)
def test_lengths_have_the_mean_and_square_that_they_say(response: float, ratio: float) -> None:
    lengths = Lengths(prompt=100, response=response, longest=response * ratio)
    k = (np.arange(200_000) + 0.5) / 200_000 * lengths.longest
    survival = (1 - k / lengths.longest) ** lengths.shape
    assert survival.mean() * lengths.longest == pytest.approx(response, rel=1e-3)
    assert (2 * k * survival).mean() * lengths.longest == pytest.approx(lengths.squared_response, rel=1e-3)


def test_one_sequence_reads_the_weights_for_every_token(make_job: MakeJob, qwen7b: ModelShape) -> None:
    """With one rollout at a time decoding is bound by memory: weights without the embedding, and the KV cache."""
    job = make_job(prompts=8, n=1, m=1, engine={"prefix_caching": False})
    lengths = Lengths(prompt=1, response=1000, longest=1000)
    read = 2 * (qwen7b.parameters - qwen7b.vocabulary_matrix) + 501 * qwen7b.kv_bytes()
    expected = 1000 * (read / H100.bandwidth + STEP_S)
    assert generate_roofline(job, H100, lengths) == pytest.approx(expected, rel=0.001)


def test_many_sequences_are_bound_by_flops_somewhere(make_job: MakeJob) -> None:
    slow = dataclasses.replace(H100, flops=H100.flops / 10)
    job = make_job(n=64)
    assert generate_roofline(job, slow, LENGTHS) > 1.5 * generate_roofline(job, H100, LENGTHS)


def test_training_flops_by_hand(make_job: MakeJob, qwen7b: ModelShape) -> None:
    """With memory and links that cost nothing, the update is FLOPs: 8 a weight and token with recomputation."""
    free = dataclasses.replace(H100, bandwidth=1e30, link=1e30, host=1e30)
    tokens = 128 * 16 * 1000
    attention = 4 * 2 * qwen7b.query * 28 * 128 * 16 * LENGTHS.squared
    expected = (8 * qwen7b.matmul_parameters * tokens + attention) / 8 / free.flops
    assert update_roofline(make_job(), free, LENGTHS) == pytest.approx(expected, rel=1e-9)
    plain = update_roofline(make_job(trainer={"checkpointing": False}), free, LENGTHS)
    assert plain == pytest.approx(expected * 3 / 4, rel=1e-9)
    lora = update_roofline(make_job(trainer={"checkpointing": False, "lora_rank": 64}), free, LENGTHS)
    assert lora == pytest.approx(expected / 2, rel=1e-9)
    assert log_prob_roofline(make_job(), free, LENGTHS) == pytest.approx(expected / 4, rel=1e-9)


def test_the_pipeline_bubble_is_the_textbook_one(make_job: MakeJob) -> None:
    free = dataclasses.replace(H100, bandwidth=1e30, link=1e30, host=1e30)
    trainer = {"backend": "megatron", "micro_tokens": 16_000, "log_prob_tokens": 16_000}
    flat = log_prob_roofline(make_job(trainer=trainer), free, LENGTHS)
    piped = log_prob_roofline(make_job(trainer={**trainer, "pp": 2}), free, LENGTHS)
    micro_batches = 128 * 16 * 1000 / 4 / 16_000
    assert piped / flat == pytest.approx(1 + 1 / micro_batches, rel=1e-9)


def test_pods_trains_like_grpo_with_m_and_generates_like_grpo_with_n(make_job: MakeJob) -> None:
    situation = Situation(make_job(), H100, LENGTHS, DEFAULT, PassRates())
    few, many, pods = situation.compared()
    assert (few.name, many.name, pods.name) == ("GRPO n=16", "GRPO n=64", "PODS 64 -> 16")
    for phase in ("log-prob", "update"):
        assert pods.seconds[phase] == few.seconds[phase] < many.seconds[phase]
    assert pods.seconds["generate"] == many.seconds["generate"] > few.seconds["generate"]
    assert pods.variance > many.variance > few.variance


def test_a_reference_costs_a_forward_pass(make_job: MakeJob) -> None:
    without = step_seconds(make_job(), H100, LENGTHS)
    with_one = step_seconds(make_job(trainer={"reference": True}), H100, LENGTHS)
    assert without["reference"] == 0
    assert with_one["reference"] == with_one["log-prob"] == without["log-prob"]


def test_separate_generation_hides_behind_training(make_job: MakeJob) -> None:
    seconds = step_seconds(make_job(engine={"separate": True}), H100, LENGTHS)
    training = sum(seconds[phase] for phase in ("log-prob", "reference", "update", "other"))
    assert seconds["step"] == max(training, seconds["generate"])


@given(
    n=st.integers(2, 256),
    m=st.integers(2, 64),
    response=st.floats(16, 2000),
    gpus=st.sampled_from([8, 16, 32]),
)
@settings(max_examples=60, deadline=None)
def test_seconds_are_monotone(make_job: MakeJob, n: int, m: int, response: float, gpus: int) -> None:
    lengths = Lengths(prompt=200, response=response, longest=2048)
    base = {"n": n + m, "m": m}

    def seconds(
        extra: float = 0.0, devices: int = gpus, gpu: str = "h100", **changes: int
    ) -> dict[str, float]:
        job = make_job(
            **{**base, **changes}, trainer={"gpus": devices, "shard": devices}, engine={"gpus": devices}
        )
        longer = dataclasses.replace(lengths, response=min(2048, response + extra))
        return step_seconds(job, find_gpu(gpu), longer)

    now = seconds()
    assert seconds(n=n + m + 8)["generate"] >= now["generate"]
    assert seconds(m=m + 1)["update"] > now["update"]
    assert seconds(extra=10)["update"] > now["update"]
    assert seconds(gpu="a100-80")["step"] > now["step"]
    assert all(value >= 0 for value in now.values())


def test_the_best_n_is_the_best_of_those_tried(make_job: MakeJob) -> None:
    situation = Situation(make_job(), H100, LENGTHS, DEFAULT, PassRates(a=0.3, b=3))
    best = situation.best(16)
    assert best.rate == max(setting.rate for setting in situation.by_n(16))
    # where generation is free, more is always better; where it is all there is, nothing pays
    free = dataclasses.replace(DEFAULT, generate=1e9, fixed_generate=0.0)
    dear = dataclasses.replace(DEFAULT, generate=1e-6)
    assert dataclasses.replace(situation, efficiencies=free).best(16).n == 256
    assert dataclasses.replace(situation, efficiencies=dear).best(16).n < 64


def test_every_m_offered_fills_the_data_parallel_ranks(make_job: MakeJob) -> None:
    job = make_job(mini_prompts=1, m=8, n=32)
    offered = Situation(job, H100, LENGTHS, Efficiencies(), PassRates()).best_of_all()
    assert {setting.m % 8 for setting in offered} == {0}
    assert offered == sorted(offered, key=lambda setting: -setting.rate)
