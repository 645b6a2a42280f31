"""Every patch of verl and torch that the embedded run needs, one function each.

Nothing here runs unless `pods_plugin.cpu.activate()` was called. Each patch waits for the import of the
module that it changes, so that a Ray worker which never trains does not import the training stack.
tests/cpu/test_patches.py shows for each that the unpatched code still fails the way described here: when such
a test fails, the patch can go.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest import mock

import wrapt

from pods_plugin.cpu.settings import cpu_threads, timeout_s

ROLLOUT_NAME = "hf"


def install() -> None:
    """Install all patches in this process, now or when their module is imported."""
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "verl.utils.distributed": patch_process_group,
        "verl.workers.rollout.base": patch_rollout_registry,
        "verl.workers.rollout.replica": register_replica,
        "verl.workers.engine.fsdp.transformer_impl": patch_fsdp_engine,
        "verl.trainer.ppo.v1": embed_trainers,
    }
    for name, hook in hooks.items():
        wrapt.register_post_import_hook(hook, name)


def patch_process_group(module: ModuleType) -> None:
    """Replace `initialize_global_process_group_ray`.

    verl asks for the backend `cpu:gloo,{device}:{backend}`, here `cpu:gloo,cpu:gloo`: torch refuses the
    duplicate. It also passes no time-out, so that a collective waits for ever for a peer that died; and
    torch's default store listens on every interface of the machine.
    """

    @functools.wraps(module.initialize_global_process_group_ray)
    def initialize_global_process_group_ray(
        timeout_second: float | None = None, backend: str | None = None
    ) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            return
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        timeout = timedelta(seconds=timeout_second or timeout_s())
        dist.init_process_group(
            backend="cpu:gloo",
            store=_loopback_store(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        # Only training workers come here. Ray gives each of them one OpenMP thread; together they own the
        # machine while they train, since in sync mode the rollout is idle then.
        torch.set_num_threads(
            max(1, cpu_threads() // int(os.environ.get("RAY_LOCAL_WORLD_SIZE", world_size)))
        )

    module.__dict__["initialize_global_process_group_ray"] = initialize_global_process_group_ray


def _loopback_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The key-value store by which the ranks find each other, on loopback (one machine by definition)."""
    from torch.distributed import HashStore, TCPStore

    if world_size == 1:
        return HashStore()
    port = int(os.environ["MASTER_PORT"])
    if rank != 0:
        return TCPStore("127.0.0.1", port, world_size, False, timeout)
    listener = socket.create_server(("127.0.0.1", port), backlog=world_size)
    # libuv cannot take over a socket that listens already.
    return TCPStore(
        "127.0.0.1", port, world_size, True, timeout, use_libuv=False, master_listen_fd=listener.detach()
    )


def patch_rollout_registry(module: ModuleType) -> None:
    """Add the `hf` rollout to verl's table of rollout classes: a private dict without a register function."""
    module._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "pods_plugin.cpu.hf_rollout.HFServerAdapter"


def register_replica(module: ModuleType) -> None:
    """Register the replica class. Not a patch, verl's own hook; here because it belongs to the line above."""

    def load() -> type:
        from pods_plugin.cpu.hf_rollout import HFReplica

        return HFReplica

    module.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)


def embed_trainers(module: ModuleType) -> None:
    """Put EmbeddedTrainerMixin over verl's V1 trainers, see trainers.py."""
    from pods_plugin.cpu.trainers import install_trainers

    install_trainers()


def patch_fsdp_build(module: ModuleType) -> None:
    """Build FSDP modules, both versions, without what needs an accelerator.

    1. verl builds a forward-only engine (the reference policy) with CPU offload, whose pinned memory needs an
       accelerator. Parameters are on the CPU already: build it as the actor is built.
    2. verl passes `sync_module_states=True` to FSDP1; torch refuses to broadcast CPU parameters, although
       gloo can.
       The check is off only while verl builds a module.
    """
    original = module.FSDPEngine._build_fsdp_module

    @functools.wraps(original)
    def _build_fsdp_module(self: Any, torch_module: Any) -> Any:
        from torch.distributed.fsdp import _init_utils

        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            with mock.patch.object(
                _init_utils, "_check_module_states_for_sync_module_states", lambda states: None
            ):
                return original(self, torch_module)
        finally:
            self.engine_config = config

    module.FSDPEngine._build_fsdp_module = _build_fsdp_module


def patch_fsdp_engine(module: ModuleType) -> None:
    """Both patches of the FSDP engine."""
    patch_fsdp_build(module)
    patch_merged_lora(module)


def patch_merged_lora(module: ModuleType) -> None:
    """Send merged LoRA weights in the trainer's precision.

    verl casts them to bf16, which is what vLLM computes in. Here both sides compute in fp32: the rollout's
    log-probs would be off by a hundredth.
    """
    original = module.FSDPEngine._merged_lora_per_tensor_param

    @functools.wraps(original)
    def _merged_lora_per_tensor_param(self: Any) -> Any:
        from torch.distributed.tensor import DTensor

        with module.merged_lora_context(self.module, backup_adapters=True):
            weights = module.normalize_peft_param_name(self.module.state_dict())
            model = getattr(self.module, "_fsdp_wrapped_module", self.module)
            for name, weight in module.convert_weight_keys(weights, model).items():
                # Copies: the context takes the adapters out of these tensors again when it ends.
                yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight.detach().clone()

    module.FSDPEngine._merged_lora_per_tensor_param = _merged_lora_per_tensor_param
