"""The entry point: found by verl, light, and never active on a machine with a GPU by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")


def run(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "PODS_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_verl_loads_the_plugin_by_entry_point_and_nothing_heavy_with_it():
    code = (
        "import verl, sys\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "print('pods_plugin.integration.plugin' in sys.modules, 'pods_plugin.integration.trainers' in sys.modules,\n"
        "      'pods_plugin.cpu.hf_rollout' in sys.modules, 'cpu' in PlatformRegistry.registered_names())"
    )
    assert run(code) == "True False False False"


def test_the_cpu_platform_needs_its_environment():
    code = "import verl\nfrom verl.plugin.platform import get_platform\nprint(get_platform().device_name)"
    assert run(code, VERL_PLATFORM="cpu") == "cpu"


def test_every_v1_trainer_has_the_stage():
    code = (
        "import verl\nfrom verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print([get_trainer_cls(m).__name__ for m in ('sync', 'colocate_async', 'separate_async')])"
    )
    expected = ["PPOTrainerSync", "PPOTrainerColocateAsync", "PPOTrainerSeparateAsync"]
    assert run(code) == str([f"Downsampling{name}" for name in expected])


def test_a_broken_plugin_is_not_silent():
    code = "import sys\nsys.modules['wrapt'] = None\nimport verl"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=300
    )
    assert "verl-pods: the plugin could not be loaded, down-sampling is OFF" in result.stderr


def test_what_the_plugin_adds_to_import_verl():
    """Counted, not timed: the modules that the plugin adds to `import verl`. The seconds are in benchmarks/."""
    code = "import verl, sys\nprint('\\n'.join(sorted(sys.modules)))"
    without = set(run(code, VERL_USE_EXTERNAL_PLUGINS="none").splitlines())
    added = set(run(code).splitlines()) - without
    roots = {name.split(".")[0] for name in added}
    assert "pods_plugin" in roots
    assert not roots & {
        "gymnasium",
        "pods_envs",
        "hydra",
        "ray",
        "transfer_queue",
        "transformers",
        "rich",
        "typer",
    }
    assert len(added) < 60, sorted(added)
