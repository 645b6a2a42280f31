"""What is on screen while a run goes on: one line a training step, one short line a validation."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections import deque
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from pods_plugin.reporting import runs
from pods_plugin.reporting.runs import StepRecord

_HEADER_EVERY = 25
_PLAIN_WIDTH = 100  # of a log file or a pipe, where there is no terminal to fit
_RECENT_STEPS = 15


class _Column(NamedTuple):
    group: str
    title: str
    short: str  # the title where room is scarce
    width: int
    rank: int  # in a narrow terminal the highest rank goes first; rank 0 stays


class StepConsole:
    """Prints training steps as aligned lines, into a terminal or a file.

    Columns that a narrow terminal has no room for are left out. Without down-sampling the columns about the
    kept rollouts show "-". Where the encoding of the output is not a Unicode one, only ASCII is printed.

    Args:
        console: Where to print.
        total_steps: The step the run ends at.
        start_step: The step the run resumed from; 0 for a fresh run.
        width: Columns to fit; None is the width of the terminal, 100 if `console` is none.
    """

    def __init__(self, console: Console, total_steps: int, start_step: int = 0, *, width: int | None = None):
        self._console = console
        self._total_steps = total_steps
        self._start_step = start_step
        self._arrow = "->" if console.options.ascii_only else "→"
        self._width = width or (console.width if console.is_terminal else max(console.width, _PLAIN_WIDTH))
        self._columns, self._gap = self._layout()
        self._lines = 0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pauses: list[float] = []  # seconds of checkpoint and validation, one entry a step

    def add(self, record: StepRecord) -> None:
        """Prints a row of the metrics file: the line of the step, if it is one, and of its validation."""
        if self._start_step:
            self._print(f"resumed after step {self._start_step} of {self._total_steps}")
            self._start_step = 0
        if record.is_training:
            seconds = runs.phase_seconds(record)
            self._recent.append(runs.train_seconds(record))
            self._pauses.append(seconds["checkpoint"] + seconds["validate"])
            if self._lines % _HEADER_EVERY == 0:
                self._print_header()
            self._lines += 1
            self._print_step(record, seconds)
        if scores := runs.validation_scores(record):
            # A no-break space, which textwrap does not break at, keeps a score on the line of its name.
            results = ", ".join(f"{name}\xa0{format_value(score)}" for name, score in scores.items())
            text = f"validation at step {record.step}: {results}"
            wrapped = textwrap.wrap(
                text, self._width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            for line in wrapped:
                self._print(line.replace("\xa0", " "), "cyan")

    def seconds_left(self, step: int) -> float:
        """Estimated seconds until the run ends, after `step`; at least one step must have been added.

        The median of the recent steps, so that one slow step changes little, plus what checkpoints and
        validations have taken a step on average so far.
        """
        a_step = statistics.median(self._recent) + statistics.fmean(self._pauses)
        return max(0, self._total_steps - step) * a_step

    def _layout(self) -> tuple[list[_Column], int]:
        """Two spaces and full titles if they fit, else one space and short titles, else fewer columns."""
        variance = f"all {self._arrow} kept"
        columns = [
            _Column("", "step", "step", 2 * len(str(self._total_steps)) + 1, 0),
            _Column("reward", "all", "all", 6, 0),
            _Column("reward", "kept", "kept", 6, 1),
            _Column("group variance", variance, variance, 14, 3),
            _Column("rollouts", "kept/made", "kept/made", 9, 4),
            _Column("seconds", "generate", "gen", 5, 5),
            _Column("seconds", "select", "select", 5, 8),
            _Column("seconds", "log-prob", "logp", 5, 7),
            _Column("seconds", "update", "update", 5, 6),
            _Column("time", "left", "left", 6, 2),
        ]
        for rank in range(8, -1, -1):
            for gap in (2, 1):
                shown = [
                    column._replace(width=max(column.width, len(column.title if gap == 2 else column.short)))
                    for column in columns
                    if column.rank <= rank
                ]
                if sum(column.width + gap for column in shown) - gap <= self._width:
                    return shown, gap
        return shown, gap

    def _print_header(self) -> None:
        groups = []
        for group, members in itertools.groupby(self._columns, key=lambda column: column.group):
            widths = [column.width for column in members]
            width = sum(widths) + self._gap * (len(widths) - 1)
            groups.append(group.rjust(width) if len(widths) == 1 else group.center(width))
        self._print((" " * self._gap).join(groups), "dim")
        self._print_cells(
            [column.title if self._gap == 2 else column.short for column in self._columns], "bold"
        )

    def _print_step(self, record: StepRecord, seconds: dict[str, float]) -> None:
        rollouts = runs.rollouts(record)
        variances = [format_value(value) for value in (runs.variance_all(record), runs.variance_kept(record))]
        cells = {
            "step": f"{record.step}/{self._total_steps}",
            "all": format_value(runs.reward_all(record)),
            "kept": format_value(runs.reward_kept(record)),
            f"all {self._arrow} kept": "-" if "-" in variances else f" {self._arrow} ".join(variances),
            "kept/made": f"{rollouts[0]}/{rollouts[1]}" if rollouts else "-",
            "generate": _format_phase(seconds["generate"]),
            "select": _format_phase(seconds["select"]) if runs.is_downsampled(record) else "-",
            "log-prob": _format_phase(seconds["log-prob"]),
            "update": _format_phase(seconds["update"]),
            "left": format_duration(self.seconds_left(record.step)),
        }
        self._print_cells([cells[column.title] for column in self._columns])

    def _print_cells(self, cells: list[str], style: str = "") -> None:
        aligned = [cell.rjust(column.width) for cell, column in zip(cells, self._columns, strict=True)]
        self._print((" " * self._gap).join(aligned), style)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text.rstrip(), style), soft_wrap=True)


def format_value(value: float | None) -> str:
    """A reward or a variance, short; "-" for None."""
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: `45s`, `3m 52s`, `1h 05m`, `2d 03h`."""
    whole = round(seconds)
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{smaller}"
    return f"{whole}s"


def _format_phase(seconds: float) -> str:
    """Seconds in at most five characters, with the digits that matter."""
    digits = 3 if seconds < 0.0995 else 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:.{digits}f}"
