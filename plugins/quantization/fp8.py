"""`fp8`: checkpoints whose weights are floats of 8 bits, with scales for the whole weight, outputs or blocks.

No kernel computes in such floats here: weights are decoded when they are loaded, to the type to compute in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Checkpoint, QuantizedWeights
from headrace.plugins.quantization.stated import not_stated, states

__all__ = ["FP8Method", "scaled"]

STORED = ("F8_E4M3", "F8_E5M2")


def scaled(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], what: str) -> torch.Tensor:
    """Multiply weight [out, in] by scales for all of it, for outputs, or for blocks, in float32.

    scales: one number, [out] or [out, 1], or one for each block of the shape `block`.
    Raises `CheckpointError` naming `what` where neither fits.
    """
    wide, (out, inputs) = scales.float(), weight.shape
    if wide.numel() == 1:
        return weight.float() * wide.reshape(())
    if wide.shape in ((out,), (out, 1)):
        return weight.float() * wide.reshape(out, 1)
    if wide.shape == (-(-out // block[0]), -(-inputs // block[1])):
        spread = wide.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :inputs]
        return weight.float() * spread
    raise CheckpointError(
        f"{what} has the shape {list(scales.shape)}; a weight of {[out, inputs]} has one scale, {out}, or one for "
        f"each block of {list(block)}"
    )


class FP8Method:
    """Implements `QuantizationMethod` for `quant_method: fp8`."""

    name = "fp8"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration says fp8."""
        return states(config, self.name)

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why it is not what its configuration says."""
        if not self.claims(checkpoint.config):
            return [not_stated(self.name)]
        block = checkpoint.config["quantization_config"].get("weight_block_size")
        if block is None or (len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
            return []
        return [f"weight_block_size is {block!r}; it must be two whole numbers above 0"]

    def begin(self, checkpoint: Checkpoint) -> _Quantizer:
        """Start on a checkpoint."""
        rows, columns = checkpoint.config["quantization_config"].get("weight_block_size") or (1, 1)
        return _Quantizer((rows, columns))


class _Quantizer:
    def __init__(self, block: tuple[int, int]) -> None:
        self._block = block

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> torch.Tensor | None:
        """Return the numbers of a product's weight; None where it is not stored in 8 bits."""
        if weights.encoding(f"{name}.weight") not in STORED:
            return None
        found = [key for key in ("weight_scale_inv", "weight_scale") if f"{name}.{key}" in weights]
        if not found:
            raise CheckpointError(
                f"{name}.weight is stored in 8 bits, and has neither weight_scale nor weight_scale_inv"
            )
        weight = weights.stored(f"{name}.weight", shape)
        if f"{name}.input_scale" in weights:
            # Activations are not rounded here.
            weights.stored(f"{name}.input_scale")
        return scaled(weight, weights.stored(f"{name}.{found[0]}"), self._block, f"{name}.{found[0]}")
