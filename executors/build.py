"""Builds a model: weights, ops and attention layers meet here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    QuantizedWeight,
    WeightQuantizer,
)
from headrace.executors.selection import Ops
from headrace.executors.wrapping import Product, Wrapping
from headrace.models.weights import CheckpointWeights

__all__ = ["Builder"]


@dataclass(frozen=True)
class _Weight:
    """The weight of a product as a linear format takes it, [out, in], and its bias."""

    format: str
    value: Any
    """A tensor for `dense`, else a list of quantized weights."""
    bias: torch.Tensor | None
    out_features: int
    in_features: int


class _BoundLinear:
    """A product with its prepared weights."""

    def __init__(self, kind: LinearFormat, weight: _Weight) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._apply = kind.apply
        self._logits = kind.logits
        self._prepared = kind.prepare(weight.value, weight.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._apply(x, self._prepared)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out] float32, not rounded."""
        return self._logits(x, self._prepared)


class _Beside:
    """Products whose outputs stand beside each other: parts of a stack that are held in different formats."""

    def __init__(self, parts: Sequence[_BoundLinear]) -> None:
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return torch.cat([part(x) for part in self._parts], dim=1)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out] float32, not rounded."""
        return torch.cat([part.sums(x) for part in self._parts], dim=1)


class _OutputProjection:
    """A product that gives logits, and the rows of its weight."""

    def __init__(self, kind: LinearFormat, weight: _Weight, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._kind = kind
        self._dtype = dtype
        self._prepared = kind.prepare(weight.value, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        return self._kind.logits(x, self._prepared)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        return self._kind.rows(ids, self._prepared, self._dtype)


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
        kv_dtype: str = "auto",
        wrappers: Sequence[LinearWrapper] = (),
        quantizer: WeightQuantizer | None = None,
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
        self._quantizer = quantizer
        self._kv_dtype = kv_dtype

    def op(self, name: str) -> Callable[..., Any]:
        """Return an op of the op set in use."""
        return self._ops.get(name)

    def linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], bias: bool = False
    ) -> Linear:
        """Build a product from the named weights, stacked over outputs."""
        linear = self._product(self._weights(names, in_features, out_features, bias=bias))
        return self._wrapping.product(linear, names, out_features, in_features) if self._wrapping else linear

    def gated_linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], op: str, bias: bool = False
    ) -> Linear:
        """Build a product and its gated activation: in one go where the weight format can."""
        weights = self._weights(names, in_features, out_features, bias=bias)
        apply = None
        if len(weights) == 1:
            (weight,) = weights
            apply = self._ops.linear(weight.format).gated(weight.value, weight.bias, op)
        if self._wrapping:
            return self._wrapping.gated(
                apply, lambda: self._product(weights), op, names, out_features, in_features
            )
        if apply is None:
            linear, gate = self._product(weights), self._ops.get(op)

            def apply(x: torch.Tensor) -> torch.Tensor:
                gated: torch.Tensor = gate(linear(x))
                return gated

        return Product(apply, in_features, sum(out_features) // 2)

    def _product(self, weights: Sequence[_Weight]) -> _BoundLinear | _Beside:
        parts = [_BoundLinear(self._ops.linear(weight.format), weight) for weight in weights]
        return parts[0] if len(parts) == 1 else _Beside(parts)

    def _weights(
        self, names: Sequence[str], in_features: int, out_features: Sequence[int], *, bias: bool
    ) -> list[_Weight]:
        """Take the weights of a stack; those that follow each other in one format are one."""
        stacks: list[tuple[str, list[Any], list[torch.Tensor], int]] = []
        for name, out in zip(names, out_features, strict=True):
            value = self._weight(name, (out, in_features))
            format = "dense" if isinstance(value, torch.Tensor) else value.format
            own = [self.weights.take(f"{name}.bias", (out,))] if bias else []
            if stacks and stacks[-1][0] == format:
                _, values, biases, before = stacks[-1]
                stacks[-1] = (format, [*values, value], [*biases, *own], before + out)
            else:
                stacks.append((format, [value], own, out))
        return [
            _Weight(
                format,
                _stacked(values) if format == "dense" else values,
                _stacked(biases) if biases else None,
                out,
                in_features,
            )
            for format, values, biases, out in stacks
        ]

    def _weight(self, name: str, shape: tuple[int, int]) -> QuantizedWeight | torch.Tensor:
        """Take a weight as the quantization method has it, else as numbers; count the memory it will take."""
        weight = None if self._quantizer is None else self._quantizer.weight(name, shape, self.weights)
        if weight is None:
            return self.weights.take(f"{name}.weight", shape)
        if tuple(weight.shape) != shape:
            raise CheckpointError(
                f"{name}: the quantized weight has the shape {list(weight.shape)}; the model's configuration asks "
                f"for {list(shape)}"
            )
        if isinstance(weight, torch.Tensor):
            weight = weight.to(self.dtype)
        self.weights.hold(f"{name}.weight", weight.nbytes)
        return weight

    def lm_head(self, name: str, vocab_size: int, hidden_size: int) -> Linear:
        """Build the output projection."""
        return self._wrapping.head(name, self._projection(name, vocab_size, hidden_size))

    def tied_embedding(self, name: str, vocab_size: int, hidden_size: int) -> tuple[Embedding, Linear]:
        """Return the lookup and the output projection that share a weight."""
        projection = self._projection(name, vocab_size, hidden_size)
        return projection.rows, self._wrapping.head("lm_head", projection)

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        """Return the lookup to use."""
        return self._wrapping.embedding(name, lookup, shape)

    def _projection(self, name: str, vocab_size: int, hidden_size: int) -> _OutputProjection:
        (weight,) = self._weights((name,), hidden_size, (vocab_size,), bias=False)
        return _OutputProjection(self._ops.linear(weight.format), weight, self.dtype)

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
        kv_dtype = dtype if self._kv_dtype == "auto" else self._kv_dtype
        known: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "block_size": self._block_size}
        return AttentionSpec(**(known | changes))


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
