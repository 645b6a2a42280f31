from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from pods_plugin.cpu.generation import (
    BatchedGenerator,
    GenerationRequest,
    GenerationResult,
    _invert,
    _truncate,
)
from tests.cpu.helpers import EOS, full_log_probs, make_model


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def generator(model: Qwen2ForCausalLM) -> BatchedGenerator:
    return BatchedGenerator(model, [EOS], pad_token_id=0)


def prompt(index: int, length: int) -> list[int]:
    return np.random.default_rng(index).integers(3, 40, length).tolist()


def mixed_requests(count: int = 16) -> list[GenerationRequest]:
    """Different lengths, parameters and seeds; some prompts twice."""
    return [
        GenerationRequest(
            prompt_ids=prompt(index // 2, 1 + 3 * (index // 2 % 5)),
            max_tokens=4 + index % 7,
            seed=1000 + index,
            temperature=(1.0, 0.7, 0.0, 1.3)[index % 4],
            top_p=(1.0, 0.9)[index % 2],
            top_k=(-1, -1, -1, 5, 0)[index % 5],
            stop_token_ids=((), (7, 9))[index % 3 == 0],
        )
        for index in range(count)
    ]


def test_greedy_is_that_of_transformers(model: Qwen2ForCausalLM, generator: BatchedGenerator) -> None:
    prompts = [prompt(index, length) for index, length in enumerate((1, 3, 9, 17, 5))]
    results = generator.generate(
        [GenerationRequest(prompt_ids=ids, max_tokens=20, temperature=0.0) for ids in prompts]
    )
    for ids, result in zip(prompts, results, strict=True):
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=EOS
        )[0, len(ids) :].tolist()
        assert result.token_ids == expected


def test_log_probs_are_those_of_a_full_forward(model: Qwen2ForCausalLM, generator: BatchedGenerator) -> None:
    requests = mixed_requests()
    for request, result in zip(requests, generator.generate(requests), strict=True):
        ids = [*request.prompt_ids, *result.token_ids]
        expected = full_log_probs(model, ids, len(request.prompt_ids), request.temperature)
        np.testing.assert_allclose(result.log_probs, expected, atol=1e-5)


def test_a_seed_gives_the_same_rollout_however_requests_are_batched(generator: BatchedGenerator) -> None:
    requests = mixed_requests()
    together = generator.generate(requests)
    alone = [generator.generate([request])[0] for request in requests]
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = generator.generate([requests[index] for index in order])
    for index, result in enumerate(together):
        assert result.token_ids == alone[index].token_ids
        assert result.stop_reason == alone[index].stop_reason
        np.testing.assert_allclose(result.log_probs, alone[index].log_probs, atol=1e-5)
    for index, result in zip(order, shuffled, strict=True):
        assert result.token_ids == together[index].token_ids


def test_seeds_differ(generator: BatchedGenerator) -> None:
    results = generator.generate(
        [
            GenerationRequest(prompt_ids=[5, 6], max_tokens=12, seed=seed, temperature=1.5, ignore_eos=True)
            for seed in range(8)
        ]
    )
    assert len({tuple(result.token_ids) for result in results}) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    """Chi-square of the first token over 4000 seeds; the seeds are fixed, so this is no gamble."""
    model = make_model(vocab_size=12)
    count = 4000
    results = BatchedGenerator(model, [], pad_token_id=0).generate(
        [
            GenerationRequest(prompt_ids=[3, 4, 5], max_tokens=2, seed=seed, temperature=temperature)
            for seed in range(count)
        ]
    )
    for column in range(2):
        # Of the second token: those that follow the most frequent first one.
        first = Counter(result.token_ids[0] for result in results).most_common(1)[0][0]
        prefix = [3, 4, 5] if column == 0 else [3, 4, 5, first]
        drawn = [r.token_ids[column] for r in results if column == 0 or r.token_ids[0] == first]
        with torch.no_grad():
            probs = (model(torch.tensor([prefix])).logits[0, -1] / temperature).softmax(-1).double().numpy()
        observed = np.bincount(drawn, minlength=12)
        common = probs * len(drawn) >= 5  # the rest as one class
        expected = np.append(probs[common], probs[~common].sum() + 1e-12) * len(drawn)
        counts = np.append(observed[common], observed[~common].sum())
        statistic = ((counts - expected) ** 2 / expected).sum()
        degrees = len(expected) - 1
        assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 4, (statistic, degrees)


def test_top_k_and_top_p_are_respected_and_leave_log_probs_alone(
    model: Qwen2ForCausalLM, generator: BatchedGenerator
) -> None:
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.5).softmax(-1).double()
    ranked = probs.sort(descending=True)
    nucleus = int((ranked.values.cumsum(0) < 0.8).sum()) + 1

    def drawn(**parameters: Any) -> list[GenerationResult]:
        return generator.generate(
            [
                GenerationRequest(
                    prompt_ids=[5, 6, 7], max_tokens=1, seed=seed, temperature=1.5, **parameters
                )
                for seed in range(500)
            ]
        )

    for results, allowed in (
        (drawn(top_k=3), 3),
        (drawn(top_p=0.8), nucleus),
        (drawn(top_k=3, top_p=0.999), 3),
    ):
        tokens = {result.token_ids[0] for result in results}
        assert tokens == set(ranked.indices[:allowed].tolist())
        for result in results[:20]:
            assert result.log_probs[0] == pytest.approx(float(probs[result.token_ids[0]].log()), abs=1e-5)


