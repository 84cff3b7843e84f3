"""Whole numbers of a few bits in words of 32, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import QuantizedWeights
from headrace.core.interfaces.quantization import GroupedWeight

__all__ = ["asymmetric", "scales_of_groups", "unpacked_words"]


def unpacked_words(
    words: torch.Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """int32 words -> uint8 numbers, 32 / bits times as many along `dim`, lowest bits first.

    order: number i of a word lies in place `order[i]`; None: in place i.
    """
    places = range(32 // bits) if order is None else order
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    wide: torch.Tensor = words.movedim(dim, -1)[..., None] >> shifts
    numbers = torch.bitwise_and(wide, 2**bits - 1).to(torch.uint8)
    return numbers.flatten(-2).movedim(-1, dim).contiguous()


def scales_of_groups(name: str, out: int, weights: QuantizedWeights) -> torch.Tensor:
    """Return the scales of a layer, [out, groups]; stored are [groups, out]. Raises `CheckpointError`."""
    stored = weights.stored(f"{name}.scales")
    if stored.ndim != 2 or stored.shape[1] != out:
        raise CheckpointError(
            f"{name}.scales has the shape {list(stored.shape)}; the last must be {out}, one for each output"
        )
    return stored.T


def asymmetric(
    codes: torch.Tensor,
    bits: int,
    group_size: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    order: torch.Tensor | None = None,
) -> GroupedWeight:
    """A weight of numbers (code - zero) · scale, with a zero for every group, [out, groups].

    Where all zeros are one, it is that of the codes. Else -zero · scale becomes a minimum, in float32, where it is
    exact: scales are float16 or bfloat16, and zeros at most 256.
    """
    first = int(zeros.flatten()[0])
    if bool((zeros == first).all()) and first < 2**bits:
        return GroupedWeight(codes, bits, first, group_size, scales.contiguous(), order=order)
    wide = scales.float().contiguous()
    lowest = (-zeros.float() * wide).contiguous()
    # Packed numbers of 8 bits are signed: theirs is the middle.
    middle = 128 if bits == 8 else 0
    if middle:
        lowest += middle * wide
    return GroupedWeight(codes, bits, middle, group_size, wide, lowest, order=order)
