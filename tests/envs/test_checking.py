"""`pods check-env`: good environments pass, and each broken one fails the check that is about its fault."""

import pytest
from pods_envs.checking import CHECKS, FAILED, OK, SKIPPED, check_environment

MODULE = "tests.envs.checked_envs:checked/"


def failures(name, **options):
    """The failed checks and what was said; an id that was found runs all of them."""
    findings = list(check_environment(f"{MODULE}{name}-v0", **options))
    assert [finding.check for finding in findings] in (list(CHECKS), ["make"])
    return {finding.check: finding.detail for finding in findings if finding.status == FAILED}


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        (f"{MODULE}Good-v0", {}),
        (f"{MODULE}info-v0", {}),
        ("pods/Arithmetic-v0", {"level": 3, "size": 50, "max_turns": 2}),
        ("pods/GSM8K-v0", {"source": "procedural", "size": 50}),
        ("pods/MATH-v0", {"source": "procedural", "size": 50, "answer_format": "xml", "format_weight": 0.2}),
        ("pods/MATH500-v0", {"source": "procedural", "size": 50}),
    ],
)
def test_good_environments_pass(env_id, kwargs):
    assert {
        (finding.status, finding.detail)
        for finding in check_environment(env_id, kwargs)
        if finding.status != OK
    } == set()


def test_a_text_environment_of_another_kind_passes_what_applies():
    findings = {finding.check: finding.status for finding in check_environment(f"{MODULE}GuessingGame-v0")}
    skipped = {"problems", "references", "reward function"}
    assert findings == {check: SKIPPED if check in skipped else OK for check in CHECKS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NotText", {"make": "observation of type int"}),
        ("Nothing", {"make": "Environment `Nothing` doesn't exist in namespace checked"}),
        ("NoSplit", {"problems": "accept split= in __init__"}),
        ("WrongSpace", {"gymnasium": "observation"}),
        ("NumericAnswer", {"problems": "the answer of problem 0 is a int. Expected a str: str(answer)"}),
        (
            "InfoOfObjects",
            {"problems": "info['when'] of the problem 'Say a.' is a set that JSON cannot hold"},
        ),
        ("UnseededReset", {"seeds": "draw from self.np_random"}),
        ("UnseededProblems", {"seeds": "in another instance", "fresh process": "in another process"}),
        ("OneProblemOnly", {"seeds": "reset(seed=0) to reset(seed=9) all ask 'Say red.'"}),
        ("IgnoresIndex", {"seeds": "Expected problem "}),
        ("HashOrder", {"fresh process": "in another process. Expected the same: no hash()"}),
        (
            "WrongReference",
            {"references": "the reference 'blue' of 'Say blue.', given as 'Say blue.', got reward 0.0"},
        ),
        ("index", {"empty responses": "the response 'empty' ('') raised IndexError"}),
        ("utf8", {"binary responses": "the response 'lone surrogates' ('????"}),
        ("always", {"empty responses": "is judged a correct answer to 'Say red.'"}),
        (
            "nan",
            {"binary responses": "the response 'null bytes' got the reward nan. Expected a finite float"},
        ),
        ("truth", {"references": "got correct=1, format_ok=True. Expected two bools"}),
        ("evaluates", {"adversarial responses": "the process died after: the response 'Python that exits'"}),
        (
            "NeverEnds",
            {"turns": "the episode goes on after 2 wrong responses. Expected its end: max_turns=2"},
        ),
        ("OtherVerifier", {"reward function": "Expected the same from question, answer and info"}),
        ("Unpicklable", {"pickle": "no lambdas"}),
        ("LeavesThread", {"close": "the threads watcher go on"}),
        ("ClosesOnce", {"close": "a second close() raised AttributeError"}),
    ],
)
def test_a_broken_environment_fails_its_check(name, expected):
    found = failures(name)
    for check, text in expected.items():
        assert text in found.get(check, ""), found


@pytest.mark.parametrize("name", ["slow", "Hangs"])
def test_a_check_that_hangs_is_ended_and_the_next_ones_run(name):
    expected = {
        "slow": {"huge responses": "'200,000 letters'", "adversarial responses": "'a regex trap'"},
        "Hangs": {"adversarial responses": "'format strings'"},
    }[name]
    found = failures(name, seconds=3)
    assert list(found) == list(expected)
    for check, what in expected.items():
        assert f"nothing came within 3 s after: the response {what}" in found[check], found


def test_a_process_that_dies_fails_each_check_that_kills_it():
    found = failures("Dies")
    assert "the process died" in found["turns"] and "the process died" in found["seeds"]
    assert not {"make", "problems", "references"} & set(found)
