"""Agent loops with less ceremony for each rollout: verl's own, minus what costs more than a tiny model's generation.

verl's hook `rollout.agent.agent_loop_manager_class` brings this in (config/cpu/embedded.yaml). A rollout of a tiny
model takes well under a millisecond to generate, and took 8 to 10 in the processes around it; half of that is saved
here.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import hydra
import ray
from verl.experimental.agent_loop import agent_loop as agent_loop_module
from verl.experimental.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ


class EmbeddedAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc, name-defined]
    """verl's worker, with the reward computed in its own process and a single rollout server asked without routing."""

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: list[Any] | None = None,
    ) -> None:
        instantiate_directly(agent_loop_module)
        super().__init__(
            config,
            _without_routing(llm_client),
            teacher_client,
            [_LocalReward(config)] if reward_loop_worker_handles else reward_loop_worker_handles,
        )
        self._repeatable = repeatable(config)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        uid: str,
        session_id: int,
        **kwargs: Any,
    ) -> Any:
        if self._repeatable and not trajectory["validate"]:
            # By name, not by arrival: else workers that overtake each other swap the rollouts of two sessions.
            seed = session_seed(int(self.config.actor_rollout_ref.rollout.seed), uid, session_id)
            sampling_params = {**sampling_params, "seed": seed}
        return await super()._run_agent_loop(
            sampling_params, trajectory, uid=uid, session_id=session_id, **kwargs
        )


class EmbeddedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of EmbeddedAgentLoopWorker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(EmbeddedAgentLoopWorker)


def repeatable(config: Any) -> bool:
    """Whether the trainer names its prompts the same in every run, see DownsamplingMixin._name_prompts."""
    return (
        config.trainer.v1.trainer_mode == "sync"
        and config.data.get("seed") is not None
        and config.algorithm.get("downsample") is not None
    )


def session_seed(seed: int, uid: str, session_id: int) -> int:
    """The sampling seed of one session, in [0, 2**63)."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _without_routing(client: Any) -> Any:
    """The client, which with one server asks it directly instead of a load balancer twice for each rollout."""

    class DirectClient(type(client)):  # type: ignore[misc]
        _only: tuple[str, Any] | None = None

        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            if self._only is not None:
                return self._only
            server = await super()._acquire_server(request_id, **extra)
            if len(await self._load_balancer.get_all_servers.remote()) == 1:
                self._only = server
            return server

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            if self._only is None:
                super()._release_server(server_id, request_id)

    client.__class__ = DirectClient
    return client


class _LocalReward:
    """Has the one method of a reward worker's handle that an agent loop calls, and computes it here.

    Spares a process hop with a pickled batch for each rollout. The reward function itself runs where verl runs it, in
    a thread or, if it is a coroutine, in the event loop.
    """

    def __init__(self, config: Any) -> None:
        self._worker = RewardLoopWorker(config)
        self.compute_score = types.SimpleNamespace(remote=self._worker.compute_score)


def instantiate_directly(module: Any) -> None:
    """Makes agent loops by calling their class.

    PATCH of verl, in agent loop workers only: verl makes one for each rollout through hydra.utils.instantiate, whose
    copying and merging of configs was 39% of the worker's time. A config that has more than a `_target_` still goes
    that way. Guard: tests/cpu/test_agent_loop.py.
    """
    original: Callable[..., Any] = hydra.utils.instantiate
    classes: dict[str, Any] = {}

    def instantiate(config: Mapping[str, Any], **kwargs: Any) -> Any:
        if set(config) != {"_target_"}:
            return original(config=config, **kwargs)
        name = config["_target_"]
        if name not in classes:
            classes[name] = hydra.utils.get_class(name)
        return classes[name](**kwargs)

    module.hydra = types.SimpleNamespace(utils=types.SimpleNamespace(instantiate=instantiate))
