"""One Ray cluster with a TransferQueue serves every test that needs one. It listens on loopback only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import local_queue, local_ray

# The test process is an embedded run: verl is imported with the cpu platform, whatever this machine has.
try:
    from pods_plugin.cpu import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    os.environ["TRANSFER_QUEUE_ENABLE"] = "1"  # verl's run_ppo sets it for its workers
except ImportError:  # the light packages alone (no torch): only tests of those run
    pass

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data and cases beside the repository; tests that read it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED.name}/ beside the repository: the data of this test is not here")
    return SHARED


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    pytest.importorskip("ray")
    with local_ray(num_cpus=32, num_gpus=4, object_store_memory=300_000_000):
        yield


@pytest.fixture(scope="session")
def transfer_queue(ray_cluster: None) -> Iterator[object]:
    with local_queue() as tq:
        yield tq


@pytest.fixture
def queue(transfer_queue: object) -> Iterator[object]:
    """The TransferQueue, empty before and after."""
    _clear(transfer_queue)
    yield transfer_queue
    _clear(transfer_queue)


def _clear(tq: object) -> None:
    for partition, keys in (tq.kv_list() or {}).items():  # type: ignore[attr-defined]
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)  # type: ignore[attr-defined]
