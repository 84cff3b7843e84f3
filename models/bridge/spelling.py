"""What checkpoints call a model's tensors, and how they cut them, which is not always what the class does today.

transformers renames and merges tensors when it loads (experts saved one by one become one tensor), and knows the way
back for saving. That way is walked here, without data, to learn names, and with views, to fill parameters in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import ModelBuild, Weights

__all__ = ["Spelling", "take_pieces"]


class _KeepViews(TorchFunctionMode):
    """Within it a copy of a tensor is the tensor itself, so that pieces stay views of what they were cut from."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.clone, torch.clone, torch.Tensor.contiguous):
            return args[0]
        return func(*args, **(kwargs or {}))


def _as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with _KeepViews():
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


class Spelling:
    """A tensor's name in a checkpoint: today's or the saved one, each with or without the decoder's prefix."""

    def __init__(self, weights: Weights, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._weights = weights
        self._prefix = f"{model.base_model_prefix}."
        blanks = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        names = {id(blank): name for name, blank in blanks.items()}
        saved = _as_saved(model, dict(blanks))
        self._renamed = {names[id(blank)]: name for name, blank in saved.items() if id(blank) in names}

    def is_whole(self, name: str) -> bool:
        """Whether the checkpoint keeps this tensor as one, as the model has it."""
        return name in self._renamed or self.of(name) in self._weights

    def of(self, name: str) -> str:
        """Return the name that the checkpoint has; the saved one where it has none."""
        saved = self._renamed.get(name, name)
        tries = (saved, name, saved.removeprefix(self._prefix), name.removeprefix(self._prefix))
        return next((one for one in tries if one in self._weights), saved)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it under any of its names."""
        return self.of(name) in self._weights


def take_pieces(
    build: ModelBuild, model: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Take parameters that the checkpoint keeps in pieces.

    Raises `CheckpointError` where pieces are no plain cuts.
    """
    if not shapes:
        return {}
    filled = {n: torch.empty(shape, dtype=build.dtype, device=build.device) for n, shape in shapes.items()}
    storages = {tensor.untyped_storage().data_ptr() for tensor in filled.values()}
    for name, piece in _as_saved(model, dict(filled)).items():
        if piece.untyped_storage().data_ptr() not in storages:
            raise CheckpointError(f"the checkpoint keeps {name!r} in a form that the bridge cannot read")
        piece.copy_(build.weights.take(name, tuple(piece.shape)))
    return filled
