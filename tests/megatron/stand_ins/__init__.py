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

import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
VERSIONS = dict(re.findall(r"^([\w-]+)==([\d.]+)", REQUIREMENTS.read_text(), re.M))
# Beside site-packages: where verl finds megatron-core it imports it, which costs every process that imports verl two
# seconds, and only these tests want it.
FOLDER = Path(sys.prefix) / "megatron"

# Besides that of an embedded run (pods_plugin.cpu.ENVIRONMENT).
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.megatron.stand_ins.activate",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[3]), str(FOLDER)]),
    # half of the time of a check; what is compiled on a GPU runs as it is written
    "TORCH_COMPILE_DISABLE": "1",
}


def missing() -> str:
    """What of VERSIONS is not installed in exactly this version, as a line that says what to write; "" if all is."""
    wrong = []
    for name, expected in VERSIONS.items():
        found = next(iter(distributions(name=name, path=[str(FOLDER), *sys.path])), None)
        if found is None:
            wrong.append(f"{name} is not installed")
        elif found.version != expected:
            wrong.append(f"{name} is {found.version}, not {expected}")
    return f"{', '.join(wrong)}: pip install --no-deps --target {FOLDER} -r {REQUIREMENTS}" if wrong else ""


def find(package: str) -> ModuleSpec | None:
    """The spec of a package, in FOLDER or elsewhere; it is not imported."""
    return PathFinder.find_spec(package, [str(FOLDER), *sys.path])
