"""Weights and inputs of 8 bits by their definition: rounded inputs, a product of whole numbers, two scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.core.interfaces.quantization import ChannelWeight

__all__ = ["ReferenceWhole", "rounded_rows"]


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows of x [N, in] to whole numbers from -127 to 127; return those and the rows' scales [N, 1], float32.

    A number is multiplied by 1 / scale, ties go to the even one. A row of zeros has the scale 0.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(scales > 0, 1 / scales, torch.zeros(()))
    return torch.round(wide * inverse), scales


class ReferenceWhole:
    """Products in float64, which holds sums of such whole numbers exactly."""

    row_invariant = True

    def prepare(self, weight: Sequence[ChannelWeight], bias: torch.Tensor | None) -> Any:
        """Keep codes and scales, stacked, and the bias."""
        codes = torch.cat([part.codes for part in weight])
        return codes, torch.cat([part.scales for part in weight]).float(), bias

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self.logits(x, prepared).to(x.dtype)

    def gated(self, weight: Any, bias: torch.Tensor | None, op: str) -> None:
        """None: product and activation are two calls here."""

    def logits(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out] float32."""
        codes, scales, bias = prepared
        numbers, row_scales = rounded_rows(x)
        sums = (numbers.double() @ codes.double().T).float()
        product: torch.Tensor = sums * (scales * row_scales)
        return product if bias is None else product + bias.float()

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [N] int64 of the weight, [N, in] in `dtype`."""
        codes, scales, _ = prepared
        found: torch.Tensor = codes[ids].float() * scales[ids][:, None]
        return found.to(dtype)
