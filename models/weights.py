"""A checkpoint's tensors as a model takes them, with an account of what was taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from headrace.core.interfaces import Checkpoint

__all__ = ["CheckpointWeights"]

_USELESS = ("rotary_emb.inv_freq", "self_attn.masked_bias")
"""Ends of the names of buffers that old checkpoints carry along: they follow from the configuration."""


class CheckpointWeights:
    """See `headrace.core.interfaces.Weights`.

    dtype: what every tensor is decoded to.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._taken: set[str] = set()
        self.dtype = dtype
        self.bytes = 0
        """Of all tensors taken, as decoded."""

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._checkpoint.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in `dtype`. Raises `CheckpointError` if missing or of another shape."""
        tensors = self._checkpoint.tensors
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._checkpoint.path} has no tensor {name!r}{nearest(name, tensors)}, which the model needs"
            )
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name!r} has the shape {list(tensor.shape)}; the model's "
                f"configuration asks for {list(shape)}"
            )
        self._taken.add(name)
        decoded = tensor.decode(self.dtype)
        self.bytes += decoded.nbytes
        return decoded

    def check_all_taken(self) -> None:
        """Refuse a checkpoint with tensors the model has no use for: it may be another model than it says.

        Empty tensors and buffers known to be useless are passed over. Raises `CheckpointError` naming the others.
        """
        left = [
            name
            for name, tensor in self._checkpoint.tensors.items()
            if name not in self._taken and 0 not in tensor.shape and not name.endswith(_USELESS)
        ]
        if left:
            shown = ", ".join(left[:10]) + (f" and {len(left) - 10} more" if len(left) > 10 else "")
            raise CheckpointError(
                f"{self._checkpoint.path} has tensors that the model does not use, so it is not the architecture its "
                f"configuration says ({self._checkpoint.config.get('architectures')}): {shown}"
            )
