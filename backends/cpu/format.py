"""What linear formats of weights in panels have in common: they differ in packing, and in how a kernel is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch

from headrace.backends.cpu.arena import GrowingArena
from headrace.backends.cpu.gated import GatedPanels
from headrace.backends.cpu.library import Functions, Kernels

__all__ = ["PackedWeight", "PanelFormat"]


class PackedWeight(Protocol):
    """A weight as a format's kernels read it."""

    @property
    def out_features(self) -> int:
        """Outputs of its product, those that only fill a panel left out."""
        ...


P = TypeVar("P", bound=PackedWeight)


class PanelFormat(ABC, Generic[P]):
    """Products with packed weights.

    linear: the kernel of products rounded to the inputs' type; with `_silu` and `_gelu` behind it, of gated ones.
    logits: the kernel of products in float32.
    """

    row_invariant = True

    def __init__(self, kernels: Kernels, linear: str, logits: str) -> None:
        self._arena = GrowingArena()
        self._linear = kernels.by_type(linear)
        self._logits = kernels.by_type(logits)
        self._gates = {
            f"{name}_mul": (kernels.by_type(f"{linear}_{name}"), kernels.by_type(f"{name}_sums"))
            for name in ("silu", "gelu")
        }

    @abstractmethod
    def _multiply(self, kernel: Functions, x: torch.Tensor, packed: P, y: torch.Tensor) -> None:
        """Write the product of x [N, in] and a packed weight into y [N, out]."""

    def apply(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        y = x.new_empty(x.shape[0], prepared.out_features)
        self._multiply(self._linear, x, prepared, y)
        return y

    def logits(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """[N, in] -> [N, out] float32, not rounded on the way."""
        y = x.new_empty((x.shape[0], prepared.out_features), dtype=torch.float32)
        self._multiply(self._logits, x, prepared, y)
        return y

    def _gated(self, stacked: P, packed: P, op: str) -> GatedPanels:
        """Return a gated product. stacked: interleaved gate and up; packed: the same with half the outputs."""
        linear, finish = self._gates[op]
        return GatedPanels(
            lambda x, y: self._multiply(linear, x, packed, y),
            lambda x: self.logits(x, stacked),
            finish,
            packed.out_features,
        )
