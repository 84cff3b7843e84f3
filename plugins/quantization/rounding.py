"""From numbers to codes and scales: what is lost is kept small."""

from __future__ import annotations

import torch

__all__ = ["by_channel", "by_group"]

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""How much of a group's range its codes may cover: what lies outside is cut off, what lies inside is finer."""


def by_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [out, in] float32 to whole numbers from -127 to 127, int8, and a scale for each output [out]."""
    scales = weight.abs().amax(dim=1) / 127
    divisors = torch.where(scales > 0, scales, torch.ones(()))
    return torch.round(weight / divisors[:, None]).clamp_(-127, 127).to(torch.int8), scales


def by_group(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [out, in] float32 to codes of 4 bits, uint8 with 8 for zero, and bfloat16 scales [out, groups].

    For each group the range is tried in a few widths; the codes with the least squared error stay.
    """
    groups = weight.view(weight.shape[0], -1, size)
    widest = groups.abs().amax(dim=2) / 7
    least = torch.full_like(widest, torch.inf)
    kept, scales = torch.zeros_like(groups), torch.zeros_like(widest)
    for share in SHARES:
        # Codes are chosen for the scale as it is stored.
        tried = (widest * share).bfloat16().float()
        divisors = torch.where(tried > 0, tried, torch.ones(()))[:, :, None]
        numbers = torch.round(groups / divisors).clamp_(-8, 7)
        errors = (numbers * tried[:, :, None] - groups).square_().sum(dim=2)
        better = errors < least
        least = torch.where(better, errors, least)
        scales = torch.where(better, tried, scales)
        kept = torch.where(better[:, :, None], numbers, kept)
    return (kept + 8).to(torch.uint8).view(weight.shape), scales.bfloat16()
