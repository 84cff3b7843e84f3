"""Panels: the outputs that lie together in a packed weight, and what becomes of rows of gate and up in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.backends.cpu.library import Functions
from headrace.core.interfaces.wrapping import Segment

__all__ = ["PANEL", "GatedPanels", "interleaved"]

PANEL = 32
"""Outputs that lie together."""


def interleaved(stacked: torch.Tensor) -> torch.Tensor:
    """[2 · out, …] -> [panels · 32, …]: the halves' rows in turns of 16, with zeros for those that are missing."""
    half = stacked.shape[0] // 2
    missing = -half % (PANEL // 2)
    parts = [
        F.pad(part, (0,) * (2 * part.ndim - 1) + (missing,)).unflatten(0, (-1, PANEL // 2))
        for part in stacked.split(half)
    ]
    return torch.stack(parts, dim=1).flatten(0, 2)


class GatedPanels:
    """A product of gate and up, whose panels hold 16 outputs of each; a `SummedProduct`.

    apply: [N, in] -> [N, out], activated while sums are in registers.
    sums: [N, in] -> [N, panels · 32] float32, as they lie in panels.
    finish: the kernel that activates such sums.
    """

    def __init__(
        self,
        apply: Callable[[torch.Tensor], torch.Tensor],
        sums: Callable[[torch.Tensor], torch.Tensor],
        finish: Functions,
        out_features: int,
    ) -> None:
        self.segments = (
            Segment(0, out_features, 0, PANEL),
            Segment(out_features, 2 * out_features, PANEL // 2, PANEL),
        )
        self.sums = sums
        self._apply = apply
        self._finish = finish
        self._out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._apply(x)

    def finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, panels · 32] float32 -> [N, out]."""
        rows, size = sums.shape[0], self._out_features
        y = sums.new_empty((rows, size), dtype=dtype)
        self._finish[dtype](sums.data_ptr(), rows, sums.shape[1], size, y.data_ptr())
        return y
