"""What a run reports: metrics files read back, a line a step, the summary at the end, the curves."""

from pods_plugin.reporting.console import StepConsole
from pods_plugin.reporting.figures import learning_curve
from pods_plugin.reporting.runs import MetricsTail, Run, StepRecord, ValidationPoint, load_run
from pods_plugin.reporting.summary import Summary, print_summary, summarise

__all__ = [
    "MetricsTail",
    "Run",
    "StepConsole",
    "StepRecord",
    "Summary",
    "ValidationPoint",
    "learning_curve",
    "load_run",
    "print_summary",
    "summarise",
]
