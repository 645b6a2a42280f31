"""TransformerEngine's layers in plain PyTorch, under its parameter names, for which mbridge's weight names are written.

Import after megatron.core. They do what the recipes use: RMSNorm, packed causal self-attention, no dropout, no biases
in experts, no context parallelism; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.nn.parameter import Parameter


def _norm_weight(config: Any, size: int) -> Parameter:
    assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, (
        config.normalization
    )
    weight = Parameter(torch.ones(size, dtype=config.params_dtype))
    # Its gradients are summed over the ranks that hold parts of a sequence.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class Norm(torch.nn.Module):
    """For TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """For TELayerNormColumnParallelLinear: the norm before a linear layer is part of it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[..., in] -> [..., out / tp], and the bias."""
        x = F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(x, *args, **kwargs)


class DotProductAttention(torch.nn.Module):
    """For TEDotProductAttention: causal attention within each packed sequence."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "no ring attention here"
        assert attention_type == "self" and attn_mask_type in (
            AttnMaskType.causal,
            AttnMaskType.padding_causal,
        )
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        packed_seq_params: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Queries, keys and values [tokens, heads, dim] -> [tokens, heads x dim]."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", (
            "use_remove_padding=True only"
        )
        ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        assert ends[-1] == query.shape[0]
        out = []
        for start, end in pairwise(ends):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
            out.append(attended.transpose(0, 1).flatten(1))
        return torch.cat(out)


class GroupedLinear(torch.nn.Module):
    """For TEColumnParallelGroupedLinear and TERowParallelGroupedLinear: one matrix an expert, here in a loop.

    The token dispatcher communicates; each rank multiplies with its part.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert not bias and config.expert_tensor_parallel_size == 1, (
            "experts are not split over tensor ranks here"
        )
        for expert in range(num_gemms):
            weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            # As TransformerEngine marks them: each rank's experts count in the norm of the gradient ...
            set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=0, stride=1)
            # ... and no gradient of them is summed over ranks that hold others.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """Tokens in order of their experts, [tokens, in] -> [tokens, out], and no bias."""
        weights = list(self.parameters())
        parts = x.split(tokens_per_expert)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]), None


class SpecProvider(LocalSpecProvider):
    """For TESpecProvider: which class is which layer."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return DotProductAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        assert moe_use_grouped_gemm and not moe_use_legacy_grouped_gemm, (
            "mbridge names weights of grouped experts"
        )
        return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
