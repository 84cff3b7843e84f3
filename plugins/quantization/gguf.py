"""`gguf`: the blocks of a GGUF file, run as they are stored.

Codes and scales are taken out of the encoded bytes once, and packed in the order in which products read them; nothing
is rounded. What is stored as plain numbers, or in an encoding that no kernel runs, is held as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import Checkpoint, QuantizedWeights
from headrace.core.interfaces.quantization import GroupedWeight
from headrace.plugins.quantization.gguf_blocks import UNPACKERS

__all__ = ["GGUFMethod"]


class GGUFMethod:
    """Implements `QuantizationMethod`, and `WeightQuantizer`: it keeps nothing of a checkpoint."""

    name = "gguf"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Nothing: without being asked for, a GGUF file is decoded to the type to compute in."""
        return False

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why there is nothing to run packed."""
        found = {tensor.encoding for tensor in checkpoint.tensors.values()}
        if found.intersection(UNPACKERS):
            return []
        return [
            f"it has no tensors of a GGUF encoding that runs packed ({', '.join(UNPACKERS)}); it has "
            f"{', '.join(sorted(found)) or 'none'}"
        ]

    def begin(self, checkpoint: Checkpoint) -> GGUFMethod:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> GroupedWeight | None:
        """Return the weight of a product, packed as stored; None where it is not stored so."""
        unpack = UNPACKERS.get(weights.encoding(f"{name}.weight"))
        return None if unpack is None else unpack(weights.encoded(f"{name}.weight", shape))
