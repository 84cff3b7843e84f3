"""The reference op set: every op of `headrace.core.interfaces.ops`, in plain torch.

Arithmetic follows the models' public definitions: statistics and rotations in float32, one rounding to the
type of x. torch's own sums and products change with the number of rows, so only what copies or multiplies and
adds element by element is called row-invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from headrace.backends.torch_reference.grouped import ReferenceGrouped
from headrace.backends.torch_reference.numerics import torch_numerics
from headrace.backends.torch_reference.whole import ReferenceWhole
from headrace.core.interfaces.attention import AttentionBackend
from headrace.core.interfaces.graph import GraphRecorder
from headrace.core.interfaces.ops import LinearFormat, Op

__all__ = [
    "DenseLinear",
    "TorchOps",
    "add",
    "add_rms_norm",
    "embedding",
    "gelu",
    "gelu_mul",
    "layer_norm",
    "narrow",
    "rms_norm",
    "rotary",
    "scale",
    "silu_mul",
]

_DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("cpu", "cuda")


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """ids [N] int64, weight [V, C] -> [N, C]."""
    return F.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, C] or [N, G, C], weight [C] -> x / sqrt(mean(x²) + eps) · weight; rounded before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [N, C] -> (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [N, H, D] and k [N, K, D] in place and return them.

    positions [N] int64; cos_sin [P, R], R ≤ D: the first R/2 columns are cosines, the others sines. Of each head's
    first R numbers, number i of the first half turns with number i of the second.
    """
    table = cos_sin.index_select(0, positions).float().unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    for x in (q, k):
        first, second = x[..., : cos_sin.shape[1]].chunk(2, dim=-1)
        wide_first, wide_second = first.float(), second.float()
        turned = wide_first * cos - wide_second * sin
        second.copy_(wide_second * cos + wide_first * sin)
        first.copy_(turned)
    return q, k


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, C], weight and bias [C] -> (x - mean(x)) / sqrt(var(x) + eps) · weight + bias; rounded once."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x [N, C] -> x · Φ(x), with the error function."""
    return F.gelu(x)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x, y [N, C] -> x + y."""
    return x + y


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x [N, C] -> x · factor; rounded once."""
    return x * factor


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [N, 2·C] -> silu(x[:, :C]) · x[:, C:], [N, C]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [N, 2·C] -> gelu(x[:, :C]) · x[:, C:], [N, C]; gelu approximated by tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [N, C] float32 -> x in another type."""
    return x.to(dtype)


class DenseLinear:
    """Weights as they are, `[out, in]` in the type of x, multiplied by `torch.nn.functional.linear`."""

    row_invariant = False

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Keep the weight, contiguous, and the bias."""
        return weight.contiguous(), bias

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, bias = prepared
        return F.linear(x, weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, op: str) -> None:
        """None: product and activation are two calls here."""

    def logits(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out] float32."""
        return self.apply(x, prepared).float()

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [N] int64 of the weight, [N, in]."""
        return F.embedding(ids, prepared[0]).to(dtype)


class TorchOps:
    """All ops on any device torch has; other op sets fall back to it."""

    name = "torch"

    def __init__(self) -> None:
        exact: tuple[Callable[..., Any], ...] = (embedding, rotary, add, scale, narrow)
        others: tuple[Callable[..., Any], ...] = (
            rms_norm,
            add_rms_norm,
            silu_mul,
            gelu_mul,
            layer_norm,
            gelu,
        )
        ops = [Op(fn.__name__, fn, row_invariant=True) for fn in exact]
        ops += [Op(fn.__name__, fn) for fn in others]
        self._ops = {op.name: op for op in ops}
        self._linear: dict[str, LinearFormat] = {
            "dense": DenseLinear(),
            "grouped": ReferenceGrouped(),
            "w8a8": ReferenceWhole(),
        }

    @property
    def numerics(self) -> str:
        """torch, and the instructions it takes."""
        return torch_numerics()

    def why_not(self, device: str, dtype: str) -> list[str]:
        """Reasons why it cannot serve `dtype` on `device`; empty: it can."""
        reasons = []
        if device.split(":")[0] not in _DEVICES:
            reasons.append(f"device {device} (runs on: {', '.join(_DEVICES)})")
        if dtype not in _DTYPES:
            reasons.append(f"dtype {dtype} (computes in: {', '.join(_DTYPES)})")
        return reasons

    def get(self, name: str) -> Op | None:
        """Return the implementation of `name`, or None."""
        return self._ops.get(name)

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """None: torch's calls are not recorded."""
        return None

    def linear(self, format: str) -> LinearFormat | None:
        """Return how weights of `format` run, or None."""
        return self._linear.get(format)
