"""The `cpu` platform for verl's PlatformRegistry: what verl asks of an accelerator, answered by the CPU."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _resident_bytes(device: object = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def _nothing() -> None:
    pass


# The functions of torch.cuda that verl calls on this path and torch.cpu lacks. verl tests `device_module ==
# torch.cpu` (flops counter, memory log), so torch.cpu itself gets them: a wrapper module would not be equal.
MISSING_IN_TORCH_CPU: dict[str, Callable[..., Any]] = {
    "empty_cache": _nothing,
    "memory_allocated": _resident_bytes,
    "memory_reserved": _resident_bytes,
    "max_memory_allocated": _peak_resident_bytes,
    "max_memory_reserved": _peak_resident_bytes,
    "set_rng_state": _set_rng_state,
}


class CpuDeviceId(str):
    """The device "index": the string `cpu` to torch, but `0` inside an f-string.

    torch takes an integer for the index of an accelerator, so `tensor.to(device_id)` needs a name, while verl
    builds `f"{device_name}:{device_id}"`, which must give `cpu:0`.
    """

    def __format__(self, spec: str) -> str:
        return format("0", spec)


class PlatformCPU(PlatformBase):
    """verl's hardware interface on a machine without an accelerator."""

    @property
    def device_name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """`torch.cpu` itself, see MISSING_IN_TORCH_CPU."""
        return torch.cpu

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by auto-detection, only by name (VERL_PLATFORM=cpu)."""
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self) -> CpuDeviceId:  # type: ignore[override]
        """`cpu`; see CpuDeviceId."""
        return CpuDeviceId("cpu")

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is done when the call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The C allocator has none."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None to report."""
        return None, None

    def communication_backend_name(self) -> str:
        """`gloo`."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets it for the fake GPUs, see ray_resource_name."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """`GPU`: verl's pools count nothing else, so a run declares fake ones, `ray.init(num_gpus=N)`."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> None:
        """None."""
        return None


def register() -> None:
    """Register the platform under `cpu`, and give torch.cpu what it lacks. Idempotent."""
    for name, function in MISSING_IN_TORCH_CPU.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    if PlatformRegistry.get("cpu") is not PlatformCPU:
        PlatformRegistry.register(platform="cpu")(PlatformCPU)
