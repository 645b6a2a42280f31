"""Problems from files, iterables and the hub."""

import json
import logging
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest
from pods_envs import Problem, answer_env, load_problems
from pods_envs.gsm8k import GSM8KEnv
from pods_envs.math import MATHEnv

GSM8K_ROW = {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}
MATH_ROW = {
    "problem": "1+1?",
    "solution": "It is $\\boxed{\\frac{4}{2}}$.",
    "level": "Level 1",
    "type": "Algebra",
}


def test_jsonl_and_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "rows.jsonl").write_text(
        json.dumps(GSM8K_ROW) + "\n\n" + json.dumps(GSM8K_ROW), encoding="utf-8"
    )
    parquet.write_table(pyarrow.Table.from_pylist([GSM8K_ROW] * 2), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        env = gymnasium.make("pods/GSM8K-v0", source=tmp_path / name).unwrapped
        assert list(env.problems) == [Problem("1+1?", "2", {"solution": GSM8K_ROW["answer"]})] * 2


def test_iterables():
    assert load_problems([GSM8K_ROW], to_problem=GSM8KEnv.to_problem)[0].answer == "2"
    assert load_problems(iter([Problem("q", "a"), {"question": "p", "answer": 3, "more": 1}])) == [
        Problem("q", "a"),
        Problem("p", "3", {"more": 1}),
    ]
    (problem,) = load_problems([MATH_ROW], to_problem=MATHEnv.to_problem)
    assert problem.answer == r"\frac{4}{2}" and problem.info["level"] == "Level 1"


def test_empty_references_are_dropped_with_a_note(caplog):
    with caplog.at_level(logging.WARNING):
        assert len(load_problems([{"question": "q", "answer": " "}, {"question": "q", "answer": "1"}])) == 1
    assert "dropped 1 rows without a reference answer: [0]" in caplog.text
    with pytest.raises(ValueError, match="no problem with a reference answer"):
        load_problems([])


def test_errors_say_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_problems(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="row 0 of list lacks 'answer'; it has"):
        load_problems([{"question": "q"}])
    with pytest.raises(ValueError, match="answer_format='roman' is not one of"):
        gymnasium.make("pods/GSM8K-v0", source="procedural", answer_format="roman")


def test_the_hub_is_asked_for_every_configuration(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [MATH_ROW if "math" in name.lower() else GSM8K_ROW]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(gymnasium.make("pods/MATH-v0", split="test").unwrapped.problems) == 7
    assert len(gymnasium.make("pods/GSM8K-v0").unwrapped.problems) == 1
    gymnasium.make("pods/MATH500-v0")
    assert asked[0] == ("EleutherAI/hendrycks_math", "algebra", "test")
    assert asked[7:] == [("openai/gsm8k", "main", "train"), ("HuggingFaceH4/MATH-500", None, "test")]

    def offline(name, config, split):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(ValueError, match=r"no network.*\.jsonl"):
        gymnasium.make("pods/GSM8K-v0", split="test")  # problems once read are kept: not those of before


def test_a_file_for_each_split(tmp_path):
    for split in ("train", "test"):
        row = {"question": split, "answer": "#### 2"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row), encoding="utf-8")
        env = gymnasium.make("pods/GSM8K-v0", source=tmp_path / "{split}.jsonl", split=split).unwrapped
        assert [problem.question for problem in env.problems] == [split]


def test_import_is_light():
    """How long it takes is in benchmarks/verification.py; most of it is gymnasium."""
    heavy = "torch verl sympy math_verify datasets pyarrow ray transformers asyncio multiprocessing.pool"
    script = f"import pods_envs, sys; print([name for name in {heavy.split()} if name in sys.modules])"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_many_environments_of_a_process_read_their_problems_once(tmp_path, monkeypatch):
    reads = []
    load = answer_env.load_problems
    monkeypatch.setattr(
        answer_env, "load_problems", lambda *args, **kw: reads.append(args) or load(*args, **kw)
    )
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")

    def problems(_: int = 0):
        return gymnasium.make("pods/GSM8K-v0", source=str(path)).unwrapped.problems

    with ThreadPoolExecutor(16) as pool:
        assert len({id(each) for each in pool.map(problems, range(64))}) == 1
    assert len(reads) == 1
    path.write_text(json.dumps({"question": "1+2?", "answer": "#### 3"}) + "\n")
    os.utime(path, (1, 1))
    assert problems()[0].answer == "3"  # a changed file is read again
    assert gymnasium.make("pods/Arithmetic-v0").unwrapped.problems is (
        gymnasium.make("pods/Arithmetic-v0").unwrapped.problems
    )
