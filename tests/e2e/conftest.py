from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and arithmetic data."""
    from pods_plugin.cpu.models import build_tiny_model
    from pods_plugin.integration.data import write_parquet

    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder / "model", seed=0)
    write_parquet("pods/Arithmetic-v0", folder / "data", env_kwargs={"level": 0, "size": 64})
    return folder
