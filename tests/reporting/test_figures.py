"""The learning curve: a PNG comes out of every kind of run, with the right panels, labels and errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pods_plugin.reporting import learning_curve, load_run
from pods_plugin.reporting.figures import smooth

figure_module = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def pods_run(tmp_path, pods_row, write):
    write(tmp_path / "pods" / "metrics.jsonl", [pods_row(step, step / 40) for step in range(1, 31)])
    return load_run(tmp_path / "pods")


@pytest.fixture
def plain_run(tmp_path, plain_row, write):
    write(tmp_path / "plain" / "metrics.jsonl", [plain_row(step, step / 10) for step in range(1, 9)])
    return load_run(tmp_path / "plain")


@pytest.fixture
def saved(monkeypatch):
    """The figures saved during the test."""
    figures = []
    original = figure_module.Figure.savefig

    def savefig(figure, *args, **kwargs):
        figures.append(figure)
        return original(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", savefig)
    return figures


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


@pytest.mark.parametrize("x", ["step", "seconds"])
def test_one_run(pods_run, tmp_path, saved, x):
    path = learning_curve([pods_run], tmp_path / "new" / "curve.png", x=x)
    assert path.read_bytes().startswith(b"\x89PNG")
    reward, variance, seconds = saved[0].axes
    assert saved[0].get_suptitle() == "pods"
    assert labels(reward) == ["all rollouts", "kept rollouts"]
    raw, smoothed, *_ = reward.lines
    last = 30 if x == "step" else 30 * 4.0
    assert (raw.get_xdata()[-1], raw.get_ydata()[-1]) == (last, 0.75)
    assert smoothed.get_linewidth() > raw.get_linewidth()
    assert list(variance.lines[2].get_ydata()) == [0.25] * 30
    assert labels(seconds) == ["other", "sync weights", "update", "log-prob", "select", "generate"]
    assert max(bar.get_y() + bar.get_height() for bar in seconds.patches) == pytest.approx(4.0)
    assert reward.get_xlim() == seconds.get_xlim()


def test_several_runs_have_a_colour_each(pods_run, plain_run, tmp_path, saved):
    learning_curve([pods_run, plain_run], tmp_path / "curve.png", title="both")
    reward, variance, seconds = saved[0].axes
    assert saved[0].get_suptitle() == "both"
    assert labels(reward) == ["pods", "plain", "all rollouts", "kept rollouts"]
    named = {line.get_label(): line.get_color() for line in reward.lines}
    assert named["pods"] != named["plain"]
    assert {line.get_color() for line in variance.lines[:4]} == {named["pods"]}
    assert [tick.get_text() for tick in seconds.get_yticklabels()] == ["pods", "plain"]


def test_without_down_sampling_there_is_no_variance_panel(plain_run, tmp_path, saved):
    learning_curve([plain_run], tmp_path / "curve.png")
    assert [axis.get_ylabel() for axis in saved[0].axes] == ["reward", "seconds a step"]
    assert labels(saved[0].axes[0]) == ["all rollouts"]


def test_a_slow_first_step_is_cut_off_and_the_figure_says_so(tmp_path, plain_row, write, saved):
    rows = [
        plain_row(step, 0.5, **({"timing_s/gen": 60.0, "timing_s/step": 62.0} if step == 1 else {}))
        for step in range(1, 21)
    ]
    write(tmp_path / "metrics.jsonl", rows)
    learning_curve([load_run(tmp_path)], tmp_path / "curve.png")
    seconds = saved[0].axes[-1]
    assert seconds.get_ylim() == (0.0, 6.0)
    assert [text.get_text() for text in seconds.texts] == ["cut off: the longest step took 62.0 s"]


def test_many_runs_and_runs_without_any_known_metric(tmp_path, write, plain_run, saved):
    write(tmp_path / "bare.jsonl", [{"step": 1, "data": {"training/global_step": 1}}])
    learning_curve([load_run(tmp_path / "bare.jsonl")], tmp_path / "bare.png")
    learning_curve([plain_run] * 12, tmp_path / "many.png")
    colours = {tuple(line.get_color()) for line in saved[1].axes[0].lines}
    assert len(colours) == 12


def test_errors(plain_run, tmp_path, write):
    write(tmp_path / "empty.jsonl", [])
    empty = load_run(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"no training step yet, so nothing to draw: .*empty\.jsonl"):
        learning_curve([plain_run, empty], tmp_path / "curve.png")
    with pytest.raises(ValueError, match="give at least one"):
        learning_curve([], tmp_path / "curve.png")
    with pytest.raises(ValueError, match='x is \'time\': expected "step" or "seconds"'):
        learning_curve([plain_run], tmp_path / "curve.png", x="time")
    assert not (tmp_path / "curve.png").exists()


def test_without_matplotlib_one_line_says_what_to_install(plain_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r'^a learning curve needs matplotlib: pip install "verl-pods\[plot\]"$'
    ):
        learning_curve([plain_run], tmp_path / "curve.png")


def test_smooth():
    nan = np.nan
    np.testing.assert_allclose(smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3.0, 3.0, 3.0])
    np.testing.assert_allclose(smooth(np.array([nan, 2.0, nan, nan, nan]), 2), [2.0, 2.0, 2.0, nan, nan])
    np.testing.assert_allclose(smooth(np.array([1.0, 5.0]), 1), [1.0, 5.0])
