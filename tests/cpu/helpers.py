"""A model small enough for unit tests, and what the actor would compute with it."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

EOS = 2


def make_model(vocab_size: int = 40) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,  # sharp distributions, so that a mistake shows
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def full_log_probs(model: Qwen2ForCausalLM, ids: list[int], start: int, temperature: float) -> torch.Tensor:
    """What verl's actor computes: log_softmax(logits / temperature) of a sequence, no padding, no cache."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
