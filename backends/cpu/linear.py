"""Weights packed once in the order they are read, and their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.backends.cpu.format import PanelFormat
from headrace.backends.cpu.library import Functions, Kernels, pointer
from headrace.backends.cpu.panels import PANEL, interleaved

__all__ = ["PackedLinear"]

STEP = 32
"""Inputs are padded to a multiple of it."""


@dataclass(frozen=True)
class _Packed:
    """A weight [out, in] as kernels read it."""

    data: torch.Tensor
    """[out / 32, padded / P, 32, P]; P is 2 for bfloat16 and 1 for float32."""
    bias: torch.Tensor | None
    """float32, padded to whole panels."""
    out_features: int
    in_features: int
    padded: int


class PackedLinear(PanelFormat[_Packed]):
    """Dense weights in panels of 32 outputs; each output is one sum over the inputs, in their order."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels, "linear", "logits")
        self._pack = kernels.by_type("pack")
        self._rows = kernels.by_type("rows")

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Packed:
        """Pack a weight [out, in]."""
        weight = weight.contiguous()
        out, inputs = weight.shape
        panels, padded = -(-out // PANEL), -(-inputs // STEP) * STEP
        data = self._arena.empty((panels * PANEL * padded,), weight.dtype)
        self._pack[weight.dtype](weight.data_ptr(), out, inputs, padded, data.data_ptr())
        if bias is not None:
            bias = F.pad(bias.float(), (0, panels * PANEL - out))
        return _Packed(data, bias, out, inputs, padded)

    def gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, op: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Pack a weight [2 · out, in] of gate and up; return its product, gated by `op` in one go."""
        if op not in self._gates:
            return None
        stacked = self.prepare(interleaved(weight), None if bias is None else interleaved(bias))
        return self._gated(stacked, replace(stacked, out_features=weight.shape[0] // 2), op)

    def _multiply(self, kernel: Functions, x: torch.Tensor, packed: _Packed, y: torch.Tensor) -> None:
        if packed.padded != packed.in_features:
            x = F.pad(x, (0, packed.padded - packed.in_features))
        kernel[x.dtype](
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            packed.data.data_ptr(),
            packed.out_features,
            packed.padded,
            pointer(packed.bias),
            y.data_ptr(),
            packed.out_features,
        )

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `ids` [N] int64 of the weight, [N, in], in its own type, which is `dtype`."""
        packed: _Packed = prepared
        out = packed.data.new_empty(ids.shape[0], packed.in_features)
        self._rows[out.dtype](
            ids.data_ptr(),
            ids.shape[0],
            packed.data.data_ptr(),
            packed.in_features,
            packed.padded,
            out.data_ptr(),
        )
        return out
