"""Weights and inputs of 8 bits, multiplied as whole numbers: the linear format `w8a8`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.backends.cpu.format import PanelFormat
from headrace.backends.cpu.library import Functions, Kernels, pointer
from headrace.backends.cpu.panels import PANEL, interleaved
from headrace.core.interfaces.quantization import ChannelWeight

__all__ = ["WholeLinear"]

STEP = 4
"""Inputs that one instruction multiplies and sums."""


@dataclass(frozen=True)
class _Packed:
    data: torch.Tensor
    """[panels, padded / 4, 32, 4] int8."""
    scales: torch.Tensor
    """float32, padded to whole panels."""
    extra: torch.Tensor
    """int32, what the shift of inputs adds to every sum."""
    bias: torch.Tensor | None
    """float32, padded to whole panels."""
    out_features: int
    in_features: int
    padded: int


class WholeLinear(PanelFormat[_Packed]):
    """A sum of whole numbers is exact: rows, tiers and threads change no bit of it."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels, "whole", "whole_logits")
        self._pack = kernels.by_name("pack_whole")
        self._round = kernels.by_type("round_rows")
        self._rows = kernels.by_type("whole_rows")

    def prepare(self, weight: Sequence[ChannelWeight], bias: torch.Tensor | None) -> _Packed:
        """Pack the parts of a stack together."""
        return self._packed(*_stacked(weight), bias)

    def _packed(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> _Packed:
        out, inputs = codes.shape
        panels, padded = -(-out // PANEL), -(-inputs // STEP) * STEP
        data = self._arena.empty((panels * PANEL * padded,), torch.int8)
        extra = torch.empty(panels * PANEL, dtype=torch.int32)
        self._pack(codes.contiguous().data_ptr(), out, inputs, padded, data.data_ptr(), extra.data_ptr())
        missing = (0, panels * PANEL - out)
        bias = None if bias is None else F.pad(bias.float(), missing)
        return _Packed(data, F.pad(scales.float(), missing), extra, bias, out, inputs, padded)

    def gated(
        self, weight: Sequence[ChannelWeight], bias: torch.Tensor | None, op: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Pack gate and up; return their product, gated by `op` in one go."""
        if op not in self._gates:
            return None
        codes, scales = _stacked(weight)
        stacked = self._packed(
            interleaved(codes), interleaved(scales), None if bias is None else interleaved(bias)
        )
        return self._gated(stacked, replace(stacked, out_features=codes.shape[0] // 2), op)

    def _multiply(self, kernel: Functions, x: torch.Tensor, packed: _Packed, y: torch.Tensor) -> None:
        rows = x.shape[0]
        numbers = x.new_empty((rows, packed.padded), dtype=torch.uint8)
        scales = x.new_empty((rows,), dtype=torch.float32)
        self._round[x.dtype](
            x.data_ptr(),
            rows,
            x.stride(0),
            packed.in_features,
            packed.padded,
            numbers.data_ptr(),
            scales.data_ptr(),
        )
        kernel[x.dtype](
            numbers.data_ptr(),
            rows,
            packed.padded,
            scales.data_ptr(),
            packed.data.data_ptr(),
            packed.out_features,
            packed.scales.data_ptr(),
            packed.extra.data_ptr(),
            pointer(packed.bias),
            y.data_ptr(),
            packed.out_features,
        )

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `ids` [N] int64 of the weight, [N, in] in `dtype`."""
        packed: _Packed = prepared
        out = torch.empty((ids.shape[0], packed.in_features), dtype=dtype)
        self._rows[dtype](
            ids.data_ptr(),
            ids.shape[0],
            packed.data.data_ptr(),
            packed.scales.data_ptr(),
            packed.in_features,
            packed.padded,
            out.data_ptr(),
        )
        return out


def _stacked(parts: Sequence[ChannelWeight]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
