"""A check of a built model: tokens of different requests meet in the attention and nowhere else."""

from __future__ import annotations

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import AttentionLayer
from headrace.models.bridge.model import BridgeModel

__all__ = ["check_tokens_stand_alone"]

_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 0.1
"""How far, relative to its length, a token's hidden state may be off: rounding, with routing to experts on top."""


class _Apart:
    """A context in which no token sees another."""

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, H·D] that depends on a token's own q, k and v, and so on its own position."""
        group = layer.num_heads // layer.num_kv_heads
        return (q + k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1)).flatten(1)


def check_tokens_stand_alone(model: BridgeModel, name: str, like: torch.Tensor) -> None:
    """Raise `CheckpointError` unless a token gives the same whatever stands beside it, and wherever it stands.

    A convolution or a recurrent state beside the attention, or positions counted from the row's begin, would make
    requests that share a step disturb each other. `like` has the model's type and device.
    """
    generator = torch.Generator().manual_seed(0)
    first, token, other = (
        torch.randn((3, model.hidden_size), generator=generator)
        .to(like)
        .unbind(0)  # as large as a normed state
    )
    ahead, _ = model.forward(torch.stack((first, token)), torch.tensor([0, 1], device=like.device), _Apart())
    alone, _ = model.forward(torch.stack((token, other)), torch.tensor([1, 0], device=like.device), _Apart())
    one, two = ahead[1].float(), alone[0].float()
    off = float((one - two).norm() / one.norm().clamp(min=1e-6))
    if off > _TOLERANCE.get(like.dtype, _COARSE):
        raise CheckpointError(
            f"{name} cannot run through transformers' attention interface: a token's result depends on its "
            "neighbours by other ways than attention, or on its place instead of its position (off by "
            f"{off:.2g} of its size)"
        )
