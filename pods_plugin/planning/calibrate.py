"""Efficiencies of a cluster, fitted to what verl logged in a real run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.gpus import GPU
from pods_plugin.planning.job import Job
from pods_plugin.planning.signal import PassRates, beta_of_run
from pods_plugin.planning.steptime import (
    DEFAULT,
    Efficiencies,
    Lengths,
    generate_roofline,
    log_prob_roofline,
    update_roofline,
)

_Floats = NDArray[np.float64]
WARM_UP = 2  # steps left out of a run that has more than twice as many: compiling, filling caches
STEPS = 500  # at most, evenly taken
SPREAD = 0.05  # work that varies less than this says nothing about the fixed seconds


class Record(Protocol):
    """A step's metrics, such as `pods_plugin.reporting.runs.StepRecord`."""

    @property
    def step(self) -> int:
        """verl's global step."""

    def get(self, name: str) -> float | None:
        """The value of a metric; None if the step does not have it."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a run says about a cluster.

    Attributes:
        efficiencies: Fitted; the default where a phase did not happen.
        lengths: Means over the steps.
        rates: The Beta profile with the run's rewards; None if they are not 0/1, or all alike.
        steps: Steps that were used.
        errors: Phase -> median relative deviation of the fit from the run.
    """

    efficiencies: Efficiencies
    lengths: Lengths
    rates: PassRates | None
    steps: int
    errors: dict[str, float]


def calibrate(records: Sequence[Record], job: Job, gpu: GPU) -> Calibration:
    """Fits the efficiencies to the `timing_s/*` of a run.

    Args:
        records: Training steps, as `pods_plugin.reporting.runs.load_run` reads them.
        job: The job that the run was, its own n and m.
        gpu: What it ran on.

    Raises:
        PlanError: There is no step with verl's timings, or the run did not have the job's n and m.
    """
    steps = [
        record for record in records if record.get("timing_s/gen") and record.get("timing_s/update_actor")
    ]
    if not steps:
        raise PlanError(
            "no step with timing_s/gen and timing_s/update_actor: expected lines of verl's file logger"
        )
    if len(steps) > 2 * WARM_UP:
        steps = steps[WARM_UP:]
    steps = steps[:: math.ceil(len(steps) / STEPS)]
    _check_kept(steps, job)

    all_lengths = [_lengths(record, generated=True) for record in steps]
    kept_lengths = [_lengths(record, generated=False) for record in steps]
    jobs = [_job_of_step(record, job) for record in steps]
    seconds = {
        "generate": _timer(steps, "gen") + _timer(steps, "reward"),
        "log-prob": _timer(steps, "old_log_prob"),
        "reference": _timer(steps, "ref"),
        "update": _timer(steps, "update_actor"),
    }
    work = {
        "generate": _array(generate_roofline(j, gpu, n) for j, n in zip(jobs, all_lengths, strict=True)),
        "log-prob": _array(log_prob_roofline(j, gpu, n) for j, n in zip(jobs, kept_lengths, strict=True)),
        "update": _array(update_roofline(j, gpu, n) for j, n in zip(jobs, kept_lengths, strict=True)),
    }
    work["reference"] = work["log-prob"]
    fitted = {phase: _fit(work[phase], seconds[phase]) for phase in ("generate", "log-prob", "update")}
    rest = (
        _timer(steps, "step")
        - sum(seconds.values())
        - _timer(steps, "testing")
        - _timer(steps, "save_checkpoint")
    )

    efficiencies = DEFAULT
    for phase, (fixed, efficiency) in ((phase, fit) for phase, fit in fitted.items() if fit is not None):
        name = phase.replace("-", "_")
        efficiencies = dataclasses.replace(efficiencies, **{name: efficiency, f"fixed_{name}": fixed})
    efficiencies = dataclasses.replace(efficiencies, other=max(0.0, float(np.median(rest))))
    errors = {
        phase: float(np.median(np.abs(fit[0] + work[phase] / fit[1] - seconds[phase]) / seconds[phase]))
        for phase, fit in fitted.items()
        if fit is not None
    }
    return Calibration(efficiencies, _mean_lengths(all_lengths), _rates(steps, job), len(steps), errors)


