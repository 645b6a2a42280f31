"""Guards: each shows that the unpatched thing still fails as patches.py says, and that the patched one works.

When a guard fails, verl or torch has changed: read the patch again, and drop it if it is no longer needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from datetime import timedelta
from types import ModuleType

import pytest
import torch


def fresh(name: str) -> ModuleType:
    """A second copy of a module, without patches: read from its file, past the post-import hooks."""
    file = importlib.import_module(name).__file__
    spec = importlib.util.spec_from_file_location("unpatched", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- process group ---


def test_guard_verl_asks_for_a_backend_that_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DIST_INIT_METHOD", raising=False)
    with pytest.raises(Exception, match=r"(?i)duplicate|cpu:gloo,cpu:gloo"):
        fresh("verl.utils.distributed").initialize_global_process_group_ray()
    assert not torch.distributed.is_initialized()


def test_guard_signature_of_the_process_group_function() -> None:
    import verl.utils.distributed as patched

    assert hasattr(patched.initialize_global_process_group_ray, "__wrapped__")
    unpatched = fresh("verl.utils.distributed").initialize_global_process_group_ray
    assert list(inspect.signature(unpatched).parameters) == ["timeout_second", "backend"]
    source = inspect.getsource(unpatched)
    # All that it does: our replacement does not call it.
    assert source.count("torch.distributed.") == 2 and "init_process_group(" in source, source


def test_everyone_who_imports_the_process_group_function_gets_ours() -> None:
    import verl.checkpoint_engine.base
    import verl.utils.distributed
    import verl.workers.engine_workers

    ours = verl.utils.distributed.initialize_global_process_group_ray
    assert verl.workers.engine_workers.initialize_global_process_group_ray is ours
    assert verl.checkpoint_engine.base.initialize_global_process_group_ray is ours


RANK_SCRIPT = """
import os, sys, time, torch, verl
import pods_plugin.cpu; pods_plugin.cpu.activate()
from verl.utils.distributed import initialize_global_process_group_ray as init
init(timeout_second=None, backend=None)
init()  # again: nothing
rank = torch.distributed.get_rank()
x = torch.ones(1) * (rank + 1)
torch.distributed.all_reduce(x)
assert x.item() == 3, x
listening = [line.split()[3] for line in os.popen("ss -ltnHp 2>/dev/null") if f"pid={os.getpid()}," in line]
assert all(address.startswith(("127.", "[::1]", "[::ffff:127.")) for address in listening), listening
print("rank", rank, "threads", torch.get_num_threads(), flush=True)
if rank == 0:
    os._exit(0)  # dies; the other waits for it
start = time.monotonic()
try:
    torch.distributed.all_reduce(x)
except RuntimeError as error:
    print("ended after", round(time.monotonic() - start), "s:", type(error).__name__, flush=True)
