"""What is right: attention and ops in float64, one token at a time, with no thought for speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["REFERENCE_OPS", "reference_attention"]


def reference_attention(
    q: torch.Tensor,
    k_all: torch.Tensor,
    v_all: torch.Tensor,
    *,
    first: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence: (out [n, H, D], lse [n, H]), float64.

    q [n, H, D] are the tokens at positions first … first + n - 1; k_all, v_all [T, K, D] hold positions 0 … T - 1.
    Without `causal` each of them sees all T.
    The log-sum-exp is that of the softmax's denominator, so it includes `sinks` [H].
    """
    group = q.shape[1] // k_all.shape[1]
    keys = k_all.double().repeat_interleave(group, dim=1)
    values = v_all.double().repeat_interleave(group, dim=1)
    out, lse = [], []
    for row, query in enumerate(q.double()):
        position = first + row
        begin = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if causal else len(keys)
        scores = torch.einsum("hd,thd->ht", query, keys[begin:end]) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        total = torch.logsumexp(scores, dim=1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double())
        weights = torch.exp(scores - total[:, None])
        out.append(torch.einsum("ht,thd->hd", weights, values[begin:end]))
        lse.append(total)
    return torch.stack(out), torch.stack(lse)


def _embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double()[ids]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.double() + residual.double()
    return _rms_norm(total, weight, eps), total


def _rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos_sin.shape[-1] // 2
    cos = cos_sin.double()[positions][:, None, :half]
    sin = cos_sin.double()[positions][:, None, half:]
    turned = []
    for x in (q.double(), k.double()):
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1))
    return turned[0], turned[1]


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight.double() + bias.double()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * 0.5 * torch.erfc(-wide / 2**0.5)


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def _gelu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * 0.5 * (1 + torch.tanh(inner)) * up


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


REFERENCE_OPS: Mapping[str, Callable[..., Any]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "add": lambda x, y: x.double() + y.double(),
    "scale": lambda x, factor: x.double() * factor,
    "silu_mul": _silu_mul,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "gelu_mul": _gelu_mul,
    "linear": _linear,
}
"""The built-in ops by name, as in `headrace.core.interfaces.ops`, pure (nothing in place), in float64; `linear`
is `(x, weight, bias)`."""
