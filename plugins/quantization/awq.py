"""`awq`: checkpoints of AWQ, 4 bits in groups, in the layout of its `gemm` version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.core.interfaces import Checkpoint, QuantizedWeights
from headrace.core.interfaces.quantization import GroupedWeight
from headrace.plugins.quantization.stated import not_stated, states
from headrace.plugins.quantization.words import asymmetric, scales_of_groups, unpacked_words

__all__ = ["AWQMethod"]

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs lies."""


class AWQMethod:
    """Implements `QuantizationMethod`, and `WeightQuantizer`, for `quant_method: awq`."""

    name = "awq"

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether the configuration says awq."""
        return states(config, self.name)

    def why_not(self, checkpoint: Checkpoint) -> list[str]:
        """Reasons why its fields are not known here."""
        if not self.claims(checkpoint.config):
            return [not_stated(self.name)]
        stated, reasons = checkpoint.config["quantization_config"], []
        bits = stated.get("bits", stated.get("w_bit"))
        if bits != BITS:
            reasons.append(f"bits is {bits!r}; known: {BITS}")
        if str(stated.get("version", "gemm")).lower() != "gemm":
            reasons.append(f"version is {stated['version']!r}; known: gemm")
        return reasons

    def begin(self, checkpoint: Checkpoint) -> AWQMethod:
        """Start on a checkpoint."""
        return self

    def weight(self, name: str, shape: tuple[int, int], weights: QuantizedWeights) -> GroupedWeight | None:
        """Return the weight of a product; None where it is stored as numbers."""
        if f"{name}.qweight" not in weights:
            return None
        out, inputs = shape
        many = 32 // BITS
        scales = scales_of_groups(name, out, weights)
        groups = scales.shape[1]
        words = weights.stored(f"{name}.qweight", (inputs, out // many))
        codes = unpacked_words(words, BITS, dim=1, order=PLACES).T.contiguous()
        size = -(-inputs // groups)
        if f"{name}.qzeros" in weights:
            zero_words = weights.stored(f"{name}.qzeros", (groups, out // many))
            zeros = unpacked_words(zero_words, BITS, dim=1, order=PLACES).T
        else:
            zeros = torch.full((out, groups), 2 ** (BITS - 1), dtype=torch.uint8)
        return asymmetric(codes, BITS, size, scales, zeros)
