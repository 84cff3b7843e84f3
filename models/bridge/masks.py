"""Which tokens a layer sees, read from the mask function that transformers made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OTHER", "Sight", "sight_of"]

Sight = int | None | str
"""None: every earlier token. w: itself and the w - 1 before it. `OTHER`: neither."""

OTHER = "other"


def sight_of(mask_function: Callable[..., Any], length: int) -> Sight:
    """Return what a mask function lets a token see, judged by rows of a sequence of `length` tokens.

    A window of at least `length` is none. The rows are the last two, which tell a window from a chunk, the middle
    one and the first two.
    """
    with torch.device("cpu"):
        keys = torch.arange(length)
        zero = torch.zeros((), dtype=torch.long)
        seen = {}
        for row in {length - 1, length - 2, length // 2, 1, 0}:
            visible = mask_function(zero, zero, torch.tensor(row), keys)
            seen[row] = torch.as_tensor(visible).expand(length)
        window = int(seen[length - 1].sum())
        rows = [torch.equal(visible, (keys <= row) & (keys > row - window)) for row, visible in seen.items()]
    if not all(rows):
        return OTHER
    return None if window >= length else window
