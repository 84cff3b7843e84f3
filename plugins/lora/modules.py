"""Which products a model has that adapters can add to, and where their parts stand in a slot's line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.interfaces.wrapping import BLOCK, Segment

__all__ = ["Piece", "Product", "Target", "Targets"]


@dataclass(frozen=True)
class Piece:
    """Outputs of one name that lie together among a product's sums; see `Segment` for columns."""

    name: int
    """Index of the name among those stacked in the product."""
    start: int
    end: int
    """Outputs [start, end) of that name."""
    first: int
    step: int

    @property
    def columns(self) -> torch.Tensor:
        """Columns of the sums, int64 [end - start]."""
        index = torch.arange(self.end - self.start)
        return self.first + index // BLOCK * self.step + index % BLOCK


@dataclass(frozen=True)
class Product:
    """One product of the model; the names stacked in it are modules that adapters know."""

    index: int
    names: tuple[str, ...]
    out_features: tuple[int, ...]
    in_features: int
    pieces: tuple[Piece, ...]
    offset: int
    """Of its part in a slot's line: (A, rank) a name, then B a piece."""
    is_embedding: bool = False

    @property
    def width(self) -> int:
        """Entries in a slot's line."""
        return 2 * len(self.names) + len(self.pieces)

    @cached_property
    def pieces_table(self) -> npt.NDArray[np.int64]:
        """What the kernel reads of its pieces, [pieces, 4]; it stays where it is."""
        return np.array([[p.name, p.first, p.step, p.end - p.start] for p in self.pieces], dtype=np.int64)


@dataclass(frozen=True)
class Target:
    """A module by name."""

    product: Product
    place: int
    """Of its name among those stacked in the product."""

    @property
    def shapes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.product.in_features, self.product.out_features[self.place]


class Targets:
    """All products of one model, filled while it is built."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self._by_name: dict[str, Target] = {}

    def add(
        self,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        segments: Sequence[Segment],
        *,
        is_embedding: bool = False,
    ) -> Product:
        """Note a product."""
        product = Product(
            len(self.products),
            tuple(names),
            tuple(out_features),
            in_features,
            tuple(_pieces(out_features, segments)),
            self.line,
            is_embedding,
        )
        self.products.append(product)
        for place, name in enumerate(names):
            self._by_name[name] = Target(product, place)
        return product

    @property
    def line(self) -> int:
        """Entries of a slot's line."""
        return self.products[-1].offset + self.products[-1].width if self.products else 0

    def get(self, name: str) -> Target | None:
        """Return a module by the checkpoint's name."""
        return self._by_name.get(name)

    @property
    def names(self) -> list[str]:
        """All modules."""
        return list(self._by_name)


def _pieces(out_features: Sequence[int], segments: Sequence[Segment]) -> Iterator[Piece]:
    """Cut segments at the borders of names."""
    begin = 0
    for place, size in enumerate(out_features):
        for segment in segments:
            start, end = max(begin, segment.start), min(begin + size, segment.end)
            if start >= end:
                continue
            skipped = start - segment.start
            if skipped % BLOCK and segment.step != BLOCK:
                raise ValueError(f"outputs from {start} on begin inside a block of {segment}")
            first = segment.first + skipped // BLOCK * segment.step + skipped % BLOCK
            yield Piece(place, start - begin, end - begin, first, segment.step)
        begin += size
