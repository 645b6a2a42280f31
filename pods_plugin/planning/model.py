"""The shape of a decoder: parameters, FLOPs and bytes a token, from the keys of its Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pods_plugin.planning.errors import PlanError, nearest

FACTS = Path(__file__).resolve().parent / "models"

# Decoders with grouped-query attention, RMSNorm and SwiGLU. The second: their query, key and value have biases.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_BIASED = ("qwen2",)
_NORMED_HEADS = ("qwen3", "qwen3_moe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the formulas need of a model. `experts` is 0 for a dense one."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    biased: bool = False
    normed_heads: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """Reads a Hugging Face config.

        Raises:
            PlanError: The architecture is not one whose formulas are known, or a key is missing.
        """
        kind = str(config.get("model_type"))
        if kind not in _KNOWN:
            raise PlanError(
                f"{name}: model_type {kind} has no formulas here{nearest(kind, _KNOWN)}; known: {_KNOWN}"
            )
        try:
            heads = int(config["num_attention_heads"])
            sparse = kind == "qwen3_moe"
            if sparse and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
                raise PlanError(f"{name}: experts in some layers only; the formulas need them in every layer")
            return cls(
                name=name,
                hidden=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                ffn=0 if sparse else int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                biased=kind in _BIASED or bool(config.get("attention_bias", False)),
                normed_heads=kind in _NORMED_HEADS,
                experts=int(config["num_experts"]) if sparse else 0,
                active_experts=int(config["num_experts_per_tok"]) if sparse else 0,
                expert_ffn=int(config["moe_intermediate_size"]) if sparse else 0,
            )
        except KeyError as error:
            raise PlanError(f"{name}: config.json has no {error.args[0]}") from None

    # --- parameters ---------------------------------------------------------------------------------------------------

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, which is that of the value heads."""
        return self.kv_heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Weights of a layer's query, key, value and output projections."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def expert_matrices(self) -> int:
        """Weights of all experts of a layer."""
        return self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def layer_vectors(self) -> int:
        """A layer's norms and biases."""
        biases = self.query + 2 * self.key if self.biased else 0
        return 2 * self.hidden + biases + (2 * self.head_dim if self.normed_heads else 0)

    @property
    def layer_parameters(self) -> int:
        """All parameters of a layer."""
        router = self.hidden * self.experts
        dense = 3 * self.hidden * self.ffn
        return self.attention_matrices + self.layer_vectors + router + dense + self.expert_matrices

    @property
    def vocabulary_matrix(self) -> int:
        """Weights of the embedding, and as many of the output head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        ends = self.vocabulary_matrix * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of the experts only the chosen ones."""
        idle = (self.experts - self.active_experts) * 3 * self.hidden * self.expert_ffn
        return self.parameters - self.layers * idle

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters on all linear layers but the head, experts left out (they are no nn.Linear)."""
        pairs = (
            2 * (self.hidden + self.query)
            + 2 * (self.hidden + self.key)
            + 3 * (self.hidden + self.ffn) * (self.ffn > 0)
        )
        return self.layers * rank * pairs

    # --- work of a token ----------------------------------------------------------------------------------------------

    @property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: all active matrices and the head, not the embedding."""
        experts = self.active_experts * 3 * self.hidden * self.expert_ffn + self.hidden * self.experts
        layer = self.attention_matrices + 3 * self.hidden * self.ffn + experts
        return self.layers * layer + self.vocabulary_matrix

    def forward_flops(self, tokens: float, squared_lengths: float) -> float:
        """FLOPs of a forward pass: 2 a weight and token, and causal attention 2 * width a layer and pair of tokens.

        Args:
            tokens: Sum of the sequence lengths.
            squared_lengths: Sum of their squares.
        """
        return 2 * self.matmul_parameters * tokens + 2 * self.query * self.layers * squared_lengths

    def kv_bytes(self, element: int = 2) -> int:
        """Bytes of the KV cache a token."""
        return 2 * self.layers * self.key * element

    def layer_activations(self, *, fused: bool) -> int:
        """Bytes that a layer keeps a token for its backward pass, in bf16.

        Args:
            fused: Megatron with TransformerEngine, else the eager modules of transformers.
        """
        mlp = self.ffn or self.active_experts * self.expert_ffn
        dispatched = (
            4 * self.hidden * self.active_experts
        )  # a routed token is copied to each of its experts, and back
        if fused:
            return 8 * self.hidden + 4 * (self.query + self.key) + 6 * mlp + dispatched
        return 16 * self.hidden + 8 * (self.query + self.key) + 8 * mlp + dispatched


def known_models() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(path.stem for path in FACTS.glob("*.json"))


def find_model(path: str) -> ModelShape:
    """The shape of `actor_rollout_ref.model.path`: a folder with config.json, a JSON file, or a name on the hub.

    Raises:
        PlanError: Nothing is known of it here; the hub is never asked.
    """
    given = Path(path).expanduser()
    facts = FACTS / f"{path.rstrip('/').split('/')[-1]}.json"
    for file in (given / "config.json", given, facts):
        if file.is_file():
            try:
                config = json.loads(file.read_text())
            except ValueError as error:
                raise PlanError(f"{file} is no JSON: {error}") from None
            return ModelShape.from_config(config, facts.stem if file == facts else str(path))
    name = facts.stem
    raise PlanError(
        f"the shape of model {path} is not known here{nearest(name, known_models())}; "
        f"give --model a folder with config.json, or one of {', '.join(known_models())}"
    )
