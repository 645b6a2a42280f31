"""A Ray cluster that is there already: two nodes, and verl's own command as a job of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).parent / "ray")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The environment of its nodes, and the address of its dashboard."""
    import ray

    from pods_plugin.cpu import ENVIRONMENT
    from tests.e2e.test_pods_train import clean_environment

    # What a machine without an accelerator needs; nothing of ours: the plugin comes by its entry point.
    environment = {**clean_environment(), **ENVIRONMENT}
    del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], environment["GLOO_SOCKET_IFNAME"]
    temp = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie there
    address, dashboard = f"{ray.util.get_node_ip_address()}:{free_port()}", free_port()
    ip, port = address.split(":")
    start = [RAY, "start", "--block", "--node-ip-address", ip, "--num-cpus=4", "--num-gpus=1"]
    head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={temp}"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in (head, [f"--address={address}"]):
            nodes.append(
                subprocess.Popen([*start, *arguments], env=environment, cwd=tmp_path, start_new_session=True)
            )
            status = [RAY, "status", "--address", address]
            for _ in range(60):
                found = subprocess.run(status, env=environment, capture_output=True, text=True, timeout=60)
                if f"/{len(nodes)}.0 GPU" in found.stdout:
                    break
                assert nodes[-1].poll() is None, "a node has ended"
                time.sleep(1)
            else:
                pytest.fail(found.stdout + found.stderr)
        yield environment, f"http://127.0.0.1:{dashboard}"
    finally:
        for node in reversed(nodes):
            node.terminate()  # `ray start --block` then ends its processes
        for node in nodes:
            node.wait(timeout=60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


def test_a_job_of_a_cluster_of_two_nodes(cluster, tiny, tmp_path):
    from omegaconf import OmegaConf, open_dict

    from tests.e2e.harness import make_config

    environment, dashboard = cluster
    config = make_config(
        tiny,
        "trainer.total_training_steps=2",
        "trainer.logger=[file]",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
    )
    with open_dict(config):
        del config.algorithm["downsample"], config.algorithm["downsample_kwargs"]
        config.ray_kwargs.ray_init = {"address": "auto"}
    OmegaConf.save(config, tmp_path / "mine.yaml")
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "sent").mkdir()
    submit = [RAY, "job", "submit", "--address", dashboard, "--working-dir", "sent", "--runtime-env-json"]
    submit += [json.dumps({"env_vars": {"VERL_FILE_LOGGER_PATH": str(metrics)}}), "--"]
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
    result = subprocess.run(
        [*submit, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert [(s["downsample/generated"], s["downsample/kept"]) for s in steps] == [(32, 8), (32, 8)]
    assert all(s["actor/grad_norm"] >= 0 for s in steps)
