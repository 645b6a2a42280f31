"""`pods check-env` and `pods data`, and the document on environments of one's own, run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pandas = pytest.importorskip("pandas")

ROOT = Path(__file__).resolve().parents[2]


def pods(*arguments, folder, path=ROOT, **environment):
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(path), **environment}
    command = [sys.executable, "-m", "pods_plugin.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


def test_check_env_prints_a_line_for_each_check(tmp_path):
    done = pods("check-env", "pods/Arithmetic-v0", "--env", "level=2", "--env", "size=20", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("│") for line in done.stdout.splitlines() if "│" in line]
    assert {line[2].strip() for line in lines} == {"ok"} and len(lines) == 14
    assert "ArithmeticEnv, 20 problems" in done.stdout


def test_check_env_of_a_broken_environment_fails(tmp_path):
    done = pods("check-env", "tests.envs.checked_envs:checked/utf8-v0", folder=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "FAILED" in line and "│" in line]
    assert "binary responses" in line and "the response 'lone surrogates'" in line
    assert "1 of 14 checks FAILED" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nobody/X-v0"], 1, "Namespace nobody not found"),
        (["no_such_module:X-v0"], 1, "No module named 'no_such_module'"),
        (["pods/Arithmetic-v0", "--env", "level=9"], 1, "level=9 is not in 0..5"),
        (["pods/Arithmetic-v0", "--env", "level"], 2, "--env level lacks a value; write --env level=VALUE"),
        (["pods/GSM8K-v0", "--env", "source={split}.jsonl"], 2, """--env 'source="{split}.jsonl"'"""),
    ],
)
def test_check_env_of_what_cannot_be_made(tmp_path, arguments, code, message):
    done = pods("check-env", *arguments, folder=tmp_path)
    assert done.returncode == code and message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr


def test_data_from_a_file_for_each_split_shows_a_bar_and_says_how_to_use_it(tmp_path):
    for split, size in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {i}?", "answer": f"#### {i}"} for i in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = pods(
        *("data", "pods/GSM8K-v0", "--out", "out", "--env", "source=./{split}.jsonl"),
        folder=tmp_path,
        FORCE_COLOR="1",
    )
    assert done.returncode == 0, done.stderr
    frames = {split: pandas.read_parquet(tmp_path / f"out/{split}.parquet") for split in ("train", "test")}
    assert [len(frames[split]) for split in ("train", "test")] == [3, 2]
    assert frames["test"]["extra_info"][1]["question"] == "test 1?"
    assert "100%" in done.stderr and "train" in done.stderr
    assert "data.train_files=out/train.parquet data.val_files=out/test.parquet" in done.stdout
    assert "note:" not in done.stdout


def test_data_says_when_both_splits_are_one_file(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}')
    done = pods("data", "pods/GSM8K-v0", "--out", "out", "--env", "source=one.jsonl", folder=tmp_path)
    assert "note: the splits hold the same problems" in done.stdout


def test_data_of_an_environment_with_one_split(tmp_path):
    row = {"problem": "1+1?", "answer": "2"}
    (tmp_path / "math.jsonl").write_text(json.dumps(row))
    done = pods("data", "pods/MATH500-v0", "--out", "out", "--env", "source=math.jsonl", folder=tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"], done.stderr
    assert "data.val_files=out/test.parquet" in done.stdout and "train_files" not in done.stdout


def test_data_of_a_hub_that_is_not_there_is_one_line(tmp_path):
    hub = """
def load_dataset(name, config, split):
    if name != "openai/gsm8k":
        raise ConnectionError("no network")
    return [{"question": f"{config} {split}?", "answer": "#### 1"}]
"""
    (tmp_path / "datasets.py").write_text(hub)  # in place of the package, which would ask the network
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = pods("data", "pods/GSM8K-v0", "--out", "out", folder=tmp_path, path=path)
    assert done.returncode == 0, done.stderr
    frame = pandas.read_parquet(tmp_path / "out/test.parquet")
    assert frame["extra_info"][0]["question"] == "main test?"
    done = pods("data", "pods/MATH500-v0", "--out", "math", folder=tmp_path, path=path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "no network" in done.stderr and "give a local file that ends in .jsonl" in done.stderr


def document():
    """The first block of Python and the commands of docs/custom-environment.md."""
    text = (ROOT / "docs/custom-environment.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.S)
    assert len((code + commands).splitlines()) <= 40
    return code, commands.replace("\\\n", " ").strip().splitlines()


def test_the_document_holds(tmp_path):
    """Its file and its commands, in a shell, in an empty folder; the last command only composes."""
    code, commands = document()
    (tmp_path / "my_pkg.py").write_text(code, encoding="utf-8")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    assert [command.split()[1] for command in commands[1:]] == ["check-env", "data", "train"]
    commands[-1] += " --dry-run"
    if not _has_verl():
        commands.pop()
    script = f'set -e\npods() {{ {sys.executable} -m pods_plugin.cli.main "$@"; }}\n' + "\n".join(commands)
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and "MyEnv, 512 problems" in done.stdout
    frame = pandas.read_parquet(tmp_path / "data/train.parquet")
    assert len(frame) == 512 and set(frame["data_source"]) == {"my_pkg:MyEnv-v0"}
    row = frame.iloc[0]
    assert row["prompt"][0]["content"] == row["reward_model"]["ground_truth"][::-1] + ">"
    _score_in_a_fresh_process(tmp_path)


def _score_in_a_fresh_process(folder):
    """As verl's reward worker does: nothing but the row and PYTHONPATH says what my_pkg is."""
    script = """
import asyncio, pandas
from pods_plugin.integration.reward import compute_score
row = pandas.read_parquet("data/test.parquet").iloc[0]
gold = row["reward_model"]["ground_truth"]
for response in (gold, gold + "x"):
    result = asyncio.run(compute_score(row["data_source"], response, gold, row["extra_info"]))
    print(result["score"], result["acc"], result["extracted"] == response)
"""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.stdout.splitlines() == ["1.0 1.0 True", "0.0 0.0 True"], done.stderr


def _has_verl():
    import importlib.util

    return importlib.util.find_spec("verl") is not None
