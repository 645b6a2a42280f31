"""Tests of the embedded default. They need its stack; each process that runs them has it activated."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")


@pytest.fixture(scope="session", autouse=True)
def embedded() -> Iterator[None]:
    import torch
    import verl  # noqa: F401

    from pods_plugin.cpu import activate

    assert os.environ.get("VERL_PLATFORM") == "cpu"  # tests/conftest.py
    activate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tiny model is not worth a second one
    yield
    torch.set_num_threads(threads)
