"""Builds a model: weights, ops and attention layers meet here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import (
    AttentionLayer,
    AttentionSpec,
    Embedding,
    Linear,
    LinearFormat,
    LinearWrapper,
    Parallel,
)
from headrace.executors.selection import Ops
from headrace.executors.wrapping import Product, Wrapping
from headrace.models.weights import CheckpointWeights

__all__ = ["Builder"]


class _BoundLinear:
    """A product with its prepared weights."""

    def __init__(self, kind: LinearFormat, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._apply = kind.apply
        self._logits = kind.logits
        self._prepared = kind.prepare(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._apply(x, self._prepared)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out] float32, not rounded."""
        return self._logits(x, self._prepared)


class _OutputProjection:
    """A product that gives logits, and the rows of its weight."""

    def __init__(self, kind: LinearFormat, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._kind = kind
        self._prepared = kind.prepare(weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        return self._kind.logits(x, self._prepared)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        return self._kind.rows(ids, self._prepared)


class Builder:
    """Implements `ModelBuild`, and keeps the attention layers the model declares."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        weights: CheckpointWeights,
        ops: Ops,
        device: str,
        max_model_len: int,
        block_size: int,
        layer_prefix: str = "",
        wrappers: Sequence[LinearWrapper] = (),
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.dtype
        self.device = device
        self.max_model_len = max_model_len
        self.parallel = Parallel()
        self.layers: dict[str, tuple[AttentionLayer, AttentionSpec]] = {}
        """Declared attention layers by name."""
        self._ops = ops
        self._block_size = block_size
        self._layer_prefix = layer_prefix
        self._wrapping = Wrapping(wrappers, ops.get)

    def op(self, name: str) -> Callable[..., Any]:
        """Return an op of the op set in use."""
        return self._ops.get(name)

    def linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], bias: bool = False
    ) -> Linear:
        """Build a product from the named weights, stacked over outputs."""
        linear = _BoundLinear(
            self._ops.linear("dense"), *self._stacked(names, in_features, out_features, bias=bias)
        )
        return self._wrapping.product(linear, names, out_features, in_features) if self._wrapping else linear

    def gated_linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], op: str, bias: bool = False
    ) -> Linear:
        """Build a product and its gated activation: in one go where the weight format can."""
        kind = self._ops.linear("dense")
        weight, biases = self._stacked(names, in_features, out_features, bias=bias)
        apply = kind.gated(weight, biases, op)
        if self._wrapping:
            return self._wrapping.gated(
                apply, lambda: _BoundLinear(kind, weight, biases), op, names, out_features, in_features
            )
        if apply is None:
            linear, gate = _BoundLinear(kind, weight, biases), self._ops.get(op)

            def apply(x: torch.Tensor) -> torch.Tensor:
                gated: torch.Tensor = gate(linear(x))
                return gated

        return Product(apply, in_features, weight.shape[0] // 2)

    def _stacked(
        self, names: Sequence[str], in_features: int, out_features: Sequence[int], *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights, biases = [], []
        for name, out in zip(names, out_features, strict=True):
            weights.append(self.weights.take(f"{name}.weight", (out, in_features)))
            if bias:
                biases.append(self.weights.take(f"{name}.bias", (out,)))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return weight, torch.cat(biases) if biases else None

    def lm_head(self, name: str, vocab_size: int, hidden_size: int) -> Linear:
        """Build the output projection."""
        weight = self.weights.take(f"{name}.weight", (vocab_size, hidden_size))
        return self._wrapping.head(name, _OutputProjection(self._ops.linear("dense"), weight))

    def tied_embedding(self, weight: torch.Tensor) -> tuple[Embedding, Linear]:
        """Return the lookup and the output projection that share a weight."""
        projection = _OutputProjection(self._ops.linear("dense"), weight)
        return projection.rows, self._wrapping.head("lm_head", projection)

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        """Return the lookup to use."""
        return self._wrapping.embedding(name, lookup, shape)

    def attention(self, name: str, spec: AttentionSpec, *, scale: float) -> AttentionLayer:
        """Declare an attention layer."""
        name = self._layer_prefix + name
        if name in self.layers:
            raise CheckpointError(f"the model declares the attention layer {name!r} twice")
        layer = AttentionLayer(
            name=name,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            causal=spec.causal,
        )
        self.layers[name] = (layer, spec)
        return layer

    def attention_spec(self, **changes: Any) -> AttentionSpec:
        """Return a spec with dtype, KV dtype and block size filled in."""
        dtype = str(self.dtype).removeprefix("torch.")
        known: dict[str, Any] = {"dtype": dtype, "kv_dtype": dtype, "block_size": self._block_size}
        return AttentionSpec(**(known | changes))
