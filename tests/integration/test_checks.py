"""Every wrong input is one line before any worker starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from omegaconf import OmegaConf

from pods_plugin.cli.compose import LaunchError, compose
from pods_plugin.downsampling import DownsampleError
from pods_plugin.integration import checks

ON = [
    "algorithm.downsample=max_variance",
    "algorithm.downsample_kwargs.keep=4",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=16",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=1",
]


def check(*overrides: str):
    return checks.check_config(compose(None, "pods_trainer", [*ON, *overrides]))


def test_a_good_config_passes():
    settings = check()
    assert (settings.generated, settings.keep, settings.rule) == (16, 4, "max_variance")
    assert check("algorithm.downsample=null") is None
    assert check("algorithm.downsample_kwargs.keep=0.25").keep == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.downsample=max_varience"], ["max_varience", "max_variance"]),
        (["algorithm.downsample_kwargs.keep=null"], ["keep"]),
        (["algorithm.downsample_kwargs.keep=0"], ["keep", "0"]),
        (["algorithm.downsample_kwargs.keep=-3"], ["keep", "-3"]),
        (["algorithm.downsample_kwargs.keep=1.5"], ["keep", "1.5"]),
        (["algorithm.downsample_kwargs.keep=17"], ["keep", "17", "16"]),
        (["algorithm.downsample_kwargs.keep='4'"], ["keep", "'4'"]),
        (["algorithm.downsample_kwargs.keep=many"], ["keep", "many"]),
        (["algorithm.downsample_kwargs.keep=0.01"], ["keep", "0.01"]),
        (["actor_rollout_ref.rollout.n=1", "algorithm.downsample_kwargs.keep=1"], ["rollout.n", "1"]),
        (["+algorithm.downsample_kwargs.kep=4"], ["kep", "keep"]),
        (["+algorithm.downsampel=max_variance"], ["algorithm.downsampel", "algorithm.downsample"]),
        (["algorithm.downsample_kwargs=8"], ["downsample_kwargs"]),
        (["trainer.use_v1=False"], ["trainer.use_v1=True"]),
        (["trainer.v1.trainer_mode=my_mode"], ["my_mode", "sync"]),
        (["skip.rollout_tq.enable=True"], ["skip.rollout_tq", "enable=False"]),
        (["algorithm.adv_estimator=gdpo"], ["gdpo", "grpo"]),
        (
            ["algorithm.downsample_kwargs.advantage_stats=group", "algorithm.adv_estimator=rloo"],
            ["group", "rloo"],
        ),
        (
            ["algorithm.downsample_kwargs.advantage_stats=group", "algorithm.use_kl_in_reward=True"],
            ["group", "use_kl_in_reward=False"],
        ),
        (
            ["trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.use_dynamic_bsz=True"],
            ["64 rows", "3 data-parallel workers"],
        ),
        (
            ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7"],
            ["ppo_micro_batch_size_per_gpu=7", "64"],
        ),
        (["algorithm.downsample=no_such_module:rule"], ["no_such_module"]),
        (["algorithm.downsample=math:no_such_rule"], ["no_such_rule"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_one_line_for_each_mistake(overrides, words):
    with pytest.raises(DownsampleError) as caught:
        check(*overrides)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_without_downsampling_nothing_is_checked():
    assert (
        check("algorithm.downsample=null", "trainer.use_v1=False", "algorithm.downsample_kwargs.keep=99")
        is None
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], 16),
        (["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], 4),
        (
            [
                "model_engine=megatron",
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
                "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            ],
            2,
        ),
    ],
)
def test_data_parallel_size(overrides, expected):
    assert checks.data_parallel_size(compose(None, "pods_trainer", overrides)) == expected


def test_guard_validate_config_is_what_every_entry_point_calls():
    """The patch: main_ppo takes validate_config from verl.utils.config, and calls it before Ray starts."""
    code = (
        "import inspect, verl\n"
        "from verl.trainer import main_ppo\n"
        "import verl.utils.config as c\n"
        "assert main_ppo.validate_config is c.validate_config and c.validate_config._checks_downsampling\n"
        "source = inspect.getsource(main_ppo.main.__wrapped__)\n"
        "assert source.index('validate_config(') < source.index('run_ppo(')\n"
        "assert list(inspect.signature(c.validate_config).parameters)[0] == 'config'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_check_is_one_line_under_verls_own_command(tmp_path):
    """`python -m verl.trainer.main_ppo +algorithm.downsample=...`: discovered by entry point, no Ray started."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+algorithm.downsample=max_varience"]
    command += ["+algorithm.downsample_kwargs.keep=4", "actor_rollout_ref.rollout.n=16", "hydra.run.dir=."]
    command += ["hydra.output_subdir=null"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    ours = [line for line in result.stderr.splitlines() if line.startswith("verl-pods: ")]
    assert len(ours) == 1 and "max_variance" in ours[0]
    assert "Traceback" not in result.stderr
    assert "ray init" not in result.stdout


def test_recipes_with_unknown_keys_or_names_say_what_is_near():
    with pytest.raises(LaunchError, match=r"nearest: algorithm.downsample$"):
        compose(None, "pods_trainer", ["algorithm.downsampel=max_variance"])
    with pytest.raises(LaunchError, match="there is no recipe arithmetics.yaml"):
        compose(None, "arithmetics", [])
    with pytest.raises(LaunchError) as caught:
        compose(None, "pods_trainer", ["trainer.nnodes"])
    assert "\n" not in str(caught.value)


def test_kwargs_may_come_with_a_plus():
    config = OmegaConf.create(
        {
            "algorithm": {"downsample": "random", "downsample_kwargs": {"keep": 2}},
            "actor_rollout_ref": {"rollout": {"n": 4}},
        }
    )
    assert checks.parse(config).keep == 2
