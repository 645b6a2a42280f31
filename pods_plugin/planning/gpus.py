"""The accelerators that the planner knows: dense bf16 FLOPs, memory, and bandwidths, from their data sheets."""

from __future__ import annotations

import dataclasses

from pods_plugin.planning.errors import PlanError, nearest

GIB = 1024**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator; rates are peaks a second and in one direction.

    Attributes:
        name: As `--gpu` takes it.
        flops: Dense bf16 FLOPs a second, without sparsity.
        memory: Bytes, as nvidia-smi prints them; None: memory is not judged.
        bandwidth: Bytes a second of its memory.
        link: Bytes a second to another GPU of the node.
        host: Bytes a second to the memory of the host.
        source: Where the numbers are from.
    """

    name: str
    flops: float
    memory: float | None
    bandwidth: float
    link: float
    host: float
    source: str


# Bytes a second and GPU to another node: one 400 Gb/s adapter a GPU, as in NVIDIA's DGX H100 and H200.
NETWORK = 50e9

_PCIE4, _PCIE5 = 32e9, 64e9
_THROUGH_HOST = 16e9  # from GPU to GPU without NVLink: the host's PCIe is crossed twice
_DATA_SHEET = "https://www.nvidia.com/en-us/data-center"


def _gpu(
    name: str, teraflops: float, mib: float, terabytes: float, link: float, host: float, page: str
) -> GPU:
    return GPU(
        name=name,
        flops=teraflops * 1e12,
        memory=mib * 1024**2,
        bandwidth=terabytes * 1e12,
        link=link,
        host=host,
        source=page if page.startswith("https") else f"{_DATA_SHEET}/{page}",
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40", 312, 40960, 1.555, 300e9, _PCIE4, "a100/"),
        _gpu("a100-80", 312, 81920, 2.039, 300e9, _PCIE4, "a100/"),
        _gpu("h100", 989, 81559, 3.35, 450e9, _PCIE5, "h100/"),
        _gpu("h200", 989, 143771, 4.8, 450e9, _PCIE5, "h200/"),
        _gpu(
            "h20", 148, 97871, 4.0, 450e9, _PCIE5, "https://github.com/verl-project/verl (flops_counter.py)"
        ),
        _gpu("l40s", 362, 46068, 0.864, _THROUGH_HOST, _PCIE4, "l40s/"),
        _gpu(
            "l20",
            119.5,
            46068,
            0.864,
            _THROUGH_HOST,
            _PCIE4,
            "https://github.com/verl-project/verl (flops_counter.py)",
        ),
        _gpu(
            "a6000",
            154.8,
            49140,
            0.768,
            _THROUGH_HOST,
            _PCIE4,
            "https://www.nvidia.com/en-us/design-visualization/rtx-a6000/",
        ),
        # To calibrate against a run of the embedded default: the FLOPs are verl's figure for a CPU.
        GPU(
            name="cpu",
            flops=448e9,
            memory=None,
            bandwidth=40e9,
            link=10e9,
            host=40e9,
            source="https://github.com/verl-project/verl (flops_counter.py)",
        ),
    )
}


def find_gpu(name: str) -> GPU:
    """The accelerator of that name.

    Raises:
        PlanError: There is none.
    """
    gpu = GPUS.get(name.strip().lower())
    if gpu is None:
        raise PlanError(f"--gpu {name} is not known{nearest(name, GPUS)}; known: {', '.join(GPUS)}")
    return gpu