def test_truncation_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    probs = torch.from_numpy(rng.dirichlet(np.full(9, 0.5), size=50))
    top_k = torch.from_numpy(rng.integers(-1, 12, 50))
    top_p = torch.from_numpy(rng.uniform(0.05, 1.0, 50))
    result = _truncate(probs, top_k, top_p)
    for row in range(50):
        order = np.argsort(-probs[row].numpy(), kind="stable")
        kept = order[: int(top_k[row])] if top_k[row] > 0 else order
        mass, total, expected = 0.0, float(probs[row][kept].sum()), []
        for token in kept:
            expected.append(token)
            mass += float(probs[row][token])
            if mass >= float(top_p[row]) * total:
                break
        assert set(result[row].nonzero()[:, 0].tolist()) == set(expected), row
        assert torch.equal(result[row][expected], probs[row][expected])


def test_inversion_never_gives_an_impossible_token() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).double()
    numbers = torch.tensor([0.0, 0.299, 0.3, 0.999, 1 - 2**-53]).double()
    assert _invert(probs.expand(5, -1).contiguous(), numbers).tolist() == [1, 1, 3, 3, 3]


def test_eos_ends_a_sequence_and_is_its_last_token(generator: BatchedGenerator) -> None:
    requests = [
        GenerationRequest(prompt_ids=prompt(seed, 3), max_tokens=60, seed=seed, temperature=1.5)
        for seed in range(32)
    ]
    results = generator.generate(requests)
    ended = [result for result in results if result.stop_reason == "completed"]
    assert ended and all(r.token_ids[-1] == EOS and EOS not in r.token_ids[:-1] for r in ended)
    full = [result for result in results if result.stop_reason == "length"]
    assert all(len(r.token_ids) == 60 and EOS not in r.token_ids for r in full)
    assert len(ended) + len(full) == len(results)


def test_stop_tokens_and_ignore_eos(generator: BatchedGenerator) -> None:
    base = GenerationRequest(prompt_ids=prompt(1, 3), max_tokens=60, seed=3, temperature=1.5, ignore_eos=True)
    free = generator.generate([base])[0].token_ids
    assert len(free) == 60
    stop = free[20]
    stopped = generator.generate(
        [
            GenerationRequest(
                prompt_ids=prompt(1, 3),
                max_tokens=60,
                seed=3,
                temperature=1.5,
                ignore_eos=True,
                stop_token_ids=(stop,),
            )
        ]
    )[0]
    assert stopped.stop_reason == "completed"
    assert stopped.token_ids == free[: free.index(stop) + 1]


def test_every_request_has_its_own_max_tokens(generator: BatchedGenerator) -> None:
    requests = [
        GenerationRequest(prompt_ids=[5, 6], max_tokens=n, seed=n, ignore_eos=True)
        for n in (1, 30, 7, 2, 2, 13)
    ]
    results = generator.generate(requests)
    assert [len(result.token_ids) for result in results] == [1, 30, 7, 2, 2, 13]
    assert {result.stop_reason for result in results} == {"length"}


def test_a_stop_token_at_max_tokens_is_completed(generator: BatchedGenerator) -> None:
    base = GenerationRequest(prompt_ids=[5, 6], max_tokens=3, seed=1, ignore_eos=True)
    last = generator.generate([base])[0].token_ids[-1]
    first = generator.generate([base])[0].token_ids.index(last)
    result = generator.generate(
        [
            GenerationRequest(
                prompt_ids=[5, 6], max_tokens=first + 1, seed=1, ignore_eos=True, stop_token_ids=(last,)
            )
        ]
    )[0]
    assert result.stop_reason == "completed"


def test_abort_returns_what_there_is(generator: BatchedGenerator) -> None:
    abort, steps = threading.Event(), []

    def on_token() -> None:
        steps.append(1)
        if len(steps) == 5:
            abort.set()

    requests = [
        GenerationRequest(prompt_ids=[5, 6], max_tokens=2, seed=0, ignore_eos=True),
        GenerationRequest(prompt_ids=[5, 6, 7], max_tokens=50, seed=1, ignore_eos=True),
    ]
    done, cut = generator.generate(requests, abort=abort, on_token=on_token)
    whole = generator.generate(requests)
    assert (done.stop_reason, done.token_ids) == ("length", whole[0].token_ids)
    assert (cut.stop_reason, cut.token_ids) == ("aborted", whole[1].token_ids[:5])
    assert len(cut.log_probs) == 5

    never = generator.generate(requests, abort=abort)
    assert [result.token_ids for result in never] == [[], []]
    assert {result.stop_reason for result in never} == {"aborted"}


class CountingModel:
    """Passes calls on, and notes the batch rows of each."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model, self.config, self.rows = model, model.config, []  # type: ignore[var-annotated]

    def __call__(self, **kwargs: object) -> object:
        self.rows.append(kwargs["input_ids"].shape[0])  # type: ignore[attr-defined]
        return self.model(**kwargs)


def test_a_prompt_is_computed_once_and_finished_rows_cost_nothing(model: Qwen2ForCausalLM) -> None:
    counting = CountingModel(model)
    requests = [
        GenerationRequest(
            prompt_ids=prompt(i // 8, 4), max_tokens=40 if i == 3 else 5, seed=i, ignore_eos=True
        )
        for i in range(16)
    ]
    BatchedGenerator(counting, [EOS], pad_token_id=0).generate(requests)
    assert counting.rows == [2] + 4 * [16] + 35 * [1]


def test_nothing_to_do(generator: BatchedGenerator) -> None:
    assert generator.generate([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_requests(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationRequest(**{"prompt_ids": [1], "max_tokens": 1, **change})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_diverged_weights_are_an_error(temperature: float) -> None:
    model = make_model()
    model.lm_head.weight.data[4, 0] = float("nan")
    generator = BatchedGenerator(model, [EOS], pad_token_id=0)
    with pytest.raises(FloatingPointError, match="diverged"):
        generator.generate([GenerationRequest(prompt_ids=[5], max_tokens=2, temperature=temperature)])
