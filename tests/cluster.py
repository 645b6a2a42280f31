"""A Ray cluster of one's own with a TransferQueue, on loopback only: of the tests, and of benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Ray with its files in a temporary folder; `options` go to ray.init."""
    import ray

    with tempfile.TemporaryDirectory(prefix="pods-", ignore_cleanup_errors=True) as temp:
        ray.init(address="local", _temp_dir=temp, include_dashboard=False, **options)
        yield
        ray.shutdown()


@contextmanager
def local_queue() -> Iterator[Any]:
    """The module transfer_queue, connected to a queue in the running Ray cluster."""
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()
