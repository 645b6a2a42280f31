"""Weights from a trainer of two processes to two rollout replicas over gloo; threads stand in for the processes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from pods_plugin.cpu.checkpoint_engine import GlooCheckpointEngine


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_weight_arrives_twice_over(replicas, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
    senders = [GlooCheckpointEngine(1 << 20, is_master=rank == 0) for rank in range(2)]
    receivers = [GlooCheckpointEngine(1 << 20) for _ in range(replicas)]
    engines = [*senders, *receivers]
    for sync in range(2):  # verl makes a new group for every sync
        weights = {
            "matrix": torch.arange(6.0).reshape(2, 3).t() + sync,  # not contiguous
            "half": torch.full((5,), 0.5 + sync, dtype=torch.bfloat16),
            "scalar": torch.tensor(float(sync)),
        }
        walked: list[str] = []

        def walk(rank: int, weights=weights, walked=walked):
            for name, weight in weights.items():
                if rank == 1:
                    walked.append(name)
                yield name, weight

        metadata = [engine.prepare() for engine in engines]
        actor, rollout = GlooCheckpointEngine.build_topology(2, replicas, metadata)
        with ThreadPoolExecutor(len(engines)) as pool:
            arguments = [
                {key: kwargs[key][i] for key in kwargs}
                for kwargs, count in ((actor, 2), (rollout, replicas))
                for i in range(count)
            ]
            joined = [
                pool.submit(engine.init_process_group, **kw)
                for engine, kw in zip(engines, arguments, strict=True)
            ]
            for future in joined:
                future.result(timeout=60)
            sent = [
                pool.submit(asyncio.run, engine.send_weights(walk(rank)))
                for rank, engine in enumerate(senders)
            ]
            received = [
                pool.submit(lambda engine=engine: dict(engine.receive_weights())) for engine in receivers
            ]
            for future in sent:
                future.result(timeout=60)
            for future in received:
                got = future.result(timeout=60)
                assert list(got) == list(weights)
                for name, weight in weights.items():
                    assert got[name].dtype == weight.dtype and torch.equal(got[name], weight)
        assert walked == list(weights)  # the other training process gathers along
        for engine in engines:
            engine.finalize()


def test_outside_of_a_group_nothing_is_received():
    with pytest.raises(RuntimeError, match="before init_process_group"):
        next(iter(GlooCheckpointEngine(1).receive_weights()))
