"""What is printed when a run is over: what was learned, what it cost, where things are, what to do next."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pods_plugin.reporting import runs
from pods_plugin.reporting.console import format_duration, format_value
from pods_plugin.reporting.runs import Run

_WINDOW = 5


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run in a few numbers.

    Attributes:
        name: Name of the run.
        steps: Training steps recorded.
        window: Steps that `reward_first` and `reward_last` are means of: 5, half of a run shorter than 10.
        reward_first: Mean reward of all rollouts over the first `window` steps; None if never recorded.
        reward_last: The same over the last `window` steps.
        reward_best: The highest reward of all rollouts in one step.
        best_step: The (first) step that had it.
        kept: Rollouts trained on, in total; None without down-sampling.
        generated: Rollouts generated, in total; None without down-sampling.
        seconds: Seconds in each phase, in the order of `runs.PHASES`.
        validation: Name of a validation score to its first and last value.
    """

    name: str
    steps: int
    window: int
    reward_first: float | None
    reward_last: float | None
    reward_best: float | None
    best_step: int | None
    kept: int | None
    generated: int | None
    seconds: Mapping[str, float]
    validation: Mapping[str, tuple[float, float]]

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps, validations between them included."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Share of `total_seconds` in each phase; all 0 if nothing was timed."""
        total = self.total_seconds or 1.0
        return {phase: seconds / total for phase, seconds in self.seconds.items()}


def summarise(run: Run) -> Summary:
    """Computes the summary of a run; of one without steps, too."""
    rewards = {record.step: reward for record in run.steps if (reward := runs.reward_all(record)) is not None}
    values = list(rewards.values())
    window = min(_WINDOW, max(1, len(values) // 2))
    best_step = max(rewards, key=lambda step: rewards[step]) if rewards else None
    rollouts = [pair for record in run.steps if (pair := runs.rollouts(record)) is not None]
    phases = [runs.phase_seconds(record) for record in run.steps]
    validation: dict[str, tuple[float, float]] = {}
    for point in run.validations:
        for name, score in point.scores.items():
            validation[name] = (validation.get(name, (score, score))[0], score)
    return Summary(
        name=run.name,
        steps=len(run.steps),
        window=window,
        reward_first=statistics.fmean(values[:window]) if values else None,
        reward_last=statistics.fmean(values[-window:]) if values else None,
        reward_best=None if best_step is None else rewards[best_step],
        best_step=best_step,
        kept=sum(kept for kept, _ in rollouts) if rollouts else None,
        generated=sum(generated for _, generated in rollouts) if rollouts else None,
        seconds={phase: sum(seconds[phase] for seconds in phases) for phase in runs.PHASES},
        validation=validation,
    )


def print_summary(
    console: Console,
    summary: Summary,
    *,
    run_dir: str | Path,
    checkpoint: str | Path | None,
    curve: str | Path | None,
    resume_command: str | None,
    baseline_command: str | None,
) -> None:
    """Prints the end of a run; what is None is left out.

    Args:
        console: Where to print.
        summary: Of the run.
        run_dir: The run folder.
        checkpoint: The folder of the last checkpoint.
        curve: The learning curve PNG.
        resume_command: Goes on with the run.
        baseline_command: Does the same run without down-sampling.
    """

    def line(text: str = "", style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)  # a command stays one line, to be copied

    def change(first: float | None, last: float | None) -> str:
        return f"{format_value(first)} {'->' if console.options.ascii_only else '→'} {format_value(last)}"

    facts = [
        (f"validation {name}", change(first, last)) for name, (first, last) in summary.validation.items()
    ]
    if summary.kept is not None and summary.generated:
        share = f"{summary.kept / summary.generated:.1%}"
        facts.insert(0, ("rollouts trained on", f"{summary.kept} of {summary.generated} generated ({share})"))
    if summary.reward_first is not None:
        reward = change(summary.reward_first, summary.reward_last)
        facts = [
            ("reward of all rollouts", f"{reward} (means of the first and last {summary.window} steps)"),
            ("best step", f"{format_value(summary.reward_best)} at step {summary.best_step}"),
            *facts,
        ]
    places = [("run", run_dir), ("checkpoint", checkpoint), ("learning curve", curve)]
    commands = [("to continue", resume_command), ("the same without down-sampling", baseline_command)]

    line()
    line(f"{summary.name}: {summary.steps} steps in {format_duration(summary.total_seconds)}", "bold")
    line()
    label_width = max((len(label) for label, _ in facts), default=0)
    for label, fact in facts:
        line(f"  {label:<{label_width}}  {fact}")
    line()
    console.print(_phase_table(summary))
    line()
    for label, place in places:
        if place is not None:
            line(f"  {label:<14}  {place}")
    for label, command in commands:
        if command is not None:
            line(f"\n  {label}:")
            line(f"    {command}", "bold")


def _phase_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("  time", no_wrap=True)
    for title in ("seconds", "a step", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    for phase, seconds in summary.seconds.items():
        if seconds:
            a_step, share = seconds / summary.steps, summary.shares[phase]
            table.add_row(f"  {phase}", f"{seconds:.1f}", f"{a_step:.3f}", f"{share:.1%}")
    return table
