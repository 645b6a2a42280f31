"""The summary: exact numbers and the whole printed text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pods_plugin.reporting import load_run, print_summary, summarise

VAL = "val-core/openai/gsm8k/acc/mean@1"


@pytest.fixture
def run(tmp_path, pods_row, write):
    rewards = [0.0, 0.125, 0.25, 0.125, 0.0, 0.5, 0.75, 0.875, 1.0, 0.75, 0.875, 0.625]
    rows = [pods_row(step, reward) for step, reward in enumerate(rewards, 1)]
    rows[5]["data"] |= {VAL: 0.5, "timing_s/testing": 2.0}
    rows[11]["data"] |= {
        VAL: 0.75,
        "timing_s/testing": 2.0,
        "timing_s/save_checkpoint": 1.0,
        "timing_s/step": 5.0,
    }
    write(tmp_path / "arith" / "metrics.jsonl", [{"step": 0, "data": {VAL: 0.25}}, *rows])
    return load_run(tmp_path / "arith")


def text_of(summary, encoding="utf-8", **places):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    names = ("checkpoint", "curve", "resume_command", "baseline_command")
    print_summary(Console(file=file), summary, **{"run_dir": "runs/arith", **dict.fromkeys(names), **places})
    file.flush()
    return "\n".join(line.rstrip() for line in file.buffer.getvalue().decode(encoding).split("\n"))


def test_numbers(run):
    summary = summarise(run)
    assert (summary.name, summary.steps, summary.window) == ("arith", 12, 5)
    assert (summary.reward_first, summary.reward_last) == (0.1, 0.825)
    assert (summary.reward_best, summary.best_step) == (1.0, 9)
    assert (summary.kept, summary.generated) == (12 * 16, 12 * 64)
    assert summary.seconds == {
        "generate": 24.0,
        "select": 0.75,
        "log-prob": 6.0,
        "update": 15.0,
        "sync weights": 1.5,
        "other": 0.75,
        "checkpoint": 1.0,
        "validate": 4.0,
    }
    assert summary.total_seconds == 53.0
    assert summary.shares["generate"] == 24 / 53
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert summary.validation == {"openai/gsm8k/acc": (0.25, 0.75)}


def test_printed(run):
    long_command = "pods train --config-dir recipes/cpu --config-name arithmetic " + "x" * 120
    printed = text_of(
        summarise(run),
        checkpoint="runs/arith/checkpoints/global_step_12",
        curve="runs/arith/curve.png",
        resume_command=long_command,
        baseline_command="pods train algorithm.downsample=null",
    )
    assert (
        printed
        == f"""
arith: 12 steps in 53s

  reward of all rollouts       0.100 → 0.825 (means of the first and last 5 steps)
  best step                    1.000 at step 9
  rollouts trained on          192 of 768 generated (25.0%)
  validation openai/gsm8k/acc  0.250 → 0.750

  time            seconds    a step    share
  generate           24.0     2.000    45.3%
  select              0.8     0.062     1.4%
  log-prob            6.0     0.500    11.3%
  update             15.0     1.250    28.3%
  sync weights        1.5     0.125     2.8%
  other               0.8     0.062     1.4%
  checkpoint          1.0     0.083     1.9%
  validate            4.0     0.333     7.5%

  run             runs/arith
  checkpoint      runs/arith/checkpoints/global_step_12
  learning curve  runs/arith/curve.png

  to continue:
    {long_command}

  the same without down-sampling:
    pods train algorithm.downsample=null
"""
    )


def test_short_runs_compare_halves(tmp_path, plain_row, write):
    write(tmp_path / "metrics.jsonl", [plain_row(step, step / 8) for step in range(1, 6)])
    summary = summarise(load_run(tmp_path))
    assert (summary.window, summary.reward_first, summary.reward_last) == (2, 0.1875, 0.5625)
    assert summary.kept is summary.generated is None
    printed = text_of(summary, encoding="ascii")
    assert "0.188 -> 0.562 (means of the first and last 2 steps)" in printed
    assert "rollouts trained on" not in printed
    assert "select" not in printed
    assert "continue" not in printed


def test_a_run_without_steps(tmp_path, write):
    write(tmp_path / "metrics.jsonl", [])
    summary = summarise(load_run(tmp_path))
    assert summary.reward_first is summary.reward_last is summary.reward_best is summary.best_step is None
    assert summary.total_seconds == 0.0
    assert set(summary.shares.values()) == {0.0}
    assert "0 steps in 0s" in text_of(summary)
