"""What decides the last bit of what torch computes here."""

from __future__ import annotations

import torch

__all__ = ["torch_numerics"]


def torch_numerics() -> str:
    """Return torch's version and the instructions it takes on this processor."""
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
