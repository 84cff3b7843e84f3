"""Weights of few bits by their definition: decoded to numbers, then multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from headrace.core.interfaces.quantization import GroupedWeight

__all__ = ["ReferenceGrouped", "decoded"]


def decoded(weight: GroupedWeight) -> torch.Tensor:
    """Return the numbers [out, in] float32 that a weight stands for, inputs in the model's order."""
    inputs = weight.shape[1]
    scales, minimums = weight.scales.float(), weight.minimums
    low = None if minimums is None else minimums.float()
    if weight.block_scales is not None:
        scales = weight.block_scales.float().repeat_interleave(_to_a_block(weight), 1) * scales
    if weight.block_minimums is not None and low is not None:
        low = -(weight.block_minimums.float().repeat_interleave(_to_a_block(weight), 1) * low)
    codes: torch.Tensor = weight.codes.float() - weight.zero
    numbers: torch.Tensor = F.pad(codes, (0, -inputs % weight.group_size))
    numbers = numbers.view(*scales.shape, -1) * scales[:, :, None]
    if low is not None:
        numbers += low[:, :, None]
    numbers = numbers.flatten(1)[:, :inputs]
    return numbers if weight.order is None else numbers.index_select(1, weight.order.argsort())


def _to_a_block(weight: GroupedWeight) -> int:
    assert weight.block_scales is not None
    return weight.scales.shape[1] // weight.block_scales.shape[1]


class ReferenceGrouped:
    """Keeps the codes; every call decodes them, and computes in float32."""

    row_invariant = False

    def prepare(self, weight: Sequence[GroupedWeight], bias: torch.Tensor | None) -> Any:
        """Keep the parts of the stack, and the bias."""
        return list(weight), bias

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self.logits(x, prepared).to(x.dtype)

    def gated(self, weight: Any, bias: torch.Tensor | None, op: str) -> None:
        """None: product and activation are two calls here."""

    def logits(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out] float32."""
        parts, bias = prepared
        weight = torch.cat([decoded(part) for part in parts])
        return F.linear(x.float(), weight, None if bias is None else bias.float())

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [N] int64 of the weight, [N, in] in `dtype`."""
        ((weight,), _) = prepared
        return decoded(weight).index_select(0, ids).to(dtype)
