"""Batched generation in plain torch and transformers: token ids in, token ids and log-probs out.

Every request has its own sampling parameters and its own seed, and what it gives does not depend on which
requests share its batch: the random number of token i is the i-th of the counter-based generator Philox keyed
with the seed, and the token is found by inverting the cumulative distribution at it. One caveat: a matrix
product of another shape may round differently in the last bits of a logit, so a number within about 1e-6 of a
boundary between two tokens can fall on its other side in another batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions that a KV cache has in reserve when it grows.
_ROOM = 64
# Rows that are done are dropped from the batch once they are this share of it: each drop copies the KV cache.
_COMPACT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        prompt_ids: Token ids of the prompt, at least one.
        max_tokens: Most tokens to generate, at least 1.
        seed: Any non-negative integer below 2**128; the same seed gives the same tokens.
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens only; -1 or 0 for all.
        top_p: Sample among the fewest most likely tokens whose probabilities add up to this, after top_k; in
            (0, 1].
        stop_token_ids: Tokens that end this sequence besides the generator's eos tokens.
        ignore_eos: Do not stop at the generator's eos tokens.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise ValueError("prompt_ids is empty; a prompt has at least one token.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}; generate at least 1 token.")
        if not 0 <= self.seed < 2**128:
            raise ValueError(f"seed={self.seed} is not in [0, 2**128).")
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature={self.temperature} is negative; 0 is greedy, 1 the model's distribution."
            )
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}; give a positive number, or -1 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]; 1 keeps all tokens.")


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One generated sequence.

    Attributes:
        token_ids: The generated tokens; a stop token, if one was hit, is the last of them.
        log_probs: For each token its log-probability, see BatchedGenerator.
        stop_reason: `completed` (a stop token), `length` (max_tokens) or `aborted`.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str


class BatchedGenerator:
    """Generates for many requests at once with one causal language model.

    The log-prob of a token is that of the temperature-scaled distribution over the **whole** vocabulary,
    whatever top_k and top_p: it is what verl's actor computes for the same token (`log_softmax(logits /
    temperature)`), which is what rollout log-probs are compared with and corrected by. vLLM in verl's
    setting, `logprobs_mode: processed_logprobs`, gives the same as long as top_k and top_p are off, as they
    are by default; with them on, its numbers are of the truncated distribution and disagree with the actor.
    Greedy tokens (temperature 0) get the log-prob at temperature 1.

    Not thread-safe, and weights must not change during a call.

    Args:
        model: A transformers causal language model in eval mode.
        eos_token_ids: Tokens that end a sequence.
        pad_token_id: Any valid token id; fills the left of short prompts and is never attended to.
    """

    def __init__(self, model: Any, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.model = model
        self.eos_token_ids = tuple(int(token) for token in eos_token_ids)
        self.pad_token_id = int(pad_token_id)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        abort: threading.Event | None = None,
        on_token: Callable[[], None] | None = None,
    ) -> list[GenerationResult]:
        """Generate for all requests in one batch.

        Args:
            requests: Any mix of prompts and parameters. Equal prompts are computed once.
            abort: Looked at before every token; when set, unfinished sequences are returned as they are.
            on_token: Called after every token step, as a sign of life.

        Returns:
            One result a request, in order.
        """
        if not requests:
            return []
        columns = max(request.max_tokens for request in requests)
        tokens = torch.zeros(len(requests), columns, dtype=torch.long)
        log_probs = torch.zeros(len(requests), columns, dtype=torch.float32)
        lengths = torch.zeros(len(requests), dtype=torch.long)
        reasons = ["aborted"] * len(requests)
        sampler = _Sampler(requests, self.eos_token_ids)
        abort = abort or threading.Event()
        if abort.is_set():
            return [GenerationResult(token_ids=[], log_probs=[], stop_reason="aborted") for _ in requests]

        rows = torch.arange(len(requests))  # batch row -> request
        running = torch.ones(len(requests), dtype=torch.bool)  # of each batch row
        logits, cache, mask = self._prefill(requests)
        for column in range(columns):
            token, log_prob = sampler.sample(logits, rows, column)
            live = rows[running]
            tokens[live, column] = token[running]
            log_probs[live, column] = log_prob[running]
            lengths[live] = column + 1
            stopped = sampler.is_stop(token, rows) & running
            full = (sampler.max_tokens[rows] == column + 1) & running & ~stopped
            for row in rows[stopped].tolist():
                reasons[row] = "completed"
            for row in rows[full].tolist():
                reasons[row] = "length"
            running &= ~(stopped | full)
            if on_token is not None:
                on_token()
            left = int(running.sum())
            if not left or abort.is_set():
                break
            if left <= (1 - _COMPACT_SHARE) * len(rows):
                keep = running.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                rows, token, mask, running = rows[keep], token[keep], mask[keep], running[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(token.unsqueeze(1), mask, mask.sum(1, keepdim=True) - 1, cache)
        return [
            GenerationResult(
                token_ids=tokens[row, :length].tolist(),
                log_probs=log_probs[row, :length].tolist(),
                stop_reason=reasons[row],
            )
            for row, length in enumerate(lengths.tolist())
        ]

    def _prefill(
        self, requests: Sequence[GenerationRequest]
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        """Run every distinct prompt once and repeat what it gives for each request that has it.

        Returns:
            Next-token logits (requests, vocabulary), the KV cache, and the attention mask (requests, prompt
            columns).
        """
        distinct: dict[tuple[int, ...], int] = {}
        which = torch.tensor([distinct.setdefault(tuple(r.prompt_ids), len(distinct)) for r in requests])
        width = max(map(len, distinct))
        ids = torch.full((len(distinct), width), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(distinct):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        cache = DynamicCache(config=self.model.config)
        # Layers of another kind (sliding window) stay as they are.
        cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        if len(distinct) < len(requests):
            cache.batch_select_indices(which)
        return logits[which], cache, mask[which]

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """One pass: float32 logits (rows, vocabulary) at the last column; extends the cache."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


class _RoomyLayer(DynamicLayer):
    """A layer of a KV cache with room to write the next tokens in; transformers' own copies all for each."""

    _buffers: tuple[
        torch.Tensor, torch.Tensor
    ]  # (rows, heads, room, head size); `keys` and `values` are their start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (rows, heads, new positions, head size); returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if stop > self._buffers[0].shape[2]:
            grown = []
            for old, new in zip(self._buffers, (key_states, value_states), strict=True):
                rows, heads, _, size = new.shape
                buffer = new.new_empty(rows, heads, stop + _ROOM, size)
                buffer[:, :, :start] = old[:, :, :start]
                grown.append(buffer)
            self._buffers = (grown[0], grown[1])
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be taken more than once."""
        length = self.get_seq_length()
        self._buffers = (self._buffers[0][indices], self._buffers[1][indices])
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


class _Sampler:
    """The sampling parameters of all requests as tensors, one element a request."""

    def __init__(self, requests: Sequence[GenerationRequest], eos_token_ids: tuple[int, ...]) -> None:
        self.temperature = torch.tensor([request.temperature for request in requests], dtype=torch.float32)
        self.top_k = torch.tensor([request.top_k for request in requests])
        self.top_p = torch.tensor([request.top_p for request in requests], dtype=torch.float64)
        self.max_tokens = torch.tensor([request.max_tokens for request in requests])
        self.greedy = self.temperature == 0
        self.truncated = ((self.top_k > 0) | (self.top_p < 1)) & ~self.greedy
        self.uniform = torch.zeros(len(requests), int(self.max_tokens.max()), dtype=torch.float64)
        for row, request in enumerate(requests):
            if not self.greedy[row]:
                numbers = np.random.Generator(np.random.Philox(key=request.seed)).random(request.max_tokens)
                self.uniform[row, : request.max_tokens] = torch.from_numpy(numbers)
        stops = [
            {*request.stop_token_ids, *(() if request.ignore_eos else eos_token_ids)} for request in requests
        ]
        self.stop_tokens = torch.full((len(requests), max(1, *map(len, stops))), -1)
        for row, stop in enumerate(stops):
            self.stop_tokens[row, : len(stop)] = torch.tensor(sorted(stop))

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, column: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the token of one column.

        Args:
            logits: (batch, vocabulary) float32.
            rows: (batch,) the request of each batch row.
            column: Which token of the sequence this is.

        Returns:
            Token ids (batch,) int64 and their log-probs (batch,) float32.
        """
        greedy = self.greedy[rows]
        scale = torch.where(greedy, torch.ones(()), self.temperature[rows])
        log_probs = torch.log_softmax(logits / scale.unsqueeze(1), dim=-1)
        if bool(greedy.all()):
            token = logits.argmax(-1)
        else:
            probs = log_probs.double().exp_()
            truncated = self.truncated[rows].nonzero().squeeze(1)
            if len(truncated):
                requests = rows[truncated]
                probs[truncated] = _truncate(probs[truncated], self.top_k[requests], self.top_p[requests])
            token = _invert(probs, self.uniform[rows, column])
            token = torch.where(greedy, logits.argmax(-1), token)
        chosen = log_probs.gather(1, token.unsqueeze(1)).squeeze(1)
        if not bool(chosen.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights have diverged.")
        return token, chosen

    def is_stop(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Whether each (batch,) token ends the sequence of its batch row."""
        return (token.unsqueeze(1) == self.stop_tokens[rows]).any(1)


def _truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what top-k and then top-p leave out. (rows, vocabulary) float64 in and out, not renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    k = torch.where(top_k > 0, top_k, probs.shape[-1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= k, 0.0)
    before = ordered.cumsum(-1) - ordered  # probability of all that is likelier
    ordered = ordered.masked_fill(
        (before >= top_p.unsqueeze(1) * ordered.sum(-1, keepdim=True)) & (rank > 0), 0.0
    )
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution.

    Args:
        probs: (rows, vocabulary) float64, not necessarily adding up to one.
        uniform: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64: the first token whose cumulative probability exceeds the number; never one of
        probability 0.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return token.clamp(max=probs.shape[-1] - 1)  # only NaN lands outside; the caller reports it
