"""The parts most decoder models share: causal self-attention, the gated feed-forward, and their block.

Each part fetches its ops, products and weights once, when it is built; a call only computes. N tokens of
any requests go through as [N, C]; which of them see each other is the attention context's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import ForwardContext, ModelBuild

__all__ = ["AttentionShape", "DecoderLayer", "GatedMLP", "SelfAttention", "require_whole_model", "set_aside"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a self-attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    """How many tokens a token sees, itself included; None: all."""
    qk_norm_eps: float | None = None
    """Queries and keys are normed, head by head, with this epsilon; None: they are not."""


class SelfAttention:
    """Causal self-attention with rotary positions and grouped query heads.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0.self_attn`.
    cos_sin: [P, D] float32, see `headrace.models.rope.cos_sin_table`; shared by all layers.
    """

    def __init__(self, build: ModelBuild, name: str, shape: AttentionShape, cos_sin: torch.Tensor) -> None:
        self._num_heads = shape.num_heads
        self._num_kv_heads = shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._q_size = shape.num_heads * shape.head_dim
        self._kv_size = shape.num_kv_heads * shape.head_dim
        self._cos_sin = cos_sin
        self._rotary = build.op("rotary")
        self._qkv = build.linear(
            f"{name}.q_proj",
            f"{name}.k_proj",
            f"{name}.v_proj",
            in_features=shape.hidden_size,
            out_features=(self._q_size, self._kv_size, self._kv_size),
            bias=shape.qkv_bias,
        )
        self._out = build.linear(
            f"{name}.o_proj",
            in_features=self._q_size,
            out_features=(shape.hidden_size,),
            bias=shape.out_bias,
        )
        self._norm = (
            None if shape.qk_norm_eps is None else _HeadNorms(build, name, shape.head_dim, shape.qk_norm_eps)
        )
        spec = build.attention_spec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
        )
        self._layer = build.attention(name, spec, scale=shape.head_dim**-0.5)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """X [N, C], positions [N] -> [N, C]."""
        q, k, v = self._qkv(x).split((self._q_size, self._kv_size, self._kv_size), dim=-1)
        # Ops take contiguous tensors; the rotation then works in place on these copies.
        q = q.contiguous().view(-1, self._num_heads, self._head_dim)
        k = k.contiguous().view(-1, self._num_kv_heads, self._head_dim)
        v = v.contiguous().view(-1, self._num_kv_heads, self._head_dim)
        if self._norm is not None:
            q, k = self._norm(q, k)
        q, k = self._rotary(positions, q, k, self._cos_sin)
        return self._out(ctx.attend(self._layer, q, k, v))


class _HeadNorms:
    """RMSNorm of each head of queries and keys, with weights shared by all heads."""

    def __init__(self, build: ModelBuild, name: str, head_dim: int, eps: float) -> None:
        self._rms_norm = build.op("rms_norm")
        self._q_weight = build.weights.take(f"{name}.q_norm.weight", (head_dim,))
        self._k_weight = build.weights.take(f"{name}.k_norm.weight", (head_dim,))
        self._eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [N, H, D] and k [N, K, D] -> the same, normed."""
        return self._rms_norm(q, self._q_weight, self._eps), self._rms_norm(k, self._k_weight, self._eps)


class GatedMLP:
    """down(silu(gate(x)) · up(x)), with gate and up as one product.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0.mlp`.
    """

    def __init__(
        self, build: ModelBuild, name: str, *, hidden_size: int, intermediate_size: int, bias: bool = False
    ) -> None:
        self._silu_mul = build.op("silu_mul")
        self._gate_up = build.linear(
            f"{name}.gate_proj",
            f"{name}.up_proj",
            in_features=hidden_size,
            out_features=(intermediate_size, intermediate_size),
            bias=bias,
        )
        self._down = build.linear(
            f"{name}.down_proj", in_features=intermediate_size, out_features=(hidden_size,), bias=bias
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        return self._down(self._silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Norm, attention, norm, feed-forward, each pair around the residual stream.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0`.
    """

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        *,
        attention: SelfAttention,
        mlp: GatedMLP,
        hidden_size: int,
        eps: float,
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._eps = eps
        self._rms_norm = build.op("rms_norm")
        self._add_rms_norm = build.op("add_rms_norm")
        self._input_norm = build.weights.take(f"{name}.input_layernorm.weight", (hidden_size,))
        self._post_norm = build.weights.take(f"{name}.post_attention_layernorm.weight", (hidden_size,))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), both [N, C]: the hidden state is their sum, which the next norm takes.

        `residual` is None before the first layer: x is the embedding.
        """
        if residual is None:
            x, residual = self._rms_norm(x, self._input_norm, self._eps), x
        else:
            x, residual = self._add_rms_norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, positions, ctx)
        x, residual = self._add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._mlp(x), residual


def require_whole_model(build: ModelBuild, num_layers: int) -> None:
    """Raise `CheckpointError` unless this rank holds every layer, unsplit."""
    parallel = build.parallel
    if parallel.tensor_size != 1:
        raise CheckpointError(
            f"this architecture runs on one rank, tensor_parallel_size is {parallel.tensor_size}; use 1"
        )
    end = num_layers if parallel.end_layer is None else parallel.end_layer
    if (parallel.first_layer, end) != (0, num_layers):
        raise CheckpointError(
            f"this architecture runs as a whole, a rank was given layers [{parallel.first_layer}, {end}) of "
            f"{num_layers}; use pipeline_parallel_size 1"
        )


def set_aside(build: ModelBuild, name: str, shape: tuple[int, ...]) -> None:
    """Take a tensor the checkpoint may carry and the model has no use for, so that it does not count as unknown."""
    if name in build.weights:
        build.weights.take(name, shape)
