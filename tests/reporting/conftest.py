"""Synthetic metrics rows with fixed numbers, as verl's file logger writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]


def _plain_row(step: int, reward: float, **more: float) -> Row:
    data = {
        "critic/score/mean": reward,
        "timing_s/gen": 2.0,
        "timing_s/old_log_prob": 0.5,
        "timing_s/adv": 0.25,
        "timing_s/update_actor": 1.0,
        "timing_s/update_weights": 0.125,
        "timing_s/step": 4.0,
    }
    return {"step": step, "data": data | more}


def _pods_row(step: int, reward: float, **more: float) -> Row:
    return _plain_row(
        step,
        0.5,
        **{
            "downsample/generated": 64,
            "downsample/kept": 16,
            "downsample/reward/mean_all": reward,
            "downsample/reward/mean_kept": 0.45,
            "downsample/group_variance/all": 0.125,
            "downsample/group_variance/kept": 0.25,
            "downsample/select_s": 0.0625,
        },
        **more,
    )


@pytest.fixture
def plain_row() -> Callable[..., Row]:
    """A step of a run without down-sampling; 4 s, of which 0.125 s are in no phase."""
    return _plain_row


@pytest.fixture
def pods_row() -> Callable[..., Row]:
    """The same with down-sampling: 16 of 64 kept; `critic/score/mean` is 0.5, as of the kept rollouts."""
    return _pods_row


@pytest.fixture
def write() -> Callable[[Path, list[Row]], Path]:
    """Writes rows into a metrics file and returns it."""

    def write_rows(path: Path, rows: list[Row]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write_rows
