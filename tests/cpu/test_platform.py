from __future__ import annotations

import inspect
import re

import pytest
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.plugin.platform.platform_manager import get_platform

from pods_plugin.cpu.platform import MISSING_IN_TORCH_CPU, CpuDeviceId, PlatformCPU, register
from pods_plugin.cpu.settings import ENVIRONMENT, cpu_threads, timeout_s


def test_registered_under_cpu() -> None:
    register()  # again
    assert PlatformRegistry.get("cpu") is PlatformCPU
    platform = get_platform()  # VERL_PLATFORM=cpu
    assert isinstance(platform, PlatformCPU) and isinstance(platform, PlatformBase)
    assert platform.is_available() and platform.is_platform_available()


def test_never_found_by_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM")
    assert not PlatformCPU().is_platform_available(use_smi_check=True)


def test_answers() -> None:
    platform = PlatformCPU()
    assert platform.device_name == "cpu" and platform.vendor_name == "cpu"
    assert platform.device_count() == 1
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_name() == "GPU"
    assert platform.ray_resource_options(0.5) == {"num_gpus": 0.5}
    assert platform.get_device_capability() == (None, None)
    assert not platform.is_ipc_supported() and platform.cudart() is None
    assert platform.ray_noset_envvars() == [] and platform.rollout_env_vars() == {}
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    platform.set_allocator_settings("expandable_segments:True")
    platform.profiler_start()
    platform.profiler_stop()
    with platform.nvtx_range("x"):
        pass
    platform.manual_seed(5)
    first = torch.rand(1)
    platform.manual_seed_all(5)
    assert torch.equal(first, torch.rand(1))


def test_device_module_is_torch_cpu_itself() -> None:
    assert PlatformCPU().device_module is torch.cpu
    import verl.utils.flops_counter
    import verl.utils.profiler.performance as performance

    # Guard: verl compares it.
    assert "device == torch.cpu" in inspect.getsource(performance)
    assert "device == torch.cpu" in inspect.getsource(verl.utils.flops_counter)


def test_device_id_is_a_name_for_torch_and_an_index_for_verl() -> None:
    device = PlatformCPU().current_device()
    assert torch.zeros(1).to(device).device == torch.device("cpu")
    assert torch.device(device) == torch.device("cpu")
    assert f"cpu:{device}" == "cpu:0"
    assert isinstance(device, CpuDeviceId)
    import verl.utils.fsdp_utils

    # Guard: verl puts it after a colon.
    assert 'f"{get_device_name()}:{device_id}"' in inspect.getsource(verl.utils.fsdp_utils)


def test_guard_each_added_function_is_missing_and_used() -> None:
    import verl.utils.checkpoint.checkpoint_manager as checkpoint_manager
    import verl.utils.memory_utils as memory_utils
    import verl.workers.engine_workers as engine_workers

    used = "".join(inspect.getsource(module) for module in (checkpoint_manager, memory_utils, engine_workers))
    for name, function in MISSING_IN_TORCH_CPU.items():
        assert getattr(torch.cpu, name) is function, f"torch.cpu has {name} by itself now: drop ours"
        assert re.search(rf"(get_torch_device\(\)|device)\.{name}\(", used), (
            f"verl no longer calls {name}: drop it"
        )


def test_added_functions() -> None:
    cpu: object = torch.cpu
    resident, peak = cpu.memory_allocated(), cpu.max_memory_allocated(0)  # type: ignore[attr-defined]
    assert 1 << 20 < resident < 1 << 40 and 1 << 20 < peak < 1 << 40
    state = torch.get_rng_state()
    first = torch.rand(1)
    cpu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(first, torch.rand(1))
    assert cpu.empty_cache() is None  # type: ignore[attr-defined]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PODS_CPU_TIMEOUT_S", raising=False)
    monkeypatch.delenv("PODS_CPU_THREADS", raising=False)
    assert timeout_s() == 600 and cpu_threads() >= 1
    monkeypatch.setenv("PODS_CPU_TIMEOUT_S", "2.5")
    monkeypatch.setenv("PODS_CPU_THREADS", "3")
    assert timeout_s() == 2.5 and cpu_threads() == 3
    for bad in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("PODS_CPU_TIMEOUT_S", bad)
        with pytest.raises(ValueError, match=f"PODS_CPU_TIMEOUT_S='{bad}' is not a positive number"):
            timeout_s()
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in ENVIRONMENT.items())
    assert ENVIRONMENT["VERL_PLATFORM"] == "cpu"
