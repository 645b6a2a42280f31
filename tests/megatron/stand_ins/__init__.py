"""What megatron-core and mbridge need to run on a machine without a GPU: for these tests only, never for training.

verl's MegatronEngine, megatron-core and mbridge run as they are published, but for three things:

rewrite.py   CUDA that is hard-coded in their sources ("cuda", torch.cuda...), rewritten while they are imported
layers.py    TransformerEngine's layers in plain PyTorch, under TransformerEngine's parameter names
patches.py   what is left, one function a patch

All of it is tied to the text of exact releases (VERSIONS). A process gets it by ENVIRONMENT, before it imports verl:
verl then imports `tests.megatron.stand_ins.activate`. Nothing here shows speed, memory, context parallelism or any
kernel of a GPU.
"""

from __future__ import annotations

from pathlib import Path

VERSIONS = {"megatron-core": "0.16.1", "mbridge": "0.15.1"}

# Besides that of an embedded run (pods_plugin.cpu.ENVIRONMENT).
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.megatron.stand_ins.activate",
    "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    # half of the time of a check; what is compiled on a GPU runs as it is written
    "TORCH_COMPILE_DISABLE": "1",
}


def missing() -> str:
    """What of VERSIONS is not installed in exactly this version, as a line that says what to write; "" if all is."""
    from importlib.metadata import PackageNotFoundError, version

    wrong = []
    for name, expected in VERSIONS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
        else:
            if found != expected:
                wrong.append(f"{name} is {found}, not {expected}")
    return f"{', '.join(wrong)}: pip install 'verl-pods[cpu,megatron-test]'" if wrong else ""
