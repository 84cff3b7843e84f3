"""The contract of what stands around a model's products: it adds to them, row by row, before they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace.core.interfaces.runner import RunnerListener

if TYPE_CHECKING:
    import torch

    from headrace.core.config import EngineConfig
    from headrace.core.interfaces.model import Embedding, Linear
    from headrace.core.plugin.registry import Registry

__all__ = ["BLOCK", "LinearWrapper", "Segment", "SummedProduct", "WrapContext"]

BLOCK = 16
"""Sums of one segment lie together in blocks of so many."""


@dataclass(frozen=True)
class Segment:
    """Where some outputs of a product lie among its sums.

    Output `start + i` of the stacked weights is the sum in column `first + i // BLOCK * step + i % BLOCK`.
    """

    start: int
    end: int
    """Outputs [start, end) of the stacked weights."""
    first: int
    step: int = BLOCK


@runtime_checkable
class SummedProduct(Protocol):
    """A product whose sums can be had before they are rounded, gated or both.

    `finish(sums(x), x.dtype)` is, bit for bit, what the call gives.
    """

    @property
    def segments(self) -> Sequence[Segment]:
        """All outputs of the stacked weights, in their order."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        ...

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, S] float32, a tensor of its own, bias included."""
        ...

    def finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, S] float32 -> [N, out] in `dtype`; may return `sums` itself."""
        ...


@dataclass(frozen=True)
class WrapContext:
    """Worker: for linear wrappers, which are made before the model."""

    config: EngineConfig
    registry: Registry
    device: str
    dtype: str
    """What the model computes in."""


class LinearWrapper(RunnerListener):
    """Stands around a model's products, and hears of steps as any runner listener does. Override what you need.

    A forward pass is recorded twice where there are wrappers: with all of them at rest, as the model is, and with all
    at work. Which runs is decided step by step: by `active`, after `on_batch`.
    """

    name = "linear_wrapper"
    active: bool = False
    """Whether this step needs it; also set by whoever records a pass. At rest it must not be felt."""

    def wrap(
        self,
        op: Callable[[str], Callable[..., Any]],
        names: Sequence[str],
        out_features: Sequence[int],
        product: SummedProduct,
        in_features: int,
    ) -> SummedProduct:
        """Return what the model gets in place of a product.

        op: finds an op by name, and counts it as one the model uses.
        names, out_features: of the checkpoint's weights that are stacked in it, in order.
        """
        return product

    def wrap_embedding(
        self,
        op: Callable[[str], Callable[..., Any]],
        name: str,
        lookup: Embedding,
        shape: tuple[int, int],
    ) -> Embedding:
        """Return what the model gets in place of a lookup in a weight of `shape` [V, C]."""
        return lookup

    def wrap_head(
        self,
        op: Callable[[str], Callable[..., Any]],
        name: str,
        head: Linear,
    ) -> Linear:
        """Return what the model gets in place of its output projection, [S, C] -> [S, V] float32."""
        return head

    def on_head_rows(self, rows: Sequence[int]) -> None:
        """The next call of the output projection is of these rows of the step; without it, of nobody's."""
