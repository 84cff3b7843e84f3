"""A model build over plain tensors and dense attention: architectures are checked without an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import AttentionLayer, AttentionSpec, Embedding, Model, OpSet, Parallel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    first, second = x.chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def rotary(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> Any:
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
    for x in (q, k):
        assert x.stride()[1:] == (x.shape[2], 1)
        rotate(x[..., : cos_sin.shape[1]], cos, sin)
    return q, k


OPS = {
    "embedding": lambda ids, weight: F.embedding(ids, weight),
    "rms_norm": rms_norm,
    "add_rms_norm": lambda x, residual, weight, eps: (rms_norm(x + residual, weight, eps), x + residual),
    "rotary": rotary,
    "add": lambda x, y: x + y,
    "scale": lambda x, factor: x * factor,
    "silu_mul": lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
}


class DictWeights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.left = dict(tensors)
        self.taken: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.left or name in self.taken

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.left.pop(name, self.taken.get(name))
        if tensor is None or tensor.shape != shape:
            raise CheckpointError(f"{name} {shape}")
        self.taken[name] = tensor
        return tensor


class DenseLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class DenseBuild:
    """A `ModelBuild` over plain tensors."""

    device = "cpu"

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        *,
        max_model_len: int = 256,
        parallel: Parallel | None = None,
        ops: OpSet | None = None,
    ) -> None:
        self.ops = ops
        self.config = config
        self.dtype = torch.float32
        self.max_model_len = max_model_len
        self.weights = DictWeights(tensors)
        self.parallel = parallel or Parallel()
        self.layers: list[AttentionLayer] = []

    def op(self, name: str) -> Any:
        if self.ops is None:
            return OPS[name]
        op = self.ops.get(name)
        assert op is not None
        return op.fn

    def linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], bias: bool = False
    ) -> DenseLinear:
        sizes = list(zip(names, out_features, strict=True))
        weight = torch.cat([self.weights.take(f"{n}.weight", (size, in_features)) for n, size in sizes])
        biases = torch.cat([self.weights.take(f"{n}.bias", (size,)) for n, size in sizes]) if bias else None
        return DenseLinear(weight, biases)

    def gated_linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], op: str, bias: bool = False
    ) -> Any:
        linear, gate = (
            self.linear(*names, in_features=in_features, out_features=out_features, bias=bias),
            self.op(op),
        )
        return lambda x: gate(linear(x))

    def lm_head(self, name: str, vocab_size: int, hidden_size: int) -> DenseLinear:
        return DenseLinear(self.weights.take(f"{name}.weight", (vocab_size, hidden_size)), None)

    def tied_embedding(self, name: str, vocab_size: int, hidden_size: int) -> tuple[Embedding, DenseLinear]:
        weight = self.weights.take(f"{name}.weight", (vocab_size, hidden_size))
        return lambda ids: F.embedding(ids, weight), DenseLinear(weight, None)

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        return lookup

    def attention(self, name: str, spec: AttentionSpec, *, scale: float) -> AttentionLayer:
        layer = AttentionLayer(
            name,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )
        self.layers.append(layer)
        return layer

    def attention_spec(self, **changes: Any) -> AttentionSpec:
        return AttentionSpec(dtype="float32", kv_dtype="float32", block_size=16, **changes)


class DenseContext:
    """A `ForwardContext` of one sequence: K and V grow, attention is dense, with window and cap as asked."""

    def __init__(self) -> None:
        self.cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer.name in self.cache:
            old_k, old_v = self.cache[layer.name]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.cache[layer.name] = (k, v)
        group = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        n, m = q.shape[0], k.shape[0]
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)[None, :]
        mask = behind < 0
        if layer.window is not None:
            mask |= behind >= layer.window
        weights = scores.masked_fill(mask, -math.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(group, 1)).reshape(n, -1)


class Dense:
    """What the fixture `dense` gives: builds, contexts, and runs of a built model."""

    build = DenseBuild
    context = DenseContext

    @staticmethod
    def run(model: Model, ids: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits [N, V] of all positions, computed in chunks of these sizes."""
        assert sum(chunks) == len(ids)
        ctx = DenseContext()
        logits = []
        start = 0
        for count in chunks:
            span = torch.arange(start, start + count)
            hidden, taps = model.forward(model.embed(torch.tensor(ids)[span]), span, ctx)
            assert hidden.shape[0] == count
            assert taps == {}
            logits.append(model.logits(hidden))
            start += count
        return torch.cat(logits)

    @staticmethod
    def greedy(model: Model, ids: list[int], count: int) -> list[int]:
        """The prompt and the `count` most likely ids after it, one by one with what is cached."""
        ctx = DenseContext()
        ids, done = list(ids), 0
        for _ in range(count):
            hidden, _ = model.forward(
                model.embed(torch.tensor(ids[done:])), torch.arange(done, len(ids)), ctx
            )
            done = len(ids)
            ids.append(int(model.logits(hidden[-1:]).argmax()))
        return ids


@pytest.fixture(scope="session")
def dense() -> type[Dense]:
    """Models over plain tensors: `dense.build(config, tensors)`, `dense.run(model, ids, chunks)`."""
    return Dense
