"""The cases and data sets beside the repository (../shared); skipped where they are not."""

import json
import re
from pathlib import Path

import gymnasium
import pods_envs
import pytest

SHARED = Path(__file__).parents[3].parent / "shared"

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there")


def rows(name):
    with (SHARED / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_verifier_cases():
    cases = [case for case in rows("cases/verifier_cases.jsonl") if case["expect"] is not None]
    wrong = []
    for case in cases:
        verdict = pods_envs.verify(case["response"], case["gold"], case["dataset"])
        if verdict.correct != case["expect"]:
            wrong.append((case["id"], case["dataset"], verdict.correct))
    assert len(wrong) <= 0.03 * len(cases), wrong
    falsely_true = [dataset for _, dataset, correct in wrong if correct]
    assert falsely_true.count("gsm8k") == 0 and falsely_true.count("math") <= 1, wrong


@pytest.mark.parametrize("name", [pytest.param("gsm8k_train", marks=pytest.mark.slow), "gsm8k_test"])
def test_gsm8k_solutions_verify_against_themselves(name):
    solutions = [row["answer"] for row in rows(f"data/{name}.jsonl")]
    verdicts = pods_envs.verify_many(solutions, solutions, "gsm8k")
    assert [
        solution for solution, verdict in zip(solutions, verdicts, strict=True) if not verdict.correct
    ] == []
    numbers = [float(solution.rsplit("####", 1)[1].replace(",", "")) for solution in solutions]
    neighbours = pods_envs.verify_many(solutions, solutions[1:] + solutions[:1], "gsm8k")
    equal = [one == other for one, other in zip(numbers, numbers[1:] + numbers[:1], strict=True)]
    assert [verdict.correct for verdict in neighbours] == equal


@pytest.mark.parametrize(
    ("env_id", "name", "size"),
    [
        ("pods/MATH-v0", "math_train", 7498),
        ("pods/MATH500-v0", "math500", 500),
        ("pods/GSM8K-v0", "gsm8k_test", 1319),
    ],
)
@pytest.mark.parametrize("answer_format", ["auto", pytest.param("xml", marks=pytest.mark.slow)])
def test_environments_score_their_references(env_id, name, size, answer_format):
    env = gymnasium.make(env_id, source=SHARED / f"data/{name}.jsonl", answer_format=answer_format).unwrapped
    assert len(env.problems) == size
    assert env.validate() == []


@pytest.mark.parametrize("name", [pytest.param("math_train", marks=pytest.mark.slow), "math500"])
def test_math_golds_verify_against_a_neighbour_only_where_the_values_are_equal(name):
    golds = [row["answer"] for row in rows(f"data/{name}.jsonl") if row["answer"].strip()]
    neighbours = golds[1:] + golds[:1]
    verdicts = pods_envs.verify_many([rf"\boxed{{{gold}}}" for gold in golds], neighbours)
    wrong = [
        (gold, neighbour, verdict)
        for gold, neighbour, verdict in zip(golds, neighbours, verdicts, strict=True)
        if verdict.correct != (bare(gold) == bare(neighbour))
    ]
    assert wrong == []


def bare(gold):
    """Without a label, a unit and spaces, which do not count; all that equal neighbours differ in."""
    return re.sub(r"\\text\s*\{.*?\}|\\%|\^\\circ|^\w\s*=|\\left|\\right|\\!|\\\$|\s", "", gold) or gold


def test_model_completions_are_cheap_and_mostly_agree():
    """`correct` there is another grader's opinion, and it counts answers in reasoning that is cut off."""
    completions = rows("cases/model_completions.jsonl")
    agree = 0
    for row in completions:
        dataset = "gsm8k" if row["dataset"] == "gsm8k" else "math"
        verdict = pods_envs.verify(row["completion"], row["answer"], dataset)
        assert verdict.method != "error"
        agree += verdict.correct == row["correct"]
    assert agree >= 0.94 * len(completions)
