"""No string may raise, hang or use up the memory."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pods_envs import Verdict, verify
from pods_envs.verifiers.extraction import FORMATS
from pods_envs.verifiers.latex import clean

PIECES = [
    *(
        "\\boxed{",
        "\\boxed",
        "}",
        "{",
        "(",
        ")",
        "[",
        "]",
        "\\{",
        "\\}",
        "####",
        "<answer>",
        "</answer>",
        "<think>",
    ),
    *(
        "</think>",
        "The answer is ",
        "$",
        "\\frac",
        "\\frac{1}{2}",
        "\\sqrt",
        "\\text{",
        "\\pm",
        "\\cup",
        "\\infty",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
        "\\\\",
        ",",
        ";",
        " or ",
        "=",
        "<",
        "\\le",
        "^",
        "_",
        "!",
        "%",
        "e",
    ),
    *(
        "1",
        "2.5",
        "1,000",
        "10^{10}",
        "x",
        "i",
        "\\pi",
        "+",
        "-",
        "*",
        "/",
        " ",
        "\n",
        ".",
        "\x00",
        "\ud800",
        "½",
        "²",
    ),
]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


@settings(max_examples=300, deadline=None)
@given(
    response=texts,
    gold=texts,
    dataset=st.sampled_from(["gsm8k", "math"]),
    answer_format=st.sampled_from(FORMATS),
)
def test_any_response_and_any_gold_get_a_verdict(response, gold, dataset, answer_format):
    verdict = verify(response, gold, dataset, answer_format, time_limit=0.3)
    assert isinstance(verdict, Verdict)
    assert verdict.method != "error", verdict
    assert verdict.reward == float(verdict.correct)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\\\\{}$<\n"), max_size=40))
def test_an_answer_equals_itself(text):
    verdict = verify("\\boxed{" + text + "}", text, answer_format="boxed", time_limit=0.3)
    assert verdict.correct or not clean(text), verdict


BOMBS = {
    "tower": r"\boxed{9^{9^9}}",
    "plain tower": "#### 9^9^9^9",
    "factorial": r"\boxed{(10^7)!}",
    "complex power": r"\boxed{(1+i)^{10^7}}",
    "product": r"\boxed{\prod_{k=1}^{10^{9}} k}",
    "symbolic tower": r"\boxed{x^{x^{x^{10^{10}}}}}",
    "braces": "\\boxed{" + "{" * 4000 + "7" + "}" * 4000 + "}",
    "open braces": "{" * 200_000,
    "open boxes": "\\boxed{" * 5000,
    "nested boxes": "\\boxed{" * 1000 + "7" + "}" * 1000,
    "many boxes": "\\boxed{7} " * 1000,
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 300 + "5" + "}" * 301,
    "digits": "\\boxed{" + "7" * 20_000 + "}",
    "sum": "\\boxed{" + "1+" * 100_000 + "1}",
    "parentheses": "\\boxed{" + "(" * 2000 + "7" + ")" * 2000 + "}",
    "list": "\\boxed{" + "1," * 2400 + "1}",
    "minus signs": "\\boxed{" + "-" * 4000 + "7}",
    "long text": "The answer is 1. " * 12_000,
    "dollars": "$ " * 100_000 + "#### 7",
    "spaces": "\\boxed{7" + " " * 200_000 + "}",
    "hashes": "#" * 200_000,
    "markers": "####" * 50_000,
    "tags": "<answer>" * 25_000,
    "thoughts": "<think>" * 30_000 + "</think>" * 30_000,
    "second thoughts": "\\boxed{7}" + "wait. no! " * 20_000,
    "empty lines": "\\boxed{7}" + "\n" * 100_000 + " $" * 50_000,
    "answers": "answer to a " * 16_000,
    "headings of answers": "# answer\n" * 20_000,
    "boxes in a list": "\\boxed{7}, " * 20_000,
    "denials": "not \\boxed{7} is not " * 10_000,
    "null bytes": "\x00" * 1000 + "\\boxed{\x007}",
    "lone surrogates": "\ud800\\boxed{\udfff7}\udc00",
}


@pytest.mark.parametrize("gold", ["7", "x", r"\{1,2\}"])
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, gold):
    verify(r"\boxed{x+1}", "1+x")  # the pool is up
    start = time.perf_counter()
    verdict = verify(BOMBS[name], gold, dataset="gsm8k")
    assert time.perf_counter() - start < 3
    assert verdict.method != "error"
    assert verify(r"\boxed{x+1}", "1+x").correct  # the pool is healthy
    harmless = (
        "braces",
        "nested boxes",
        "many boxes",
        "minus signs",
        "dollars",
        "spaces",
        "null bytes",
        "second thoughts",
        "empty lines",
        "boxes in a list",
    )
    assert not verdict.correct or (gold == "7" and name in harmless)
