"""`pods plan` as it is typed: on every GPU recipe, and on what is misspelt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

from typer.testing import CliRunner

from pods_plugin.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(
    str(path.relative_to(ROOT / "recipes").with_suffix(""))
    for kind in ("fsdp", "megatron")
    for path in (ROOT / "recipes" / kind).glob("*.yaml")
)


def plan(*arguments: str, code: int | None = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert code is None or result.exit_code == code, result.output
    return result.output


def plan_json(*arguments: str, code: int | None = 0) -> dict:  # type: ignore[type-arg]
    return json.loads(plan(*arguments, "--json", code=code))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 10


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_the_gpu_of_its_header(recipe: str) -> None:
    """48 GB for the single-GPU recipes, 80 GB for the others; the GPUs are those in its name."""
    gpu = "l40s" if recipe.endswith("_1gpu") else "h100"
    report = plan_json(recipe, "--gpu", gpu)
    assert report["fits"] and report["write"] == []
    assert f"_{report['gpus']}gpu" in recipe
    few, many, pods = report["settings"]
    assert few["seconds"]["step"] <= pods["seconds"]["step"] < many["seconds"]["step"]
    assert report["best_n"]["m"] == report["m"]
    assert report["best_n"]["rate"] >= pods["rate"] * (1 - 1e-12)


@pytest.mark.parametrize(
    ("recipe", "gpu", "gpus"),
    [
        ("fsdp/math_qwen2.5_32b_32gpu", "h100", 8),
        ("fsdp/math_qwen2.5_7b_8gpu", "a100-40", 1),
        ("fsdp/math_qwen2.5_7b_8gpu", "l40s", 2),
        ("megatron/math_qwen2.5_32b_32gpu", "h100", 8),
        ("megatron/math_qwen2.5_7b_8gpu", "a100-40", 8),
        ("megatron/math_qwen3_30b_a3b_64gpu", "a100-40", 32),
    ],
)
def test_what_does_not_fit_fits_as_advised(recipe: str, gpu: str, gpus: int) -> None:
    report = plan_json(recipe, "--gpu", gpu, "--gpus", str(gpus), code=1)
    assert not report["fits"] and report["problems"] and report["write"]
    words = " ".join(report["write"]).split()
    if words[0] == "--gpus":
        gpus, words = int(words[1]), words[2:]
    assert plan_json(recipe, *words, "--gpu", gpu, "--gpus", str(gpus), code=None)["problems"] == []


def test_the_tables_name_parts_and_verdict() -> None:
    text = plan("fsdp/math_qwen2.5_7b_8gpu")
    for word in ("weights", "gradients", "optimizer", "activations", "KV cache", "fits in", "PODS 64 -> 16"):
        assert word in text
    text = plan("fsdp/math_qwen2.5_7b_8gpu", "--gpu", "a100-40", code=1)
    assert "does not fit: the update needs" in text and "write: actor_rollout_ref." in text


def test_overrides_in_all_three_places_are_the_same() -> None:
    override = "actor_rollout_ref.rollout.n=128"
    by_argument = plan_json("fsdp/math_qwen2.5_7b_8gpu", override)
    assert by_argument["n"] == 128
    assert plan_json("fsdp/math_qwen2.5_7b_8gpu", "-o", override) == by_argument
    where = ("--config-dir", "recipes/fsdp", "--config-name", "math_qwen2.5_7b_8gpu")
    assert plan_json(*where, override) == by_argument
    assert plan_json("recipes/fsdp/math_qwen2.5_7b_8gpu.yaml", override) == by_argument


def test_grpo_alone_where_nothing_is_dropped() -> None:
    report = plan_json(
        "fsdp/math_qwen2.5_7b_8gpu", "algorithm.downsample=null", "actor_rollout_ref.rollout.n=16"
    )
    assert [setting["name"] for setting in report["settings"]] == ["GRPO n=16"]


def test_pass_rates_decide_what_pays() -> None:
    """Hard prompts are worth more rollouts than even ones, whose every sixteen are well mixed."""
    hard = plan_json("fsdp/math_qwen2.5_7b_8gpu", "--pass-rates", "0.02")["best_n"]["n"]
    even = plan_json("fsdp/math_qwen2.5_7b_8gpu", "--pass-rates", "0.5")["best_n"]["n"]
    assert even < hard


def test_lengths_scale_the_seconds() -> None:
    short = plan_json("fsdp/math_qwen2.5_7b_8gpu", "--response-tokens", "200")["settings"][2]["seconds"]
    long = plan_json("fsdp/math_qwen2.5_7b_8gpu", "--response-tokens", "2000")["settings"][2]["seconds"]
    assert all(long[phase] > short[phase] for phase in ("generate", "log-prob", "update"))


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan("fsdp/math_qwen2.5_7b_8gpu", "--plot", str(tmp_path / "figures" / "plan.png"))
    assert (tmp_path / "figures" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_calibrating_a_run_folder_uses_its_own_config_and_model(tmp_path: Path) -> None:
    """A run folder with half of the recipe's n, copied from where it was made, as `pods train` writes one."""
    from omegaconf import OmegaConf

    from pods_plugin.cli.compose import compose

    config = compose(
        ROOT / "recipes" / "cpu",
        "arithmetic",
        [
            "run_dir=/gone",
            "run_name=arithmetic",
            "algorithm.downsample_kwargs.keep=2",
            "actor_rollout_ref.rollout.n=8",
        ],
    )
    OmegaConf.save(config, tmp_path / "config.yaml")
    shape = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 258,
        "tie_word_embeddings": True,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    rows = (Path(__file__).parent / "data" / "arithmetic.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(rows)
    for given in (tmp_path, tmp_path / "metrics.jsonl"):
        report = plan_json("cpu/arithmetic", "--calibrate", str(given))
        assert report["calibration"]["steps"] == 22
        assert (report["n"], report["m"], report["gpu"], report["memory_gib"]["limit"]) == (
            16,
            4,
            "cpu",
            None,
        )
    assert "On this cluster, most signal a second:" in plan("cpu/arithmetic", "--calibrate", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp/math_qwen2.5_7b_8gp"], "nearest: fsdp/math_qwen2.5_7b_8gpu"),
        (["math_qwen2.5_7b_8gpu"], "write fsdp/math_qwen2.5_7b_8gpu or megatron/math_qwen2.5_7b_8gpu"),
        ([], "which recipe?"),
        (["fsdp/math_qwen2.5_7b_8gpu", "--gpu", "h1000"], "--gpu h1000 is not known; nearest: h100"),
        (
            ["megatron/math_qwen2.5_7b_8gpu", "--gpus", "3"],
            "3 training GPUs is not a multiple of tp 2 x pp 1 x cp 1 = 2",
        ),
        (["megatron/math_qwen2.5_32b_32gpu", "--gpus", "12"], "--gpus 12 does not fill nodes of 8"),
        (["fsdp/math_qwen2.5_7b_16gpu_async", "--gpus", "3"], "cannot be shared 8 to 8"),
        (["fsdp/math_qwen2.5_7b_8gpu", "--gpus", "0"], "--gpus 0 is no number of GPUs"),
        (["fsdp/math_qwen2.5_7b_8gpu", "--pass-rates", "often"], "--pass-rates often: expected rates"),
        (["fsdp/math_qwen2.5_7b_8gpu", "--response-tokens", "-1"], "--response-tokens -1: expected"),
        (["fsdp/math_qwen2.5_7b_8gpu", "--calibrate", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["fsdp/math_qwen2.5_7b_8gpu", "actor_rollout_ref.rollout.nn=3"],
            "nearest: actor_rollout_ref.rollout.n",
        ),
        (["fsdp/math_qwen2.5_7b_8gpu", "algorithm.downsample_kwargs.keep=65"], "keep"),
        (["fsdp/math_qwen2.5_7b_8gpu", "actor_rollout_ref.model.path=Qwen/Qwen2.5-8B"], "nearest: Qwen2.5-"),
        (
            ["fsdp/math_qwen2.5_7b_8gpu", "actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
            "attention heads",
        ),
        (["cpu/arithmetic"], "give --model a folder with config.json"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], message: str) -> None:
    output = plan(*arguments, code=2)
    assert output.startswith("pods: ") and output.count("\n") == 1
    assert message in output
