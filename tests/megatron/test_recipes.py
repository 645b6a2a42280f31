"""Every recipe of recipes/megatron through verl's real MegatronEngine, as far as that goes without a GPU.

The recipe's own `actor` block, its parallel sizes clipped to 2 and its model shrunk: what the engine computes must be
what Hugging Face computes, and what it computes on several ranks what it computes on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.megatron import stand_ins
from tests.megatron.shrink import ranks, shrink, small_model
from tests.recipes.recipes import GPU_RECIPES, name

pytestmark = pytest.mark.skipif(bool(stand_ins.missing()), reason=stand_ins.missing())

MEGATRON_RECIPES = [path for path in GPU_RECIPES if path.parent.name == "megatron"]
DENSE = next(path for path in MEGATRON_RECIPES if path.stem == "math_qwen2.5_7b_8gpu")


def engine_check(folder: Path) -> subprocess.CompletedProcess[str]:
    from pods_plugin.cpu import ENVIRONMENT

    return subprocess.run(
        [sys.executable, "-c", f"from tests.megatron.engine_check import main; main({str(folder)!r})"],
        env={**os.environ, **ENVIRONMENT, **stand_ins.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("recipe", MEGATRON_RECIPES, ids=name)
def test_engine_agrees_with_hugging_face_and_with_a_single_process(recipe, tmp_path):
    small_model(recipe, tmp_path)
    for run, limit in (("single", 1), ("parallel", 2)):
        config = shrink(recipe, tmp_path, limit=limit)
        OmegaConf.save(config, tmp_path / f"{run}.yaml")
    assert ranks(config) > 1, "a Megatron recipe without any parallel size"
    result = engine_check(tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]

    results = json.loads((tmp_path / "results.json").read_text())
    (single,) = results["single"]
    for report in (single, *results["parallel"]):
        assert report["log_prob_diff"] < 1e-5
        assert report["exported_log_prob_diff"] < 1e-5
        # Each update has moved the policy, a thousand times farther than it may differ: the export is not the start.
        assert report["moved"] > 0.01 and min(report["grad_norms"]) > 0.01
        assert report["resumed_diff"] < 1e-6
        assert report["grad_norms"] == pytest.approx(single["grad_norms"], rel=1e-5)
        # the loss is a sum of terms of both signs, of size 1: what rounds is they
        assert report["losses"] == pytest.approx(single["losses"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recompute_method=uniforn", "uniforn"),
        ("+recompute_granularty=full", "recompute_granularty"),
    ],
    ids=["value", "key"],
)
def test_a_wrong_setting_of_a_recipe_fails_the_check(override, message, tmp_path):
    """What verl does not look into: `override_transformer_config` goes to megatron-core as it is."""
    small_model(DENSE, tmp_path)
    plus, setting = ("+", override[1:]) if override.startswith("+") else ("", override)
    key = f"{plus}actor_rollout_ref.actor.megatron.override_transformer_config.{setting}"
    OmegaConf.save(shrink(DENSE, tmp_path, key, limit=1), tmp_path / "single.yaml")
    result = engine_check(tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
