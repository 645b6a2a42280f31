"""The plan as a PNG. Needs matplotlib, an extra of the distribution; never needs a display."""

from __future__ import annotations

from pathlib import Path

from pods_plugin.planning.choose import Situation
from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.steptime import PHASES

# Okabe and Ito's palette, as in the learning curves
_COLOURS = dict(zip(PHASES, ("#56B4E9", "#E69F00", "#CC79A7", "#0072B2", "#999999"), strict=True))
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")


def draw_plan(situation: Situation, path: Path, title: str) -> Path:
    """Draws seconds a step by phase for GRPO and PODS, and the signal a second over n.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError('--plot needs matplotlib: pip install "verl-pods[plot]"') from None
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[2, 3])

    settings = situation.compared()
    left = [0.0] * len(settings)
    for phase, colour in _COLOURS.items():
        seconds = [setting.seconds[phase] for setting in settings]
        if any(seconds):
            upper.barh(range(len(settings)), seconds, 0.65, left, color=colour, label=phase)
            left = [start + more for start, more in zip(left, seconds, strict=True)]
    upper.set_yticks(range(len(settings)), [setting.name for setting in settings])
    upper.invert_yaxis()
    upper.set_xlabel("predicted seconds a step")
    if situation.job.engine.separate:
        upper.set_title("generation runs beside the rest", fontsize=9)

    best = sorted(situation.best_of_all(), key=lambda setting: setting.m)
    for colour, setting in zip(_LINES, best, strict=False):
        line = situation.by_n(setting.m)
        lower.plot(
            [point.n for point in line],
            [point.rate for point in line],
            color=colour,
            label=f"m = {setting.m}",
        )
        lower.plot([setting.n], [setting.rate], "o", color=colour)
    lower.set_xscale("log", base=2)
    lower.set_xlabel(f"n, rollouts generated a prompt (pass rates {situation.rates})")
    lower.set_ylabel("m x kept variance x prompts / second")
    lower.set_ylim(bottom=0)
    lower.grid(alpha=0.25)
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=130)
    return path
