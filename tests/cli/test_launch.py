"""Parts of `pods train` that need no run: what a log's failure is called, and what the package pulls in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from pods_plugin.cli import compose as compose_module
from pods_plugin.cli.compose import LaunchError, verl_configs
from pods_plugin.cli.train import _total_steps, explain, last_checkpoint, train


def test_explain_takes_our_line_before_any_other():
    log = "ValueError: first\n(TaskRunnerV1 pid=7) verl-pods: keep=9 is more than n=8\nRuntimeError: later\n"
    assert explain(log) == "keep=9 is more than n=8"


def test_explain_takes_the_last_error_raised_not_rays_wrapper():
    log = (
        "Traceback (most recent call last):\n"
        "ray.exceptions.RayTaskError(DownsampleError): ray::TaskRunnerV1.run() (pid=1)\n"
        '  File "stage.py", line 1, in downsample\n'
        "pods_plugin.downsampling.rules.DownsampleError: reward of group abc is nan (row 3)\n"
        "(raylet) a worker died\n"
    )
    assert explain(log) == "reward of group abc is nan (row 3)"


@pytest.mark.parametrize("log", ["", "\n\n"])
def test_explain_of_nothing(log):
    assert explain(log) == "verl ended without a word"


def test_last_checkpoint_is_the_one_verl_finished(tmp_path):
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    (tmp_path / "global_step_4").mkdir()
    assert last_checkpoint(config) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert last_checkpoint(config) == tmp_path / "global_step_2"


def test_total_steps_are_given_or_follow_from_the_data(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "train.parquet"
    pandas.DataFrame({"x": range(35)}).to_parquet(path)
    data = {"train_files": [str(path), str(path)], "train_batch_size": 16}
    trainer = {"total_training_steps": None, "total_epochs": 3}
    config = OmegaConf.create({"trainer": trainer, "data": data})
    assert _total_steps(config) == 70 // 16 * 3
    config.trainer.total_training_steps = 7
    assert _total_steps(config) == 7


def test_verl_absent_or_too_old_is_one_line(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compose_module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(LaunchError, match=r'verl is not installed here.*pip install "verl-pods\[cpu\]"'):
            verl_configs()
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed (pip install 'verl-pods[cpu]')")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.2")
    with pytest.raises(LaunchError, match=r"verl 0.8.2 is installed, verl-pods needs 0.9"):
        verl_configs()


def test_the_base_package_pulls_nothing_of_a_clusters_stack():
    requirements = [r for r in importlib.metadata.requires("verl-pods") or [] if "extra ==" not in r]
    names = {re.split(r"[ <>=!~\[;]", requirement)[0].lower() for requirement in requirements}
    assert names == {"gymnasium", "hydra-core", "math-verify", "numpy", "psutil", "rich", "typer", "wrapt"}
    # Lower bounds only: no pin of ours moves a package that is there.
    assert not [r for r in requirements if re.search(r"==|<|~=", r)]


@pytest.mark.parametrize("override", ["run_dir=elsewhere", "+run_name=mine"])
def test_the_folder_of_a_run_is_no_override(tmp_path, override):
    with pytest.raises(LaunchError, match="--runs-dir and --name"):
        train(
            None,
            "pods_trainer",
            [override],
            name=None,
            runs_dir=tmp_path,
            resume=None,
            dry_run=True,
            console=Console(),
        )
