"""Products as plugins wrap them: with sums to be had before they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from headrace.core.interfaces import Embedding, Linear, LinearWrapper, Segment, SummedProduct

__all__ = ["Product", "Summable", "Wrapping"]

Op = Callable[..., Any]


class Summable(Protocol):
    """A product of a linear format, bound to its weights."""

    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        ...

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out] float32."""
        ...


class Product:
    """A product, whoever computes it, with its sizes."""

    def __init__(
        self, apply: Callable[[torch.Tensor], torch.Tensor], in_features: int, out_features: int
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self._apply = apply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._apply(x)


class _GatedInTwo:
    """A product of gate and up, then its activation; a `SummedProduct`."""

    def __init__(self, inner: Summable, gate: Op, narrow: Op) -> None:
        self._rounded = _Rounded(inner, narrow)
        self.segments = self._rounded.segments
        self.sums = inner.sums
        self._gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        gated: torch.Tensor = self._gate(self._rounded(x))
        return gated

    def finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, 2 · out] float32 -> [N, out]."""
        gated: torch.Tensor = self._gate(self._rounded.finish(sums, dtype))
        return gated


class _Rounded:
    """A product as it is; a `SummedProduct`."""

    def __init__(self, inner: Summable, narrow: Op) -> None:
        self.segments = (Segment(0, inner.out_features, 0),)
        self.sums = inner.sums
        self._inner = inner
        self._narrow = narrow

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._inner(x)

    def finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, out] float32 -> [N, out]."""
        if dtype == sums.dtype:
            return sums
        rounded: torch.Tensor = self._narrow(sums, dtype)
        return rounded


class Wrapping:
    """Lets every plugin put what it likes around the parts of one model; without any, parts stay as they are.

    op: finds an op by name.
    """

    def __init__(self, wrappers: Sequence[LinearWrapper], op: Callable[[str], Op]) -> None:
        self._wrappers = tuple(wrappers)
        self._op = op

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def product(
        self, inner: Summable, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Linear:
        """Return the product a model gets."""
        return self._around(
            _Rounded(inner, self._op("narrow")),
            names,
            out_features,
            in_features,
            inner.out_features,
        )

    def gated(
        self,
        apply: Callable[[torch.Tensor], torch.Tensor] | None,
        in_two: Callable[[], Summable],
        gate: str,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
    ) -> Linear:
        """Return the gated product a model gets.

        apply: in one go, where the format can; it is used if its sums can be had.
        in_two: makes the product alone, otherwise.
        """
        if not isinstance(apply, SummedProduct):
            apply = _GatedInTwo(in_two(), self._op(gate), self._op("narrow"))
        return self._around(apply, names, out_features, in_features, sum(out_features) // 2)

    def _around(
        self,
        product: SummedProduct,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        size: int,
    ) -> Linear:
        for wrapper in self._wrappers:
            product = wrapper.wrap(self._op, names, out_features, product, in_features)
        return Product(product, in_features, size)

    def head(self, name: str, head: Linear) -> Linear:
        """Return the output projection a model gets."""
        for wrapper in self._wrappers:
            head = wrapper.wrap_head(self._op, name, head)
        return head

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        """Return the lookup a model gets."""
        for wrapper in self._wrappers:
            lookup = wrapper.wrap_embedding(self._op, name, lookup, shape)
        return lookup
