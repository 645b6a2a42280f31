"""Guards: the stand-ins are tied to the text of exact releases, and each must still be needed.

When one fails, another release of megatron-core, mbridge or verl is installed: read the rewrite or patch again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.megatron import stand_ins
from tests.megatron.stand_ins import rewrite

installed = pytest.mark.skipif(bool(stand_ins.missing()), reason=stand_ins.missing())

# For each patch of patches.py what it is there for, as it stands in the source.
PATCHED = {
    "random_state_of_the_cpu": ("megatron.core.tensor_parallel.random", "torch.cuda.random.get_rng_state("),
    "stand_in_layers": (
        "megatron.core.models.gpt.gpt_layer_specs",
        "except ImportError:\n    HAVE_TE = False",
    ),
    "experts: te_general_gemm": (
        "megatron.core.transformer.moe.moe_utils",
        "        te_general_gemm,\n    )\n\n    HAVE_TE = True\nexcept ImportError:\n    HAVE_TE = False\n",
    ),
    "experts: numbers": ("megatron.core.transformer.moe.moe_utils", "torch.is_tensor(tensor) and tensor.is_cuda:"),
    "resume_with_torch_adamw": (
        "megatron.core.optimizer.distrib_optimizer",
        "steps = list(set([s[\"step\"].item() for s in inner_state_dict[\"state\"].values()]))",
    ),
    "allow_fp32": ("verl.workers.config.engine", 'assert self.dtype in ["bfloat16", "float16"]'),
}  # fmt: skip


def source(module: str) -> str:
    """The text of a module, which is not imported."""
    package, *path = module.split(".")
    spec = stand_ins.find(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)), *path).with_suffix(".py").read_text()


def test_the_versions_are_exact():
    assert {"megatron-core", "mbridge"} <= set(stand_ins.VERSIONS)
    assert len(stand_ins.VERSIONS) == len(stand_ins.REQUIREMENTS.read_text().splitlines())


@installed
@pytest.mark.parametrize("module", rewrite.REWRITES)
def test_the_number_of_rewrites_in_each_file(module):
    assert rewrite.rewrite(source(module))[1] == rewrite.REWRITES[module]


@installed
def test_nothing_of_the_rewritten_cuda_is_left_where_it_is_called():
    """What RULES do not know would fail when it is reached: nothing new of the kinds that they do know."""
    for module in rewrite.REWRITES:
        text = rewrite.rewrite(source(module))[0]
        assert not re.search(r"torch\.cuda\.current_device\(|device=.cuda\b", text), module


@installed
def test_every_rule_is_needed():
    texts = [source(module) for module in rewrite.REWRITES]
    for pattern, replacement in rewrite.RULES:
        before_it = rewrite.RULES[: rewrite.RULES.index((pattern, replacement))]
        found = 0
        for text in texts:
            for earlier in before_it:
                text = re.sub(*earlier, text)
            found += len(re.findall(pattern, text))
        assert found, pattern


@installed
@pytest.mark.parametrize("patch", PATCHED)
def test_every_patch_is_needed(patch):
    module, text = PATCHED[patch]
    assert text in source(module)


def test_another_number_of_rewrites_fails_the_import(tmp_path, monkeypatch):
    file = tmp_path / "changed.py"
    file.write_text('here = torch.cuda.current_device()\nthere = f(device="cuda")\n')
    monkeypatch.setitem(rewrite.REWRITES, "changed", 2)
    code = rewrite._Loader("changed", str(file)).get_code("changed")
    assert "cuda" not in (*code.co_names, *code.co_consts) and "cpu" in code.co_consts
    monkeypatch.setitem(rewrite.REWRITES, "changed", 3)
    with pytest.raises(ImportError, match="changed: 2 places of hard-coded CUDA, 3 expected"):
        rewrite._Loader("changed", str(file)).get_code("changed")
