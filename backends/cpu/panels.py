"""Panels: the outputs that lie together in a packed weight, and what becomes of rows of gate and up in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["PANEL", "interleaved"]

PANEL = 32
"""Outputs that lie together."""


def interleaved(stacked: torch.Tensor) -> torch.Tensor:
    """[2 · out, …] -> [panels · 32, …]: the halves' rows in turns of 16, with zeros for those that are missing."""
    half = stacked.shape[0] // 2
    missing = -half % (PANEL // 2)
    parts = [
        F.pad(part, (0,) * (2 * part.ndim - 1) + (missing,)).unflatten(0, (-1, PANEL // 2))
        for part in stacked.split(half)
    ]
    return torch.stack(parts, dim=1).flatten(0, 2)
