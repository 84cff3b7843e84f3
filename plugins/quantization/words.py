"""Whole numbers of a few bits in words of 32, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.interfaces.quantization import GroupedWeight

__all__ = ["asymmetric", "packed_words", "unpacked_words"]


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


def packed_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 numbers [out, in] -> int32 words [out, in · bits / 32], lowest bits first, the last filled up with 0."""
    many = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % many)).to(torch.int64)
    shifts = torch.arange(many, dtype=torch.int64) * bits
    words = (padded.view(numbers.shape[0], -1, many) << shifts).sum(-1)
    # The highest bit is the sign's.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


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
