"""Runs read back from what verl's file logger wrote: `load_run` for a run, `MetricsTail` for a live one."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"

# Phase -> the `timing_s/*` it is made of. Selection is timed by our own stage and is not among verl's timers.
_TIMERS: dict[str, tuple[str, ...]] = {
    "generate": ("gen", "reward"),
    "log-prob": ("old_log_prob", "ref", "values"),
    "update": ("adv", "update_critic", "update_actor"),
    "sync weights": ("update_weights",),
    "checkpoint": ("save_checkpoint",),
    "validate": ("testing",),
}
TRAIN_PHASES = ("generate", "select", "log-prob", "update", "sync weights", "other")
PHASES = (*TRAIN_PHASES, "checkpoint", "validate")


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One row of a metrics file.

    Attributes:
        step: verl's global step; 0 is the validation before training.
        data: Metric name to value. A value that is not a number in the file (verl writes NaN as null) is NaN.
    """

    step: int
    data: Mapping[str, float]

    @property
    def is_training(self) -> bool:
        """Whether the row describes a training step; a row of `val-*` keys alone does not."""
        return any(not name.startswith("val-") for name in self.data)

    def get(self, name: str) -> float | None:
        """The value of a metric; None if the row does not have it or it is not finite."""
        value = self.data.get(name)
        return value if value is not None and math.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class ValidationPoint:
    """The validation results of one step: `val-core/<name>/mean@1` by name, such as `openai/gsm8k/acc`."""

    step: int
    scores: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, read.

    Attributes:
        name: The name of the folder.
        path: The folder (or the metrics file `load_run` was given).
        config: The resolved verl config, None if the run has no `config.yaml`.
        steps: The training steps, ascending, each step once.
        validations: The validation results, ascending, each step once.
    """

    name: str
    path: Path
    config: Mapping[str, Any] | None
    steps: list[StepRecord]
    validations: list[ValidationPoint]


def load_run(path: str | Path) -> Run:
    """Reads a run folder; a run that is still being written is fine.

    A resumed run repeats the steps after its last checkpoint, so a newer part of the metrics replaces every
    step of the older parts from its own first step on, those it has not reached again included.

    Args:
        path: `runs/NAME`, or a single metrics file that verl's file logger wrote anywhere.

    Returns:
        The run; without steps if nothing has been logged yet.

    Raises:
        FileNotFoundError: `path` is not a run.
    """
    path = Path(path)
    if path.is_file():
        return Run(path.stem, path, None, *_merge([parse_rows(path.read_bytes())]))
    parts, config_file = _parts(path), path / CONFIG_FILE
    if not parts and not config_file.exists():
        raise FileNotFoundError(f"{path} is not a run: expected a folder with {METRICS_FILE}, or such a file")
    config = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.exists() else None
    rows = _merge([parse_rows(part.read_bytes()) for part in parts])
    return Run(path.resolve().name, path, config, *rows)


def parse_rows(content: bytes) -> list[StepRecord]:
    """The rows of a metrics file in file order; a line that is half-written or no metrics row is skipped."""
    rows = (_parse_row(line) for line in content.split(b"\n"))
    return [row for row in rows if row is not None]


class MetricsTail:
    """Reads a metrics file while it is written.

    Example:
        tail = MetricsTail("runs/arithmetic/metrics.jsonl")
        while running():
            for record in tail.read():
                console.add(record)
    """

    # The end of what was read, compared on each read to notice that the file was started anew.
    _ANCHOR_BYTES = 256

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._offset = 0
        self._anchor = b""

    def read(self) -> list[StepRecord]:
        """The rows completed since the last call, in file order.

        Empty while the file does not exist. A file that was truncated or replaced is read from its start.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._anchor))
                if file.read(len(self._anchor)) != self._anchor:
                    self._offset, self._anchor = 0, b""
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            self._offset, self._anchor = 0, b""
            return []
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._anchor = (self._anchor + complete)[-self._ANCHOR_BYTES :]
        return parse_rows(complete)


def reward_all(record: StepRecord) -> float | None:
    """Mean reward of all generated rollouts; without down-sampling that is verl's `critic/score/mean`."""
    if is_downsampled(record):
        return record.get("downsample/reward/mean_all")
    return record.get("critic/score/mean")


