"""Every recipe is accepted by the installed verl and by us, says in its header what is true, and repeats nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from pods_plugin.cli.compose import compose
from pods_plugin.cli.driver import check
from pods_plugin.cli.main import app
from pods_plugin.cli.train import _absolute_data_paths, _check_files
from pods_plugin.integration.checks import check_config, data_parallel_size
from pods_plugin.integration.model_checks import check_model, model_facts
from pods_plugin.planning.gpus import GIB, find_gpu
from pods_plugin.planning.job import job_from_config
from pods_plugin.planning.memory import memory_plan
from pods_plugin.planning.model import find_model
from tests.recipes.recipes import (
    BASES,
    FOLDER,
    GPU_RECIPES,
    RECIPES,
    baseline,
    data_commands,
    header,
    leaves,
    load,
    name,
    raw,
)

every = pytest.mark.parametrize("path", RECIPES, ids=name)
every_gpu = pytest.mark.parametrize("path", GPU_RECIPES, ids=name)


def test_recipes_are_listed():
    """The issue's ten, and no YAML file outside of the folders that the tests walk through."""
    table = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(table) == sorted((path.parent.name, path.stem) for path in GPU_RECIPES)
    assert len(GPU_RECIPES) >= 10
    assert {path.parent.name for path in RECIPES} == {"cpu", "fsdp", "megatron"}


@every
def test_verl_and_we_accept_it(path):
    config = load(path)
    settings = check_config(config)
    check_model(config)
    check(config)
    assert settings is not None and settings.keep < config.actor_rollout_ref.rollout.n
    # What verl trains on: m rollouts of each prompt, in equal shares for the data-parallel workers.
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert mini * settings.keep % data_parallel_size(config) == 0
    assert config.data.train_batch_size % mini == 0


@every
def test_it_makes_no_key(path):
    """Keys are composed strictly; nor does the file hide one behind `+`."""
    assert not re.search(r"^\s*\+|[\s=]\+\w", path.read_text(encoding="utf-8"), re.M)
    load(path)


@every_gpu
def test_its_baseline_is_grpo_with_as_many_updates(path):
    config = load(path, *baseline(path))
    keep = load(path).algorithm.downsample_kwargs.keep
    assert check_config(config) is None and config.actor_rollout_ref.rollout.n == keep
    check_model(config)
    check(config)
    assert baseline(path) == ["algorithm.downsample=null", f"actor_rollout_ref.rollout.n={keep}"]


@every_gpu
def test_its_header_says_what_is_true(path):
    config, fields = load(path), header(path)
    assert {"Model", "GPUs", "Memory per GPU", "Hyper-parameters", "Data", "Run", "Baseline"} <= set(fields)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.trainer.v1.trainer_mode == "separate_async":
        gpus += config.actor_rollout_ref.rollout.nnodes * config.actor_rollout_ref.rollout.n_gpus_per_node
    count, size = re.match(r"(\d+) x (\d+) GB", fields["GPUs"]).groups()
    assert int(count) == gpus and f"{gpus}gpu" in path.stem
    kind = "l40s" if int(size) == 48 else "h100"
    memory = re.match(
        rf"(\d+) GiB generating, (\d+) GiB updating \(pods plan {name(path).removeprefix('recipes/')} --gpu {kind}\)",
        fields["Memory per GPU"],
    )
    assert memory is not None
    settings = check_config(config)
    job = job_from_config(
        config, find_model(config.actor_rollout_ref.model.path), path.stem, keep=settings.keep
    )
    planned = memory_plan(job, find_gpu(kind))
    assert planned.fits, planned.problems
    for figure, parts in zip(memory.groups(), (planned.generate, planned.update), strict=True):
        assert int(figure) == pytest.approx(sum(parts.values()) / GIB, abs=1.0), "write what pods plan says"
    assert fields["Run"] == f"pods train --config-dir recipes/{path.parent.name} --config-name {path.stem}"
    hub_name = config.actor_rollout_ref.model.path
    assert hub_name.split("/")[1] in fields["Model"] and model_facts(hub_name) is not None