def _fit(work: _Floats, seconds: _Floats) -> tuple[float, float] | None:
    """(fixed, efficiency) of seconds = fixed + work / efficiency; robust against slow steps, both positive.

    The line is Theil and Sen's: the median of the slopes between all pairs of steps. Where the work hardly varies it
    cannot be told apart from the fixed seconds: then there are none, and the efficiency is that of the median step.
    """
    happened = seconds > 0
    work, seconds = work[happened], seconds[happened]
    if not work.size:
        return None
    if np.std(work) > SPREAD * np.mean(work):
        first, second = np.triu_indices(len(work), k=1)
        apart = np.abs(work[first] - work[second]) > 1e-3 * np.mean(work)
        slopes = (seconds[first] - seconds[second])[apart] / (work[first] - work[second])[apart]
        slope = float(np.median(slopes))
        fixed = float(np.median(seconds - slope * work)) if slope > 0 else -1.0
        if fixed >= 0:
            return fixed, 1 / slope
    return 0.0, 1 / float(np.median(seconds / work))


def _check_kept(steps: Sequence[Record], job: Job) -> None:
    """A metrics file does not say what its run was: where it can be seen that it was another one, that is an error."""
    kept = [(record.get("downsample/kept") or 0) for record in steps if record.get("downsample/generated")]
    generated = [
        record.get("downsample/generated") or 1.0 for record in steps if record.get("downsample/generated")
    ]
    part = sum(kept) / sum(generated) if generated else 1.0
    if abs(part - job.m / job.n) > 0.05 * part:
        raise PlanError(
            f"the run kept {part:.3g} of its rollouts, and the config says {job.m} of {job.n}; give the run's folder, "
            "whose config.yaml says what it was, or its overrides"
        )


def _job_of_step(record: Record, job: Job) -> Job:
    """The job with as many prompts as make this step's rollouts; fewer than configured where sessions failed."""
    generated = record.get("downsample/generated")
    if not generated:
        return job
    return dataclasses.replace(job, prompts=max(1, round(generated / job.n)))


def _lengths(record: Record, *, generated: bool) -> Lengths:
    def get(*names: str) -> float:
        for name in names:
            if (value := record.get(name)) is not None:
                return value
        raise PlanError(f"step {record.step} has no {names[-1]}: expected lines of verl's file logger")

    kept = get("response_length/mean")
    mean = get("downsample/response_length/mean_all", "response_length/mean") if generated else kept
    longest = max(get("response_length/max"), mean)
    return Lengths(prompt=get("prompt_length/mean"), response=max(mean, 1.0), longest=max(longest, 1.0))


def _mean_lengths(lengths: Sequence[Lengths]) -> Lengths:
    return Lengths(
        prompt=float(np.mean([item.prompt for item in lengths])),
        response=float(np.mean([item.response for item in lengths])),
        longest=float(np.mean([item.longest for item in lengths])),
    )


def _rates(steps: Sequence[Record], job: Job) -> PassRates | None:
    """Of the second half of the steps, since pass rates rise while a run learns."""
    late = [record for record in steps[len(steps) // 2 :] if record.get("downsample/generated")]
    means = [value for record in late if (value := record.get("downsample/reward/mean_all")) is not None]
    variances = [
        value for record in late if (value := record.get("downsample/group_variance/all")) is not None
    ]
    if not means or len(means) != len(variances):
        return None
    return beta_of_run(float(np.mean(means)), float(np.mean(variances)), job.n)


def _timer(steps: Sequence[Record], name: str) -> _Floats:
    return _array(record.get(f"timing_s/{name}") or 0.0 for record in steps)


def _array(values: object) -> _Floats:
    return np.fromiter(values, dtype=np.float64)  # type: ignore[call-overload,no-any-return]