def reward_kept(record: StepRecord) -> float | None:
    """Mean reward of the rollouts trained on; None without down-sampling."""
    return record.get("downsample/reward/mean_kept")


def variance_all(record: StepRecord) -> float | None:
    """Mean over groups of the reward variance of all rollouts; None without down-sampling."""
    return record.get("downsample/group_variance/all")


def variance_kept(record: StepRecord) -> float | None:
    """Mean over groups of the reward variance of the kept rollouts; None without down-sampling."""
    return record.get("downsample/group_variance/kept")


def rollouts(record: StepRecord) -> tuple[int, int] | None:
    """(kept, generated) rollouts of the step; None without down-sampling."""
    kept, generated = record.get("downsample/kept"), record.get("downsample/generated")
    return None if kept is None or generated is None else (round(kept), round(generated))


def is_downsampled(record: StepRecord) -> bool:
    """Whether the step was trained on a selection of its rollouts."""
    return any(name.startswith("downsample/") for name in record.data)


def phase_seconds(record: StepRecord) -> dict[str, float]:
    """Seconds of the step by phase, in the order of `PHASES`; 0 for a phase that did not happen.

    `generate` includes scoring, `log-prob` the reference policy and the critic's values, `update` the
    advantage. `other` is what is left of verl's `timing_s/step`, which covers all phases but `validate`.
    """
    seconds = {
        phase: sum(record.get(f"timing_s/{timer}") or 0.0 for timer in timers)
        for phase, timers in _TIMERS.items()
    }
    seconds["select"] = record.get("downsample/select_s") or 0.0
    named = sum(seconds.values()) - seconds["validate"]
    seconds["other"] = max(0.0, (record.get("timing_s/step") or 0.0) - named)
    return {phase: seconds[phase] for phase in PHASES}


def train_seconds(record: StepRecord) -> float:
    """Seconds of the step without checkpoint and validation, which are not part of learning."""
    seconds = phase_seconds(record)
    return sum(seconds[phase] for phase in TRAIN_PHASES)


def validation_scores(record: StepRecord) -> dict[str, float]:
    """The `val-core/*` metrics of a row, named as in `ValidationPoint`; empty without a validation."""
    prefix, suffix = "val-core/", "/mean@1"
    return {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in record.data.items()
        if name.startswith(prefix)
    }


def _parts(folder: Path) -> list[Path]:
    """The metrics files of a run, oldest first."""
    stem = Path(METRICS_FILE).stem
    numbered = [
        (int(match[1]), file)
        for file in folder.glob(f"{stem}.part*.jsonl")
        if (match := re.fullmatch(rf"{stem}\.part(\d+)\.jsonl", file.name))
    ]
    newest = folder / METRICS_FILE
    return [file for _, file in sorted(numbered)] + ([newest] if newest.exists() else [])


def _merge(parts: Iterable[list[StepRecord]]) -> tuple[list[StepRecord], list[ValidationPoint]]:
    steps: dict[int, dict[str, float]] = {}
    validations: dict[int, dict[str, float]] = {}
    for rows in parts:
        if rows:
            start = min(row.step for row in rows)
            # A first row of validation only is the one before training goes on: that training step stands.
            trained = min((row.step for row in rows if row.is_training), default=start + 1)
            steps = {step: data for step, data in steps.items() if step < trained}
            validations = {step: scores for step, scores in validations.items() if step < start}
        for row in rows:
            if row.is_training:
                steps.setdefault(row.step, {}).update(row.data)
            if scores := validation_scores(row):
                validations.setdefault(row.step, {}).update(scores)
    return (
        [StepRecord(step, steps[step]) for step in sorted(steps)],
        [ValidationPoint(step, validations[step]) for step in sorted(validations)],
    )


def _parse_row(line: bytes) -> StepRecord | None:
    try:
        row = json.loads(line)
    except ValueError:  # also what undecodable bytes raise
        return None
    step, data = (row.get("step"), row.get("data")) if isinstance(row, dict) else (None, None)
    if not isinstance(step, int) or not isinstance(data, dict):
        return None
    values = (
        (name, float(value) if isinstance(value, (int, float)) else math.nan) for name, value in data.items()
    )
    return StepRecord(step, dict(values))
