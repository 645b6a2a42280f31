"""Learning curves as PNG files. Needs matplotlib, an extra of the distribution; never needs a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pods_plugin.reporting import runs
from pods_plugin.reporting.runs import Run, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, made to be told apart with any colour vision.
_BLUE, _VERMILION, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_ORANGE, _SKY, _BLACK, _GREY = "#E69F00", "#56B4E9", "#000000", "#999999"
_RUN_COLOURS = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY, _BLACK)
_PHASE_COLOURS = dict(zip(runs.TRAIN_PHASES, (_SKY, _VERMILION, _ORANGE, _BLUE, _GREEN, _GREY), strict=True))
_ALL: dict[str, Any] = {"linewidth": 2.4}
_KEPT: dict[str, Any] = {"linewidth": 1.5, "linestyle": (0, (4, 2))}

_FloatArray = npt.NDArray[np.float64]
_Metric = Callable[[StepRecord], float | None]


def learning_curve(
    runs_: Sequence[Run],
    path: str | Path,
    *,
    x: Literal["step", "seconds"] = "step",
    title: str | None = None,
) -> Path:
    """Draws the curves of one or several runs into a PNG.

    Panels: reward of all rollouts (smoothed, the raw line faint) and of kept ones; group variance of all and
    of kept rollouts, if a run down-sampled; seconds by phase, over the steps for one run, means for several.

    Args:
        runs_: The runs, one colour each.
        path: The PNG to write; its folder is made.
        x: `step`, or `seconds` of training without checkpoints and validation.
        title: Above the figure; None is the name of the run if there is one only.

    Returns:
        `path`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no runs, or one has no training step, or `x` is neither of the two.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: Agg always, and no global state
    except ImportError:
        raise ImportError('a learning curve needs matplotlib: pip install "verl-pods[plot]"') from None
    if x not in ("step", "seconds"):
        raise ValueError(f'x is {x!r}: expected "step" or "seconds"')
    if not runs_:
        raise ValueError("no runs to draw: give at least one")
    if empty := [str(run.path) for run in runs_ if not run.steps]:
        raise ValueError(f"no training step yet, so nothing to draw: {', '.join(empty)}")

    single = len(runs_) == 1
    heights = [4, 3, 3] if any(runs.is_downsampled(step) for run in runs_ for step in run.steps) else [4, 3]
    figure = Figure(figsize=(9, 0.95 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_lines(axes[0], runs_, x, runs.reward_all, runs.reward_kept)
    axes[0].set_ylabel("reward")
    if len(heights) == 3:
        _draw_lines(axes[1], runs_, x, runs.variance_all, runs.variance_kept)
        axes[1].set_ylabel("group variance of reward")
    if single:
        _draw_phases(axes[-1], runs_[0], x)
    else:
        _draw_mean_phases(axes[-1], runs_)
    curves = axes if single else axes[:-1]
    left, right = zip(*(axis.get_xlim() for axis in curves), strict=True)
    for axis in curves:
        axis.set_xlim(min(left), max(right))
        axis.xaxis.get_major_locator().set_params(integer=True)
    curves[-1].set_xlabel(
        "training step" if x == "step" else "seconds of training (without checkpoints and validation)"
    )
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (axes[0], axes[-1]):
        handles, labels = axis.get_legend_handles_labels()
        if axis is axes[-1] and single:  # in the order of the stack
            handles, labels = handles[::-1], labels[::-1]
        axis.legend(handles, labels, fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title or (runs_[0].name if single else ""), fontsize=13, fontweight="bold")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=130)
    return path


def smooth(values: _FloatArray, window: int) -> _FloatArray:
    """Moving average over `window // 2` values to either side, as far as there are any; NaN is skipped."""
    half = window // 2
    parts = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return np.array([np.nanmean(part) if np.isfinite(part).any() else np.nan for part in parts])


def _positions(run: Run, x: str) -> _FloatArray:
    if x == "step":
        return np.array([record.step for record in run.steps], dtype=np.float64)
    return np.cumsum([runs.train_seconds(record) for record in run.steps])


def _colours(count: int) -> list[Any]:
    if count <= len(_RUN_COLOURS):
        return list(_RUN_COLOURS[:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, count)))


def _draw_lines(axis: Axes, runs_: Sequence[Run], x: str, metric_all: _Metric, metric_kept: _Metric) -> None:
    """All rollouts solid, kept ones dashed; a single run gets a second colour for the kept ones."""
    single, any_kept = len(runs_) == 1, False
    for run, run_colour in zip(runs_, _colours(len(runs_)), strict=True):
        positions = _positions(run, x)
        for metric, style, name in (
            (metric_all, _ALL, "all rollouts"),
            (metric_kept, _KEPT, "kept rollouts"),
        ):
            values = np.array([np.nan if (value := metric(step)) is None else value for step in run.steps])
            if not np.isfinite(values).any():
                continue
            kept = style is _KEPT
            any_kept |= kept
            colour = _VERMILION if single and kept else run_colour
            label = name if single else "" if kept else run.name
            marker = "o" if len(values) < 12 else ""
            axis.plot(positions, values, color=colour, alpha=0.25, linewidth=0.9)
            axis.plot(
                positions,
                smooth(values, len(values) // 12),
                color=colour,
                label=label,
                marker=marker,
                **style,
            )
    if not single and any_kept:
        axis.plot([], [], color="0.3", label="all rollouts", **_ALL)
        axis.plot([], [], color="0.3", label="kept rollouts", **_KEPT)
    if axis.dataLim.y0 >= 0:
        axis.set_ylim(bottom=0)
    axis.margins(x=0.01)
    axis.grid(alpha=0.25)


def _draw_phases(axis: Axes, run: Run, x: str) -> None:
    """Stacked seconds of each step. Checkpoints and validations are left out: their spikes hide the rest."""
    positions = _positions(run, x)
    starts = np.concatenate([[0.0], positions[:-1]]) if x == "seconds" else positions - 0.5
    widths = positions - starts if x == "seconds" else 1.0
    phases = [runs.phase_seconds(record) for record in run.steps]
    total = np.zeros(len(phases))
    for phase, colour in _PHASE_COLOURS.items():
        seconds = np.array([step[phase] for step in phases])
        if seconds.any():
            axis.bar(starts, seconds, widths, total, align="edge", color=colour, label=phase, linewidth=0)
            total += seconds
    longest, top = total.max(), np.percentile(total, 90) * 1.5
    if 0 < top < longest:  # one slow step, mostly the first, must not flatten the others
        axis.set_ylim(0, top)
        note = f"cut off: the longest step took {longest:.1f} s"
        axis.text(0.99, 0.98, note, transform=axis.transAxes, ha="right", va="top", fontsize=9, color="0.3")
    axis.set_ylabel("seconds a step")
    axis.margins(x=0.01)


def _draw_mean_phases(axis: Axes, runs_: Sequence[Run]) -> None:
    """One stacked bar a run: the mean seconds a step in each phase."""
    phases = [[runs.phase_seconds(record) for record in run.steps] for run in runs_]
    left = np.zeros(len(runs_))
    for phase, colour in _PHASE_COLOURS.items():
        means = np.array([np.mean([step[phase] for step in steps]) for steps in phases])
        if means.any():
            axis.barh(range(len(runs_)), means, 0.65, left, color=colour, label=phase)
            left += means
    axis.set_yticks(range(len(runs_)), [run.name for run in runs_])
    axis.invert_yaxis()
    axis.set_xlabel("mean seconds a step")
