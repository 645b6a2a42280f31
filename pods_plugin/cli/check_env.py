"""`pods check-env`: the checks of pods_envs.checking as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pods_envs.checking import FAILED, OK, check_environment
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {OK: "green", FAILED: "bold red"}


def check_env(env_id: str, env_kwargs: Mapping[str, Any], *, seconds: float, console: Console) -> bool:
    """Prints a line for each check of an environment; returns whether none failed."""
    table = Table("check", "result", "what was seen", title=Text(env_id), title_justify="left")
    failed = 0
    with console.status("checking"):
        for finding in check_environment(env_id, env_kwargs, seconds=seconds):
            failed += finding.status == FAILED
            style = STYLES.get(finding.status, "yellow")
            table.add_row(finding.check, Text(finding.status, style), Text(finding.detail))
    console.print(table)
    if failed:
        console.print(f"{failed} of {table.row_count} checks FAILED")
    return not failed