@every_gpu
def test_its_data_commands_make_the_files_it_reads(path, tmp_path, monkeypatch):
    import pandas

    monkeypatch.chdir(tmp_path)
    for command in data_commands(path):
        procedural = ["--env", "source=procedural", "--env", "size=4"]
        result = CliRunner().invoke(app, [*command, *procedural])
        assert result.exit_code == 0, result.output
    config = load(path)
    _absolute_data_paths(config)
    _check_files(config, tmp_path / "run", prepared=False)
    for split in ("train", "val"):
        rows = pandas.read_parquet(config.data[f"{split}_files"])
        assert set(rows.data_source) == {config.env_ids[split]} and len(rows) == 4
        assert {"prompt", "reward_model", "extra_info"} <= set(rows)
    # And no file that nobody reads.
    read = {config.data.train_files, config.data.val_files}
    assert {str(file) for file in tmp_path.rglob("*.parquet")} == read


@pytest.mark.parametrize("path", GPU_RECIPES, ids=name)
def test_it_repeats_nothing_of_its_bases(path, tmp_path):
    _check_repeats(path, raw(path)["defaults"], tmp_path)


@pytest.mark.parametrize("path", BASES, ids=name)
def test_a_base_repeats_nothing_of_verl(path, tmp_path):
    engine = "megatron" if path.stem == "megatron" else "dp"
    _check_repeats(path, ["/pods_trainer", {"override /model_engine": engine}], tmp_path)
    assert any(f"/_base/{path.stem}" in raw(recipe)["defaults"] for recipe in GPU_RECIPES), "nobody uses it"


def _check_repeats(path: Path, defaults: list, tmp_path: Path) -> None:
    """No leaf of the file is what its defaults say already."""
    folder = tmp_path / "recipes" / "x"
    folder.mkdir(parents=True)
    (tmp_path / "recipes" / "_base").symlink_to(FOLDER / "_base")
    OmegaConf.save(OmegaConf.create({"defaults": defaults}), folder / "without.yaml")
    without = compose(folder, "without", ["run_dir=run", "run_name=test"])
    for key, value in leaves(raw(path)):
        assert OmegaConf.select(without, key) != value, f"{key}={value} is so without this line"


@pytest.mark.parametrize("path", GPU_RECIPES[:1] + GPU_RECIPES[-1:], ids=name)
def test_dry_run_as_a_user_types_it(path, tmp_path):
    result = dry_run(path, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "verl and verl-pods accept it" in " ".join(result.stdout.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@every
def test_dry_run_of_every_recipe(path, tmp_path):
    test_dry_run_as_a_user_types_it(path, tmp_path)


def dry_run(path: Path, cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`pods train --dry-run` in a folder where the recipe's data is."""
    for command in data_commands(path) if path in GPU_RECIPES else []:
        out = cwd / command[command.index("--out") + 1]
        arguments = [str(out) if word == command[command.index("--out") + 1] else word for word in command]
        CliRunner().invoke(app, [*arguments, "--env", "source=procedural", "--env", "size=4"])
    words = ["train", "--config-dir", str(path.parent), "--config-name", path.stem, "--dry-run", *overrides]
    return subprocess.run(
        [str(Path(sys.executable).parent / "pods"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_facts_of_the_models_are_those_of_their_sizes():
    """Parameters by the usual count of a decoder, against the totals that the model cards state (in billions)."""
    published = {
        "Qwen2.5-0.5B-Instruct": 0.49,
        "Qwen2.5-3B-Instruct": 3.09,
        "Qwen2.5-7B-Instruct": 7.61,
        "Qwen2.5-32B-Instruct": 32.8,
        "Llama-3.2-3B-Instruct": 3.21,
        "Qwen3-30B-A3B": 30.5,
    }
    folder = Path(__file__).resolve().parents[2] / "pods_plugin" / "planning" / "models"
    for file in folder.glob("*.json"):
        facts = json.loads(file.read_text())
        hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
        width = facts.get("head_dim", hidden // heads)
        attention = hidden * width * (2 * heads + 2 * facts["num_key_value_heads"])
        if "num_experts" in facts:
            mlp = facts["num_experts"] * (3 * hidden * facts["moe_intermediate_size"] + hidden)
        else:
            mlp = 3 * hidden * facts["intermediate_size"]
        embeddings = facts["vocab_size"] * hidden * (1 if facts["tie_word_embeddings"] else 2)
        total = facts["num_hidden_layers"] * (attention + mlp) + embeddings
        assert total / 1e9 == pytest.approx(published.pop(file.stem), rel=0.01), file.stem
    assert not published
