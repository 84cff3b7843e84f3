"""A checkpoint's tensors as a model takes them, with an account of what was taken."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from headrace.core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from headrace.core.interfaces import Checkpoint, CheckpointTensor

__all__ = ["CheckpointWeights"]

_STORED: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)
_USELESS = ("rotary_emb.inv_freq", "self_attn.masked_bias")
"""Ends of the names of buffers that old checkpoints carry along: they follow from the configuration."""


class CheckpointWeights:
    """See `headrace.core.interfaces.Weights` and `QuantizedWeights`.

    dtype: what every tensor is decoded to.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._taken: set[str] = set()
        self._bytes: dict[str, int] = {}
        self.dtype = dtype

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._checkpoint.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in `dtype`. Raises `CheckpointError` if missing or of another shape."""
        decoded = self._tensor(name, shape).decode(self.dtype)
        self._bytes[name] = decoded.nbytes
        return decoded

    @property
    def bytes(self) -> int:
        """Memory of all that was taken, each tensor once, as it is held."""
        return sum(self._bytes.values())

    def hold(self, name: str, nbytes: int) -> None:
        """Count the weight `name` as `nbytes`: it is held in a form of its own."""
        self._bytes[name] = nbytes

    def encoding(self, name: str) -> str:
        """How a tensor is stored; empty where it is not there."""
        tensor = self._checkpoint.tensors.get(name)
        return "" if tensor is None else tensor.encoding

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor in the type it is stored in. Raises as `take`, and for encodings that are no type."""
        tensor = self._tensor(name, shape)
        dtype = _STORED.get(tensor.encoding)
        if dtype is None:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name!r} is stored as {tensor.encoding}; it must be one of "
                f"{', '.join(_STORED)}"
            )
        return tensor.decode(dtype)

    def encoded(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [rows, bytes a row]. Raises as `take`."""
        return self._tensor(name, shape).read()

    def decoded(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as float32. Raises as `take`."""
        return self._tensor(name, shape).decode(torch.float32)

    def _tensor(self, name: str, shape: tuple[int, ...] | None) -> CheckpointTensor:
        tensors = self._checkpoint.tensors
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._checkpoint.path} has no tensor {name!r}{nearest(name, tensors)}, which the model needs"
            )
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name!r} has the shape {list(tensor.shape)}; the model's "
                f"configuration asks for {list(shape)}"
            )
        self._taken.add(name)
        return tensor

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
