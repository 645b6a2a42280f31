"""The error of the planner, and the nearest name for what was misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """A plan that cannot be made; its text is the one line that the user sees."""


def nearest(name: str, names: Iterable[str]) -> str:
    """`; nearest: NAME` for a misspelt name, or the empty string."""
    known = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"; nearest: {known[found[0]]}" if found else ""
