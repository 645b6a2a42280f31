"""Reading runs: whole, resumed, half-written and live."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pods_plugin.reporting import MetricsTail, StepRecord, load_run, runs

VAL = "val-core/openai/gsm8k/acc/mean@1"


def test_load_run_separates_training_and_validation(tmp_path, pods_row, write):
    rows = [
        {"step": 0, "data": {VAL: 0.1, "val-aux/num_turns/mean": 2}},
        pods_row(1, 0.2),
        pods_row(2, 0.3, **{VAL: 0.4}),
    ]
    write(tmp_path / "arith" / "metrics.jsonl", rows)
    (tmp_path / "arith" / "config.yaml").write_text("algorithm:\n  downsample: max_variance\n")
    run = load_run(tmp_path / "arith")
    assert run.name == "arith"
    assert run.config == {"algorithm": {"downsample": "max_variance"}}
    assert [record.step for record in run.steps] == [1, 2]
    assert [(point.step, point.scores) for point in run.validations] == [
        (0, {"openai/gsm8k/acc": 0.1}),
        (2, {"openai/gsm8k/acc": 0.4}),
    ]


def test_load_run_takes_a_metrics_file_and_a_run_that_has_just_begun(tmp_path, plain_row, write):
    run = load_run(write(tmp_path / "plain.jsonl", [plain_row(1, 0.5)]))
    assert (run.name, run.config, len(run.steps)) == ("plain", None, 1)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("{}")
    assert load_run(tmp_path / "new").steps == []


def test_load_run_says_what_it_expected(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nothing is not a run: expected a folder with metrics\.jsonl"
    ):
        load_run(tmp_path / "nothing")


def test_bad_lines_are_skipped_and_null_is_nan(tmp_path, plain_row):
    good = json.dumps(plain_row(1, 0.5) | {"step": 1})
    half = json.dumps(plain_row(2, 0.5))[:40]
    lines = [
        good,
        "",
        "not json",
        "[1]",
        '{"step": "x", "data": {}}',
        b"\xff\xfe".decode("latin1"),
        '{"step": 3, "data": {"actor/grad_norm": null, "critic/score/mean": NaN, "a": "text"}}',
        half,
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="latin1")
    run = load_run(tmp_path)
    assert [record.step for record in run.steps] == [1, 3]
    assert math.isnan(run.steps[1].data["actor/grad_norm"])
    assert run.steps[1].get("actor/grad_norm") is None
    assert runs.reward_all(run.steps[1]) is None


def test_rows_of_one_step_in_one_file_are_merged(tmp_path, write):
    write(
        tmp_path / "metrics.jsonl",
        [{"step": 1, "data": {"a": 1, "b": 1}}, {"step": 1, "data": {"b": 2}}],
    )
    assert load_run(tmp_path).steps == [StepRecord(1, {"a": 1.0, "b": 2.0})]


def test_the_newest_part_wins_and_parts_are_ordered_by_number(tmp_path, write):
    def rows(steps, part):
        return [{"step": step, "data": {"part": part, VAL: part}} for step in steps]

    write(tmp_path / "metrics.part2.jsonl", rows(range(3, 7), 2))
    write(tmp_path / "metrics.part1.jsonl", rows(range(1, 6), 1))
    write(tmp_path / "metrics.part10.jsonl", rows(range(5, 10), 10))
    write(tmp_path / "metrics.jsonl", rows([7], 99))
    run = load_run(tmp_path)
    # Steps 8 and 9 of part 10 belong to a future that the resumed run, now at 7, has given up.
    expected = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 10), (6, 10), (7, 99)]
    assert [(record.step, record.data["part"]) for record in run.steps] == expected
    assert [(point.step, point.scores["openai/gsm8k/acc"]) for point in run.validations] == expected


def test_validation_before_a_resumed_run_keeps_the_training_step_it_resumed_from(tmp_path, plain_row, write):
    write(tmp_path / "metrics.part1.jsonl", [plain_row(step, 0.1) for step in (1, 2, 3)])
    write(tmp_path / "metrics.jsonl", [{"step": 2, "data": {VAL: 0.5}}])
    run = load_run(tmp_path)
    assert [record.step for record in run.steps] == [1, 2]
    assert [point.step for point in run.validations] == [2]
    (tmp_path / "metrics.jsonl").write_text("")  # a resumed run that has logged nothing yet
    assert [record.step for record in load_run(tmp_path).steps] == [1, 2, 3]


def test_values_with_down_sampling(pods_row):
    record = StepRecord(**pods_row(1, 0.2, **{"timing_s/testing": 3.0, "timing_s/ref": 0.03125}))
    assert runs.is_downsampled(record)
    assert (runs.reward_all(record), runs.reward_kept(record)) == (0.2, 0.45)
    assert (runs.variance_all(record), runs.variance_kept(record)) == (0.125, 0.25)
    assert runs.rollouts(record) == (16, 64)
    assert runs.phase_seconds(record) == {
        "generate": 2.0,
        "select": 0.0625,
        "log-prob": 0.53125,
        "update": 1.25,
        "sync weights": 0.125,
        "other": 0.03125,
        "checkpoint": 0.0,
        "validate": 3.0,
    }
    assert runs.train_seconds(record) == 4.0


def test_values_without_down_sampling(plain_row):
    record = StepRecord(**plain_row(1, 0.2, **{"timing_s/save_checkpoint": 0.0625}))
    assert not runs.is_downsampled(record)
    assert runs.reward_all(record) == 0.2
    assert runs.reward_kept(record) is runs.variance_all(record) is runs.variance_kept(record) is None
    assert runs.rollouts(record) is None
    assert runs.phase_seconds(record)["other"] == 0.0625
    assert runs.train_seconds(record) == 3.9375


def test_tail_waits_for_the_file_and_for_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1, "data": {"a": 1}}\n{"step": 2, "da')
    assert tail.read() == [StepRecord(1, {"a": 1.0})]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ta": {"a": 2}}\n')
    assert tail.read() == [StepRecord(2, {"a": 2.0})]


@pytest.mark.parametrize("rows", [1, 2, 5], ids=["shorter", "as long", "longer"])
def test_tail_starts_anew_when_the_file_does(tmp_path, rows):
    def content(value, count):
        return "".join(f'{{"step": {step}, "data": {{"a": {value}}}}}\n' for step in range(count))

    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text(content(1, 2))
    assert len(tail.read()) == 2
    path.write_text(content(2, rows))
    assert [(record.step, record.data["a"]) for record in tail.read()] == [
        (step, 2.0) for step in range(rows)
    ]
    path.unlink()
    assert tail.read() == []
    path.write_text(content(2, rows))
    assert len(tail.read()) == rows


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=3), max_size=12),
    cuts=st.lists(st.integers(min_value=0, max_value=1500), max_size=15),
    ascii_only=st.booleans(),
)
def test_tail_gives_every_row_once_however_the_file_grows(rows, cuts, ascii_only):
    records = [StepRecord(step, data) for step, data in enumerate(rows)]
    content = "".join(
        json.dumps({"step": record.step, "data": record.data}, ensure_ascii=ascii_only) + "\n"
        for record in records
    ).encode("utf-8")
    seen = []
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "metrics.jsonl").open("wb", buffering=0) as file,
    ):
        tail = MetricsTail(file.name)
        start = 0
        for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
            file.write(content[start:end])
            start = end
            new = tail.read()
            seen += new
            assert len(seen) == content[:end].count(b"\n")
    assert seen == records


def test_the_package_imports_nothing_heavy():
    heavy = ("matplotlib", "torch", "ray", "verl", "pandas")
    code = f"import sys, pods_plugin.reporting; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
