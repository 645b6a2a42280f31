"""Weights from trainer to rollout over gloo, for `separate_async` without GPUs: verl's own engines need NCCL or RDMA.

Imported by verl's workers through `rollout.checkpoint_engine.custom_backend_module`; `backend: gloo` picks it.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from pods_plugin.cpu.settings import timeout_s

_END = b"end"


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """The first training process broadcasts each weight to the workers of all rollout replicas.

    Name, shape and dtype go through a key-value store on loopback, the tensor over a gloo group of its own.

    Args:
        bucket_size: Not used: one weight at a time.
        is_master: Whether this is the first training process.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> int | None:  # type: ignore[override]
        """Open the store. Returns its port, from the first training process; None from the others."""
        if not self.is_master:
            return None
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # libuv cannot take over a socket that listens already.
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=_timeout(),
            wait_for_workers=False,
            use_libuv=False,
            master_listen_fd=listener.detach(),
        )
        return int(port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The first training process is rank 0, the rollout workers follow, other training processes stay out."""
        size = 1 + rollout_world_size
        return (
            {
                "rank": [0] + [-1] * (actor_wg_world_size - 1),
                "size": [size] * actor_wg_world_size,
                "port": [metadata[0]] * actor_wg_world_size,
            },
            {
                "rank": list(range(1, size)),
                "size": [size] * rollout_world_size,
                "port": [metadata[0]] * rollout_world_size,
            },
        )

    def init_process_group(self, rank: int, size: int, port: int) -> None:  # type: ignore[override]
        """Join the group, unless `rank` is negative."""
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=_timeout(), use_libuv=False)
        self._group = ProcessGroupGloo(self._store, rank, size, _timeout())

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Broadcast the weights; a process outside of the group only walks through them, which is collective."""
        number = 0
        for name, weight in weights:
            if self._group is None or self._store is None:
                continue
            tensor = weight.detach().to("cpu").contiguous()
            self._store.set(str(number), pickle.dumps((name, tuple(tensor.shape), tensor.dtype)))
            self._group.broadcast(tensor, 0).wait()
            number += 1
        if self._store is not None:
            self._store.set(str(number), _END)

    def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights as they come."""
        if self._group is None or self._store is None:
            raise RuntimeError("receive_weights before init_process_group")
        number = 0
        while (header := self._store.get(str(number))) != _END:
            name, shape, dtype = pickle.loads(header)  # of our own trainer, on loopback
            tensor = torch.empty(shape, dtype=dtype)
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor
            number += 1


def _timeout() -> timedelta:
    return timedelta(seconds=timeout_s())
