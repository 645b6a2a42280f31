"""`pods train` as a user types it: run folder, resume, Ctrl-C, two runs at once, errors before anything starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PODS = [str(Path(sys.executable).parent / "pods"), "train"]
ARITHMETIC = ["--config-dir", str(ROOT / "recipes/cpu"), "--config-name", "arithmetic"]
SMALL = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=8",
    "algorithm.downsample_kwargs.keep=2",
    "prepare.data.env_kwargs.size=64",
    "prepare.model.steps=2",
    "prepare.model.doubt_steps=2",
    "trainer.save_freq=1",
]


def clean_environment() -> dict[str, str]:
    """The environment of a user: nothing that this test process set for itself."""
    ours = ("VERL_", "PODS_", "RAY_", "TRANSFER_QUEUE", "TQ_", "GLOO_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PODS, "--runs-dir", str(runs), *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=runs,
        # A test run in the background of a shell script inherits an ignored SIGINT, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], timeout: float = 600) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def processes_of(runs: Path) -> list[psutil.Process]:
    """Everything that runs for a folder: the environment of each process of a run names its metrics file."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(runs) in process.environ().get("VERL_FILE_LOGGER_PATH", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def rows(run: Path, part: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / part).read_text().splitlines()]


def test_two_runs_side_by_side_one_interrupted_and_resumed(tmp_path):
    before = {path.name for path in Path("/dev/shm").iterdir()}
    first = start(tmp_path, *ARITHMETIC, *SMALL, "--name", "first", "trainer.total_training_steps=3")
    second = start(tmp_path, *ARITHMETIC, *SMALL, "--name", "second", "trainer.total_training_steps=500")
    run = tmp_path / "second"
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 400
    while not tracker.exists() or int(tracker.read_text() or 0) < 2:
        assert second.poll() is None, second.communicate()[0]
        assert time.monotonic() < deadline, (run / "train.log").read_text()[-3000:]
        time.sleep(0.5)

    # They do not meet: nothing of either listens beyond loopback.
    for process in processes_of(tmp_path):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (
                    process.name(),
                    connection,
                )

    # Ctrl-C ends the run, with its last checkpoint kept and nothing left behind.
    ours = processes_of(run)
    temps = {p.environ().get("TMPDIR") for p in ours} - {None}
    assert len(ours) > 5 and len(temps) == 1
    second.send_signal(signal.SIGINT)
    code, output = finish(second, timeout=120)
    assert code == 130, output
    assert f"pods train --resume {run.name}" in " ".join(output.split())
    assert processes_of(run) == []
    assert not any(Path(temp).exists() for temp in temps)
    saved = int(tracker.read_text())
    assert (run / "checkpoints" / f"global_step_{saved}" / "actor").is_dir()

    # The other one is not disturbed.
    code, output = finish(first)
    assert code == 0, output
    assert "3/3" in output and "reward of all rollouts" in output
    finished = tmp_path / "first"
    assert {"config.yaml", "metrics.jsonl", "curve.png", "train.log", "checkpoints", "launch.json"} <= {
        path.name for path in finished.iterdir()
    }
    steps = rows(finished)
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert (row["data"]["downsample/generated"], row["data"]["downsample/kept"]) == (32, 8)
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "algorithm.downsample=null" in output

    # Resumed, it goes on after the checkpoint with the same n and m, and keeps the metrics of its first part.
    code, output = finish(start(tmp_path, "--resume", str(run), f"trainer.total_training_steps={saved + 2}"))
    assert code == 0, output
    resumed = rows(run)
    assert [row["step"] for row in resumed] == [saved + 1, saved + 2]
    for row in resumed:
        assert (row["data"]["downsample/generated"], row["data"]["downsample/kept"]) == (32, 8)
    # verl logs a step after it has saved and synchronised weights: Ctrl-C may come in between
    first_part = [row["step"] for row in rows(run, "metrics.part1.jsonl")]
    assert first_part == list(range(1, len(first_part) + 1)) and len(first_part) >= saved - 1
    assert processes_of(tmp_path) == []
    assert {path.name for path in Path("/dev/shm").iterdir()} <= before


