from __future__ import annotations

import numpy as np
import pytest
import torch

from pods_plugin.cpu import attention
from pods_plugin.cpu.generation import BatchedGenerator, GenerationRequest
from tests.cpu.helpers import EOS, full_log_probs, make_model


def test_generation_is_the_same_and_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        GenerationRequest(
            prompt_ids=[5 + i % 7, *range(4, 4 + i % 9)], max_tokens=90, seed=i, ignore_eos=True
        )
        for i in range(6)
    ]
    plain = BatchedGenerator(make_model(), [EOS], 0).generate(requests)
    monkeypatch.setattr(attention, "_LEAST_POSITIONS", 20)
    grouped_model, reference = make_model(), make_model()
    attention.use_grouped_attention(grouped_model)
    assert grouped_model.config._attn_implementation == attention.NAME
    repeated = []
    sdpa = attention.sdpa_attention_forward

    def spy(
        module: object, query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        repeated.append((query.shape[2], key.shape[2]))
        return sdpa(module, query, key, *args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", spy)
    grouped = BatchedGenerator(grouped_model, [EOS], 0).generate(requests)
    assert all(length > 1 or positions < 20 for length, positions in repeated)
    for request, one, other in zip(requests, plain, grouped, strict=True):
        assert one.token_ids == other.token_ids
        ids = [*request.prompt_ids, *other.token_ids]
        expected = full_log_probs(reference, ids, len(request.prompt_ids), 1.0)
        np.testing.assert_allclose(other.log_probs, expected, atol=1e-5)


def test_only_sdpa_is_replaced() -> None:
    model = make_model()
    model.set_attn_implementation("eager")
    attention.use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"


def test_guard_transformers_repeats_keys_under_a_mask() -> None:
    """When it no longer does, attention.py can go."""
    from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

    assert not use_gqa_in_sdpa(torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 4, 8))
