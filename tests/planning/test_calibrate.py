from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pods_plugin.planning.calibrate import calibrate
from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.gpus import find_gpu
from pods_plugin.planning.job import Engine, Job, Trainer
from pods_plugin.planning.model import ModelShape
from pods_plugin.planning.signal import PassRates, kept_variance
from pods_plugin.planning.steptime import Efficiencies, Lengths, step_seconds
from pods_plugin.reporting.runs import StepRecord, load_run

MakeJob = Callable[..., Job]
H100 = find_gpu("h100")
RATES = PassRates(a=0.7, b=1.9)
KNOWN = Efficiencies(
    generate=0.31,
    log_prob=0.52,
    update=0.27,
    fixed_generate=4.5,
    fixed_log_prob=0.8,
    fixed_update=2.2,
    other=3.1,
)


def _record(step: int, job: Job, mean: float, known: Efficiencies, factor: float = 1.0) -> StepRecord:
    """A row as verl's file logger writes it, of a cluster with known efficiencies."""
    lengths = Lengths(prompt=180.0, response=mean, longest=2048.0)
    seconds = step_seconds(job, H100, lengths, known)
    data = {
        "prompt_length/mean": 180.0,
        "response_length/mean": mean,
        "response_length/max": 2048.0,
        "timing_s/gen": factor * seconds["generate"],
        "timing_s/old_log_prob": factor * seconds["log-prob"],
        "timing_s/update_actor": factor * seconds["update"],
        "timing_s/step": factor * seconds["step"],
    }
    if seconds["reference"]:
        data["timing_s/ref"] = factor * seconds["reference"]
    if job.n > job.m:
        data |= {
            "downsample/generated": float(job.prompts * job.n),
            "downsample/kept": float(job.prompts * job.m),
            "downsample/response_length/mean_all": mean,
            "downsample/reward/mean_all": RATES.mean,
            "downsample/group_variance/all": kept_variance(job.n, job.n, RATES),
        }
    return StepRecord(step, data)


def _means(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(400, 1400, size=count)


@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("reference", [False, True])
def test_known_efficiencies_are_recovered(make_job: MakeJob, m: int, reference: bool) -> None:
    job = make_job(m=m, trainer={"reference": reference})
    found = calibrate([_record(i, job, mean, KNOWN) for i, mean in enumerate(_means(30))], job, H100)
    assert dataclasses.asdict(found.efficiencies) == pytest.approx(dataclasses.asdict(KNOWN), rel=1e-6)
    assert found.steps == 28
    assert max(found.errors.values()) < 1e-6


def test_the_profile_of_the_rewards_is_recovered(make_job: MakeJob) -> None:
    job = make_job()
    rates = calibrate([_record(1, job, 800.0, KNOWN)], job, H100).rates
    assert rates is not None and (rates.a, rates.b) == pytest.approx((RATES.a, RATES.b), rel=1e-6)
    grpo = make_job(m=64)
    assert calibrate([_record(1, grpo, 800.0, KNOWN)], grpo, H100).rates is None


def test_slow_steps_do_not_spoil_the_fit(make_job: MakeJob) -> None:
    job = make_job()
    records = [_record(i, job, mean, KNOWN, 5.0 if i % 6 == 0 else 1.0) for i, mean in enumerate(_means(40))]
    found = calibrate(records, job, H100).efficiencies
    assert found.update == pytest.approx(KNOWN.update, rel=0.1)
    assert found.generate == pytest.approx(KNOWN.generate, rel=0.1)


def test_steps_that_are_alike_give_an_efficiency_without_fixed_seconds(make_job: MakeJob) -> None:
    job = make_job()
    found = calibrate([_record(i, job, 800.0, KNOWN) for i in range(9)], job, H100)
    assert found.efficiencies.fixed_update == 0.0
    again = step_seconds(job, H100, found.lengths, found.efficiencies)
    assert again == pytest.approx(step_seconds(job, H100, found.lengths, KNOWN))


def test_a_run_of_another_m_is_refused(make_job: MakeJob) -> None:
    records = [_record(i, make_job(m=16), 800.0, KNOWN) for i in range(3)]
    with pytest.raises(PlanError, match=r"kept 0.25 of its rollouts, and the config says 8 of 64"):
        calibrate(records, make_job(m=8), H100)


def test_a_file_without_timings_is_refused(make_job: MakeJob) -> None:
    with pytest.raises(PlanError, match="no step with timing_s/gen"):
        calibrate([StepRecord(1, {"val-core/acc/mean@1": 0.5})], make_job(), H100)


def test_a_real_run_of_the_embedded_default() -> None:
    """24 steps of `make train` (recipes/cpu/arithmetic, seed 0), as verl logged them, keys that are not read left out.

    The fit must say what the run took, and what it would take without down-sampling must lie between the two.
    """
    shape = ModelShape(
        name="tiny",
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        vocab=258,
        tied=True,
        biased=True,
    )
    job = Job(
        name="arithmetic",
        model=shape,
        trainer=Trainer(
            backend="fsdp2", gpus=1, element=4, dynamic=False, checkpointing=False, micro_tokens=640
        ),
        engine=Engine(name="hf", gpus=1, tp=1, sequences=512, element=4),
        gpus_per_node=1,
        prompts=16,
        mini_prompts=4,
        epochs=1,
        n=32,
        m=8,
        max_prompt=16,
        max_response=4,
        workers=2,
    )
    run = load_run(Path(__file__).parent / "data" / "arithmetic.jsonl")
    found = calibrate(run.steps, job, find_gpu("cpu"))
    assert found.steps == 22
    assert max(found.errors.values()) < 0.15
    medians = {
        name: float(np.median([record.data[f"timing_s/{name}"] for record in run.steps[2:]]))
        for name in ("gen", "old_log_prob", "update_actor", "step")
    }
    seconds = step_seconds(job, find_gpu("cpu"), found.lengths, found.efficiencies)
    assert seconds["generate"] == pytest.approx(medians["gen"], rel=0.15)
    assert seconds["log-prob"] == pytest.approx(medians["old_log_prob"], rel=0.15)
    assert seconds["update"] == pytest.approx(medians["update_actor"], rel=0.15)
    assert seconds["step"] == pytest.approx(medians["step"], rel=0.15)
    grpo = step_seconds(dataclasses.replace(job, m=32), find_gpu("cpu"), found.lengths, found.efficiencies)
    assert seconds["step"] < grpo["step"] < 4 * seconds["step"]
    assert found.rates is not None and 0.05 < found.rates.mean < 0.5
