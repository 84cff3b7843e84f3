"""Methods that quantize a checkpoint's numbers while it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.interfaces import Checkpoint, QuantizedWeights
from headrace.core.interfaces.quantization import ChannelWeight, GroupedWeight

__all__ = ["W8A8", "Int8", "by_channel"]


def by_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [out, in] float32 to whole numbers from -127 to 127, int8, and a scale for each output [out]."""
    scales = weight.abs().amax(dim=1) / 127
    divisors = torch.where(scales > 0, scales, torch.ones(()))
    return torch.round(weight / divisors[:, None]).clamp_(-127, 127).to(torch.int8), scales


class W8A8:
    """`w8a8`: 8 bits a weight with a scale for each output, and inputs rounded to 8 bits, each row by its own scale.

    Quicker than `int8` where many rows are computed at once, and less exact.
    """

    name = "w8a8"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Nothing: it is asked for."""
        return False

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Nothing is in its way."""
        return []

    def begin(self, checkpoint: Checkpoint) -> W8A8:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> ChannelWeight:
        """Return the weight of a product, rounded."""
        return ChannelWeight(*by_channel(weights.decoded(f"{name}.weight", shape)))


class Int8:
    """`int8`: 8 bits a weight and a float32 scale for each output; activations stay as they are.

    Every product, the output projection included; a tied embedding is looked up in it.
    """

    name = "int8"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Nothing: it is asked for."""
        return False

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Nothing is in its way."""
        return []

    def begin(self, checkpoint: Checkpoint) -> Int8:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> GroupedWeight:
        """Return the weight of a product, rounded."""
        numbers, scales = by_channel(weights.decoded(f"{name}.weight", shape))
        return GroupedWeight(numbers.view(torch.uint8) ^ 128, 8, 128, shape[1], scales[:, None])