@pytest.mark.slow
def test_a_reward_that_is_nan_stops_the_run_with_its_prompt_and_keeps_the_checkpoint(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, pathlib\n"
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return float('nan') if calls > 40 else float(len(solution_str) % 2)\n"
    )
    override = [f"reward.custom_reward_function.path={reward}", "trainer.total_training_steps=5"]
    code, output = finish(start(tmp_path, *ARITHMETIC, *SMALL, "--name", "nan", *override))
    text = " ".join(output.split())
    assert code == 1, output
    assert re.search(r"failed: reward of group [0-9a-f-]{36} is nan", text), output
    assert re.search(r"global_step_\d+; go on with: pods train --resume nan", text), output
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_with_a_line_instead_of_a_hang(tmp_path):
    process = start(tmp_path, *ARITHMETIC, *SMALL, "--name", "dead", "trainer.total_training_steps=500")
    tracker = tmp_path / "dead" / "checkpoints" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 400
    while not tracker.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    workers = [p for p in processes_of(tmp_path) if "ray::WorkerDict" in " ".join(p.cmdline())]
    assert len(workers) == 1
    workers[0].kill()
    code, output = finish(process, timeout=120)
    assert code == 1, output
    assert "failed:" in output and "died" in output
    assert "pods train --resume dead" in " ".join(output.split())
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["algorithm.downsample=max_varience"], ["max_varience", "max_variance"]),
        (["algorithm.downsample_kwargs.keep=99"], ["keep=99", "rollout.n=16"]),
        (["algorithm.downsampel=random"], ["algorithm.downsampel", "nearest: algorithm.downsample"]),
        (["~prepare.data", "data.train_files=/nowhere.parquet"], ["/nowhere.parquet does not exist", "pods data"]),
        (["~prepare", "actor_rollout_ref.model.path=./nowhere", "data.train_files=null", "data.val_files=null"],
         ["./nowhere is no folder"]),
        (["trainer.use_v1=False"], ["trainer.use_v1=True"]),
    ],
    ids=["rule", "keep", "key", "data", "model", "v0"],
)  # fmt: skip
def test_wrong_input_is_one_line_and_starts_nothing(tmp_path, arguments, words):
    code, output = finish(start(tmp_path, *ARITHMETIC, *arguments), timeout=120)
    assert code == 2
    errors = [line for line in output.splitlines() if line.startswith("pods: ")]
    assert len(errors) == 1 and output.splitlines()[-1] == errors[0], output
    for word in words:
        assert word in errors[0]
    assert "Traceback" not in output
    assert not list(tmp_path.glob("*/train.log"))


def test_names_and_folders(tmp_path):
    (tmp_path / "taken").mkdir()
    code, output = finish(start(tmp_path, *ARITHMETIC, "--name", "taken"), timeout=120)
    assert code == 2 and "--resume" in output
    code, output = finish(start(tmp_path, "--resume", "taken"), timeout=120)
    assert code == 2 and "no config.yaml" in output
    code, output = finish(start(tmp_path, "--config-dir", str(tmp_path), "--config-name", "x"), timeout=120)
    assert code == 2 and "there is no recipe x.yaml" in output


def test_dry_run_lets_verl_check_and_leaves_nothing(tmp_path):
    code, output = finish(start(tmp_path, *ARITHMETIC, "--dry-run"), timeout=300)
    assert code == 0, output
    assert "32 prompts x 16 rollouts" in output and "nothing was started" in output
    assert list(tmp_path.iterdir()) == []
    wrong = ["--dry-run", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    code, output = finish(start(tmp_path, *ARITHMETIC, *wrong), timeout=300)
    assert code == 2
    assert "ppo_mini_batch_size=64 is more than data.train_batch_size=32" in output.splitlines()[-1]


def test_a_cluster_without_the_plugin_is_told(tmp_path):
    environment = {**clean_environment(), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    result = subprocess.run(
        [*PODS, "--runs-dir", str(tmp_path), *ARITHMETIC],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2 and "VERL_USE_EXTERNAL_PLUGINS=none" in result.stderr


@pytest.mark.slow
def test_verls_own_command_takes_the_two_settings(tiny, tmp_path):
    """`python -m verl.trainer.main_ppo +algorithm.downsample=...`, which knows nothing of our config."""
    from omegaconf import OmegaConf, open_dict

    from pods_plugin.cpu import ENVIRONMENT
    from tests.e2e.harness import make_config

    config = make_config(tiny, "trainer.total_training_steps=2", "trainer.logger=[file]")
    with open_dict(config):
        for key in ("downsample", "downsample_kwargs"):
            del config.algorithm[key]
    OmegaConf.save(config, tmp_path / "mine.yaml")
    metrics = tmp_path / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "mine",
    ]
    command += ["+algorithm.downsample=max_variance", "+algorithm.downsample_kwargs.keep=2"]
    environment = {**clean_environment(), **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(metrics)}
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert [(s["downsample/generated"], s["downsample/kept"]) for s in steps] == [(32, 8), (32, 8)]