os._exit(0)
"""


def test_two_ranks_meet_on_loopback_and_a_dead_peer_ends_the_wait() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "RAY_LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PODS_CPU_TIMEOUT_S": "5",
        "PODS_CPU_THREADS": "4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert "rank 0 threads 2" in outputs[0], outputs[0]
    assert "rank 1 threads 2" in outputs[1], outputs[1]
    seconds = re.search(r"ended after (\d+) s", outputs[1])
    assert seconds is not None and int(seconds[1]) <= 7, outputs[1]


def test_the_default_timeout_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.utils.distributed

    calls: list[dict] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setenv("PODS_CPU_TIMEOUT_S", "77")
    monkeypatch.setenv("WORLD_SIZE", "1")
    threads = torch.get_num_threads()
    try:
        verl.utils.distributed.initialize_global_process_group_ray()
        verl.utils.distributed.initialize_global_process_group_ray(timeout_second=5)
    finally:
        torch.set_num_threads(threads)
    assert [call["timeout"] for call in calls] == [timedelta(seconds=77), timedelta(seconds=5)]
    assert {call["backend"] for call in calls} == {"cpu:gloo"}


# --- rollout registry ---


def test_guard_verl_has_no_register_function_for_rollouts() -> None:
    module = fresh("verl.workers.rollout.base")
    assert ("hf", "async") not in module._ROLLOUT_REGISTRY
    assert ("vllm", "async") in module._ROLLOUT_REGISTRY  # the form of the keys
    assert not [name for name in vars(module) if "register" in name.lower()]
    with pytest.raises(AssertionError, match="hf"):
        module.get_rollout_class("hf")


def test_the_rollout_is_found() -> None:
    from verl.workers.rollout.base import BaseRollout, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

    from pods_plugin.cpu.hf_rollout import HFReplica, HFServerAdapter

    assert get_rollout_class("hf") is HFServerAdapter
    assert get_rollout_replica_class("hf") is HFReplica
    assert issubclass(HFServerAdapter, BaseRollout) and issubclass(HFReplica, RolloutReplica)


def test_guard_the_server_has_every_method_that_verl_calls() -> None:
    from verl.workers.rollout.replica import RolloutReplica

    from pods_plugin.cpu.hf_rollout import HFServer

    called = set(re.findall(r"server\.(\w+)\.remote\(", inspect.getsource(RolloutReplica)))
    assert {"wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache"} <= called
    assert [name for name in called if not hasattr(HFServer, name)] == []


# --- FSDP ---


def test_guard_pinned_memory_and_the_sync_check_need_an_accelerator() -> None:
    from torch.distributed.fsdp import _init_utils

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            torch.zeros(1).pin_memory()
    with pytest.raises(ValueError, match="requires them to be on GPU"):
        _init_utils._check_module_states_for_sync_module_states([torch.zeros(1)])
    assert "_check_module_states_for_sync_module_states(module_states)" in inspect.getsource(
        _init_utils._sync_module_params_and_buffers
    )


def test_guard_verl_builds_fsdp_modules_as_the_patch_expects() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine._build_fsdp_module.__wrapped__)
    assert "cpu_offload = CPUOffload(offload_params=True)" in source
    assert "offload_policy = CPUOffloadPolicy(pin_memory=True)" in source
    assert "sync_module_states=True" in source
    # Hiding the two flags changes nothing but the offload.
    assert source.count("engine_config.forward_only") == 2
    assert source.count("engine_config.offload_policy") == 1


def test_the_fsdp_patch_hides_offload_while_verl_builds_and_no_longer() -> None:
    from verl.workers.config import FSDPEngineConfig

    from pods_plugin.cpu.patches import patch_fsdp_build

    seen: list[tuple] = []

    class FSDPEngine:
        engine_config = FSDPEngineConfig(forward_only=True, offload_policy=True, strategy="fsdp2")

        def _build_fsdp_module(self, module: object) -> object:
            from torch.distributed.fsdp._init_utils import (
                _check_module_states_for_sync_module_states as check,
            )

            check([torch.zeros(1)])
            seen.append((self.engine_config.forward_only, self.engine_config.offload_policy))
            assert self.engine_config.strategy == "fsdp2"
            if module is None:
                raise ValueError("broken")
            return module

    module = ModuleType("transformer_impl")
    module.FSDPEngine = FSDPEngine  # type: ignore[attr-defined]
    patch_fsdp_build(module)
    engine = FSDPEngine()
    assert engine._build_fsdp_module("x") == "x"
    with pytest.raises(ValueError, match="broken"):
        engine._build_fsdp_module(None)
    assert seen == [(False, False)] * 2
    assert engine.engine_config.forward_only and engine.engine_config.offload_policy
    with pytest.raises(ValueError, match="GPU"):
        torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states([torch.zeros(1)])


def test_verl_still_sends_merged_lora_weights_in_bf16() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine._merged_lora_per_tensor_param.__wrapped__)
    assert ".to(torch.bfloat16" in source
    # What ours does of the rest, in this order; that the weights arrive right: tests/recipes/test_shrunk.py.
    calls = [
        "merged_lora_context(self.module",
        "normalize_peft_param_name(",
        "convert_weight_keys(",
        "full_tensor()",
    ]
    assert [call for call in calls if call in source] == calls


# --- activation ---


def test_nothing_happens_without_activation() -> None:
    """Importing the plugin, and verl, on any machine: no platform, no rollout, no patch, no torch."""
    script = (
        "import sys, pods_plugin.cpu, pods_plugin.cpu.settings\n"
        "assert not {'torch', 'verl', 'ray'} & set(sys.modules), 'heavy import'\n"
        "import torch, verl\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "assert not hasattr(torch.cpu, 'empty_cache')\n"
        "import verl.utils.distributed as d, verl.workers.rollout.base as b\n"
        "assert not hasattr(d.initialize_global_process_group_ray, '__wrapped__')\n"
        "assert ('hf', 'async') not in b._ROLLOUT_REGISTRY\n"
        "print('untouched')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip().endswith("untouched"), result.stderr[-2000:]
