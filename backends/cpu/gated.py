"""Products of gate and up, activated while their sums are in registers, whatever format the weights have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.backends.cpu.library import Functions
from headrace.backends.cpu.panels import PANEL
from headrace.core.interfaces.wrapping import Segment

__all__ = ["GatedPanels"]


class GatedPanels:
    """A product of interleaved panels; a `SummedProduct`.

    multiply: (x [N, in], y [N, out]) writes the gated product into y.
    sums: x [N, in] -> [N, panels · 32] float32: 16 of the gate and 16 of what it gates, in turns.
    finish: kernels that activate such sums.
    """

    def __init__(
        self,
        multiply: Callable[[torch.Tensor, torch.Tensor], None],
        sums: Callable[[torch.Tensor], torch.Tensor],
        finish: Functions,
        out_features: int,
    ) -> None:
        self.segments = (
            Segment(0, out_features, 0, PANEL),
            Segment(out_features, 2 * out_features, PANEL // 2, PANEL),
        )
        self.sums = sums
        self._multiply = multiply
        self._finish = finish
        self._out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        y = x.new_empty(x.shape[0], self._out_features)
        self._multiply(x, y)
        return y

    def finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, panels · 32] float32 -> [N, out]."""
        rows = sums.shape[0]
        y = sums.new_empty((rows, self._out_features), dtype=dtype)
        self._finish[dtype](sums.data_ptr(), rows, sums.shape[1], self._out_features, y.data_ptr())
        return y
