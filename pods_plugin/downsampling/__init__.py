"""Which rollouts of a group to train on: rules, batched selection, configuration and metrics. Pure numpy."""

from pods_plugin.downsampling.config import DownsampleConfig
from pods_plugin.downsampling.metrics import downsample_metrics
from pods_plugin.downsampling.rules import DownsampleError, register_rule, rule_names
from pods_plugin.downsampling.selection import select, select_groups

__all__ = [
    "DownsampleConfig",
    "DownsampleError",
    "downsample_metrics",
    "register_rule",
    "rule_names",
    "select",
    "select_groups",
]
