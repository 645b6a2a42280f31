"""The embedded agent loops: what they leave out, and that verl still does it."""

from __future__ import annotations

import inspect
import types

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from pods_plugin.cpu import agent_loop


class Loop:
    def __init__(self, **kwargs):
        self.kwargs = kwargs


def test_an_agent_loop_is_made_by_calling_its_class():
    module = types.SimpleNamespace()
    agent_loop.instantiate_directly(module)
    target = f"{Loop.__module__}.Loop"
    instance = module.hydra.utils.instantiate(config={"_target_": target}, tokenizer="t")
    assert instance.kwargs == {"tokenizer": "t"}
    configured = module.hydra.utils.instantiate(config={"_target_": target, "limit": 3}, tokenizer="t")
    assert configured.kwargs == {"tokenizer": "t", "limit": 3}


def test_guard_verl_still_goes_through_hydra_for_each_rollout():
    source = inspect.getsource(agent_loop.EmbeddedAgentLoopWorker.__mro__[1]._run_agent_loop)
    assert "hydra.utils.instantiate(" in source
    module_source = inspect.getsource(agent_loop.agent_loop_module)
    assert module_source.count("hydra.utils.instantiate(") == 1
    assert "compute_score.remote(data)" in module_source


@pytest.mark.parametrize(
    ("mode", "validate", "seeded"),
    [("sync", False, True), ("sync", True, False), ("colocate_async", False, False)],
)
def test_a_session_has_its_own_seed_where_prompts_have_repeatable_names(monkeypatch, mode, validate, seeded):
    import asyncio

    from omegaconf import OmegaConf

    seen = []

    async def record(self, sampling_params, trajectory, **kwargs):
        seen.append((sampling_params.get("seed"), kwargs))

    monkeypatch.setattr(agent_loop.EmbeddedAgentLoopWorker.__mro__[1], "_run_agent_loop", record)
    worker = object.__new__(agent_loop.EmbeddedAgentLoopWorker)
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"seed": 3}}})
    worker._repeatable = agent_loop.repeatable(
        OmegaConf.create(
            {
                "trainer": {"v1": {"trainer_mode": mode}},
                "data": {"seed": 0},
                "algorithm": {"downsample": "max_variance"},
            }
        )
    )

    async def sessions():
        for uid, session_id in (("a", 0), ("a", 1), ("b", 0), ("a", 0)):
            await worker._run_agent_loop(
                {"top_p": 1.0}, {"validate": validate}, uid=uid, session_id=session_id, agent_name="x"
            )

    asyncio.run(sessions())
    seeds = [seed for seed, _ in seen]
    assert seen[1][1] == {"uid": "a", "session_id": 1, "agent_name": "x"}
    if not seeded:
        assert seeds == [None] * 4
    else:
        assert seeds[0] == seeds[3] and len(set(seeds)) == 3


class Balancer:
    def __init__(self, servers):
        self.servers, self.calls = servers, 0
        self.get_all_servers = types.SimpleNamespace(remote=self._all)

    async def _all(self):
        return list(self.servers)


class Client:
    def __init__(self, servers):
        self._load_balancer, self.released = Balancer(servers), []

    async def _acquire_server(self, request_id, **extra):
        self._load_balancer.calls += 1
        return self._load_balancer.servers[0], "handle"

    def _release_server(self, server_id, request_id=None):
        self.released.append(server_id)


@pytest.mark.parametrize(("servers", "asked"), [(["a"], 1), (["a", "b"], 3)])
def test_one_server_is_asked_for_once_and_several_are_balanced(servers, asked):
    import asyncio

    client = agent_loop._without_routing(Client(servers))

    async def three():
        return [await client._acquire_server(str(i)) for i in range(3)]

    assert asyncio.run(three()) == [("a", "handle")] * 3
    assert client._load_balancer.calls == asked
    client._release_server("a")
    assert client.released == ([] if len(servers) == 1 else ["a"])
